"""`plan --states-only` gives DeepSpeed's estimate, and says what it leaves out."""

from __future__ import annotations

import json

import pytest

from ftdash.engine.model.load import load_preset
from ftdash.tui.cli import run
from ftdash.tui.plan_states import largest_module

GIB = 2**30


def asked(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert run(["plan", "--states-only", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("gpus", "per_node"), [(1, 8), (4, 8), (8, 8), (16, 8), (6, 2)])
def test_the_estimate_is_the_formula_for_every_layout(gpus, per_node, capsys):
    shape = load_preset("qwen3-8b")
    found = asked(capsys, "--model", "qwen3-8b", "--gpus", str(gpus), "--gpus-per-node", str(per_node))
    rows = {row["title"]: row for row in found["model_states"]}
    params, nodes = shape.total_params, -(-gpus // per_node)
    assert rows["ZeRO-2"]["gpu_bytes"] == int(4 * params + 16 * params / gpus)
    assert rows["ZeRO-2, offload optimizer"]["gpu_bytes"] == 2 * params
    assert rows["ZeRO-3, offload optimizer"]["host_bytes"] == int(params * 16 / nodes * 1.5)
    assert rows["ZeRO-3, offload all"]["host_bytes"] == int(params * 18 / nodes * 1.5)
    assert rows["ZeRO-3, offload all"]["gpu_bytes"] == 4 * shape.vocab * shape.hidden


def test_the_plans_peak_holds_what_the_estimate_leaves_out(capsys):
    """The field's question: states that fit a GPU many times over, and a run that does not."""
    flags = ("--model", "qwen3-8b", "--gpus", "4", "--seq-len", "8192", "--checkpointing", "none")
    rows = asked(capsys, *flags)["model_states"]
    offloaded = next(row for row in rows if row["title"] == "ZeRO-3, offload all")
    assert offloaded["gpu_bytes"] < 3 * GIB
    assert offloaded["plan_allocated_bytes"] > 10 * offloaded["gpu_bytes"]


def test_an_embedding_is_largest_in_a_dense_model_and_the_experts_in_a_mixture():
    dense, mixture = load_preset("qwen3-8b"), load_preset("qwen3-30b-a3b")
    assert largest_module(dense) == dense.vocab * dense.hidden
    assert largest_module(mixture) == 128 * 3 * 768 * 2048


def test_units_and_the_hidden_factor_are_said(capsys):
    assert run(["plan", "--states-only", "--model", "qwen3-8b", "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "GiB (2**30 bytes)" in said
    assert "factor of 1.5" in said
    assert "no activations" in said
    assert run(["plan", "--model", "qwen3-8b", "--gpus", "8"]) == 0
    assert "factor of 1.5" not in capsys.readouterr().out
