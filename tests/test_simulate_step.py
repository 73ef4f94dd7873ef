"""Simulations of the real classes: exact states, exact extrapolation, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ftdash.engine.model.load import load_preset
from ftdash.engine.plan import Checkpointing, ExpertLora, Loss, Method, Plan, Strategy
from ftdash.engine.simulate.request import Run, SimulationError, request_of
from ftdash.engine.simulate.run import _converse, read_runs, simulate

pytestmark = pytest.mark.slow

SMALL = {"model": "qwen3-0.6b", "gpus": 4, "seq_len": 512}
# The class has 28 layers; a shorter copy is enough to show that depth is linear.
DEPTH = 9


def runs_at(plan: Plan, layer_counts: tuple[int, ...]) -> list[Run]:
    request = msgspec.structs.replace(request_of(plan), layer_counts=layer_counts)
    answers = list(_converse(request))
    assert not [answer.error for answer in answers if answer.error]
    return [answer.run for answer in answers if answer.run is not None]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"checkpointing": Checkpointing.NONE},
        {"method": Method.LORA, "loss": Loss.FUSED},
        {"strategy": Strategy.HSDP, "replicate": 2},
        {"strategy": Strategy.FSDP_NO_RESHARD},
    ],
    ids=["full", "no-checkpointing", "lora-fused", "hsdp", "no-reshard"],
)
def test_four_and_six_layers_give_a_deeper_model_exactly(choices: dict) -> None:
    low, high, deep = runs_at(Plan(**{**SMALL, **choices}), (4, 6, DEPTH))
    extrapolated, real = read_runs([low, high], DEPTH, 0.0), read_runs([deep], DEPTH, 0.0)
    assert extrapolated.allocated == real.allocated
    assert extrapolated.peak_part == real.peak_part
    assert extrapolated.trainable_params == real.trainable_params


def test_states_are_sharded_to_the_byte() -> None:
    found = simulate(Plan(**SMALL))
    params = load_preset("qwen3-0.6b").total_params
    assert found.trainable_params == params
    assert found.breakdown["Sharded Param"] == pytest.approx(4 * params / 4, rel=1e-3)
    assert found.breakdown["OptState"] == pytest.approx(8 * params / 4, rel=1e-3)


def test_two_replicas_hold_twice_the_states_of_one() -> None:
    sharded = simulate(Plan(**SMALL))
    replicated = simulate(Plan(**{**SMALL, "strategy": Strategy.HSDP, "replicate": 2}))
    ratio = replicated.breakdown["OptState"] / sharded.breakdown["OptState"]
    assert ratio == pytest.approx(2, rel=1e-3)


def test_expert_adapters_are_trained_and_only_those_asked_for() -> None:
    lora = {"model": "tiny-moe", "gpus": 2, "seq_len": 64, "method": Method.LORA, "lora_rank": 4}
    alone = simulate(Plan(**lora))
    scaled = simulate(Plan(**{**lora, "expert_lora": ExpertLora.SCALED}))
    experts = 4 * 8 * 1 * ((64 + 2 * 32) + (32 + 64))  # layers × experts × rank × fused stacks
    assert scaled.trainable_params - alone.trainable_params == experts


def test_a_model_that_fails_in_the_worker_says_why(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 60, "num_attention_heads": 8, "vocab_size": 100}'
    )
    with pytest.raises(SimulationError, match="simulation failed"):
        simulate(Plan(config=str(config), gpus=2))


def test_the_command_prints_its_json_and_progress_apart() -> None:
    command = ["simulate", "--model", "tiny-qwen3", "--gpus", "2", "--seq-len", "64", "--json"]
    done = subprocess.run(
        ["ftdash", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
        check=True,
    )
    answer = json.loads(done.stdout)
    assert {"allocated", "breakdown", "seconds"} <= answer.keys()
    assert answer["allocated"] == sum(answer["breakdown"].values())
    assert "4 layers" in done.stderr
