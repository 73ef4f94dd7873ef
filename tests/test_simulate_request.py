"""What a plan asks of the simulation, and what it refuses, in one line naming the flag."""

from __future__ import annotations

import pytest

from ftdash.engine.plan import (
    SWITCHES,
    Checkpointing,
    ExpertLora,
    Loss,
    Method,
    Offload,
    Optimizer,
    Plan,
    Precision,
    Strategy,
    flag_of,
)
from ftdash.engine.simulate.request import Peak, Request, Run, SimulationError, request_of
from ftdash.engine.simulate.run import read_runs


def request(**choices: object) -> Request:
    return request_of(Plan(**{"model": "qwen3-8b", "gpus": 8, **choices}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"strategy": Strategy.ZERO3}, "--strategy zero3 cannot be simulated: one of none, fsdp"),
        ({"method": Method.QLORA}, "--method qlora"),
        ({"checkpointing": Checkpointing.SELECTIVE}, "--checkpointing selective"),
        ({"loss": Loss.CHUNKED}, "--loss chunked"),
        ({"optimizer": Optimizer.MUON}, "--optimizer muon"),
        ({"precision": Precision.FP8}, "--precision fp8"),
        ({"offload": Offload.ALL}, "--offload all"),
        ({"tp": 2}, "--tp 2"),
        ({"ep": 4}, "--ep 4"),
        *(({field: True}, flag_of(field)) for field, known in SWITCHES.items() if not known.simulated),
        ({"modules_to_save": ("lm_head",)}, "--modules-to-save"),
        ({"model": "qwen-7b"}, "transformers has no class for 'qwen'"),
        ({"strategy": Strategy.NONE}, "--strategy none runs on one GPU"),
        ({"strategy": Strategy.HSDP, "replicate": 3}, "--replicate 3 does not divide --gpus 8"),
    ],
)
def test_what_fake_tensors_cannot_show_is_refused_by_flag(choices: dict, said: str) -> None:
    with pytest.raises(SimulationError) as caught:
        request(**choices)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_equal_blocks_are_extrapolated_and_others_run_whole() -> None:
    assert request().layer_counts == (4, 6)
    assert request(model="gemma-3-1b").layer_counts == (4, 6)  # windows differ, sizes do not
    assert request(model="deepseek-v2-lite").layer_counts == (27,)
    assert request(model="tiny-qwen3").layer_counts == (4,)


def test_full_training_keeps_fp32_masters_and_lora_a_16_bit_base() -> None:
    assert request().base_dtype == "float32"
    assert request(method=Method.LORA).base_dtype == "bfloat16"
    assert request(precision=Precision.BF16).base_dtype == "bfloat16"


def test_reduction_follows_the_strategy_unless_said() -> None:
    assert request().reduce_dtype == "bfloat16"
    assert request(reduce_dtype="fp32").reduce_dtype == "float32"


def test_an_moe_spells_out_its_targets_so_that_experts_stay_alone() -> None:
    moe = request(model="qwen3-30b-a3b", method=Method.LORA)
    assert set(moe.lora_targets) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert moe.expert_rank == 0
    scaled = request(model="qwen3-30b-a3b", method=Method.LORA, expert_lora=ExpertLora.SCALED)
    assert scaled.expert_rank == 1
    assert request(method=Method.LORA).lora_targets == ("all-linear",)


def test_replicas_default_to_one_per_node() -> None:
    assert request(gpus=16, strategy=Strategy.HSDP).replicate == 2
    assert request(gpus=16, strategy=Strategy.HSDP, replicate=4).replicate == 4


def test_two_depths_give_every_other_one_part_by_part() -> None:
    def at(layers: int, growing: int, constant: int) -> Run:
        parts = {
            "loss": Peak(constant, {"Temp": constant}),
            "backward block 1": Peak(growing, {"Activation": growing}),
        }
        return Run(layers, parts, total_params=layers * 10, trainable_params=layers * 2 + 1)

    found = read_runs([at(4, 400, 1000), at(6, 600, 1000)], layers=36, seconds=1.0)
    assert found.allocated == 3600
    assert found.peak_part == "backward block 1"
    assert found.breakdown == {"Activation": 3600}
    assert found.trainable_params == 73
    assert read_runs([at(4, 400, 1000), at(6, 600, 1000)], layers=8, seconds=1.0).peak_part == "loss"
