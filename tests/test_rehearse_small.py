"""A rehearsal's small plan keeps every axis, and its small model keeps the architecture."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ftdash import presets
from ftdash.engine.mesh import Mesh, check_shape
from ftdash.engine.model.load import from_config, load_preset
from ftdash.engine.plan import Attention, Method, Offload, Optimizer, Plan, Strategy
from ftdash.engine.rehearse import RehearsalError
from ftdash.engine.rehearse.run import left_lock
from ftdash.engine.rehearse.small import MAX_PROCESSES, hub_config, small_config, small_plan

DENSE = Plan(model="qwen3-8b", gpus=64)
MOE = Plan(model="qwen3-30b-a3b", gpus=64)
PLANS = [
    DENSE,
    replace(DENSE, strategy=Strategy.DDP),
    replace(DENSE, strategy=Strategy.HSDP),
    replace(DENSE, strategy=Strategy.ZERO3),
    replace(DENSE, tp=4),
    replace(DENSE, strategy=Strategy.HSDP, tp=8, replicate=2),
    replace(MOE, ep=64),
    replace(MOE, ep=8),
    replace(MOE, ep=8, tp=4),
    replace(DENSE, gpus=1, strategy=Strategy.NONE),
]
AXES = ("replicate", "shard", "cp", "tp", "pp", "ep")


@pytest.mark.parametrize("plan", PLANS, ids=[str(number) for number in range(len(PLANS))])
def test_every_axis_above_one_stays_above_one_on_at_most_eight_processes(plan):
    small, _ = small_plan(plan)
    before, after = Mesh.from_plan(plan), Mesh.from_plan(small)
    assert after.world <= MAX_PROCESSES
    for axis in AXES:
        assert (getattr(after, axis) > 1) is (getattr(before, axis) > 1), axis
    assert (after.expert_shard > 1) is (before.expert_shard > 1)


def test_an_axis_that_cannot_be_kept_is_a_failure(monkeypatch):
    monkeypatch.setattr("ftdash.engine.rehearse.small.MAX_PROCESSES", 4)
    plan = replace(DENSE, strategy=Strategy.HSDP, replicate=2, tp=2)
    with pytest.raises(RehearsalError, match="8 processes keep every axis above 1; at most 4"):
        small_plan(plan)


def test_ulysses_keeps_its_own_axis_and_says_which_one_it_leaves():
    small, left = small_plan(replace(DENSE, strategy=Strategy.ZERO3, cp=4))
    assert (small.cp, small.gpus) == (2, 2)
    assert any("first group alone" in line for line in left)


def test_ring_attention_is_refused_on_a_cpu_with_the_reason():
    with pytest.raises(RehearsalError, match="no sharding strategy"):
        small_plan(replace(DENSE, cp=4))


def test_what_the_cpu_cannot_do_is_said():
    plan = replace(
        DENSE,
        offload=Offload.ALL,
        attention=Attention.FLASH,
        optimizer=Optimizer.ADAMW_8BIT,
    )
    small, left = small_plan(plan)
    assert (small.offload, small.attention, small.optimizer) == (
        Offload.NONE,
        Attention.SDPA,
        Optimizer.ADAMW,
    )
    text = " ".join(left)
    for word in ("offload", "flash", "adamw-8bit", "bf16-mixed", "between nodes"):
        assert word in text


def test_choices_that_are_tried_are_kept():
    plan = replace(DENSE, method=Method.LORA, lora_targets=("attention",), grad_accum=2)
    small, _ = small_plan(plan)
    kept = (small.method, small.lora_targets, small.strategy, small.checkpointing, small.grad_accum)
    assert kept == (plan.method, plan.lora_targets, plan.strategy, plan.checkpointing, 2)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    ["qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v3", "gpt-oss-20b"],
)
def test_the_small_model_divides_by_the_mesh_and_keeps_its_kind(name, tp):
    path = presets.FOLDER / "models" / f"{name}.json"
    config = json.loads(path.read_text())
    large, small = load_preset(name), from_config(small_config(config, tp=tp, ep=2), name)
    assert small.total_params < 5_000_000
    assert (small.model_type, small.layer_class, small.is_moe) == (
        large.model_type,
        large.layer_class,
        large.is_moe,
    )
    assert small.tied_embeddings == large.tied_embeddings
    for group in large.groups:
        grouped = group.layer.attention.kv_heads < group.layer.attention.heads
        match = [other for other in small.groups if (other.layer.moe is None) is (group.layer.moe is None)]
        assert match
        assert all(
            (other.layer.attention.kv_heads < other.layer.attention.heads) is grouped for other in match
        )
    check_shape(Mesh.solve(world=tp, tp=tp), Plan(model=name, gpus=tp, tp=tp), small)


def test_a_bare_parameter_count_has_no_architecture_to_rehearse():
    with pytest.raises(RehearsalError, match="--model"):
        hub_config(Plan(params=8e9))


def test_a_lock_that_a_killed_compilation_left_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert left_lock() == ""
    (tmp_path / "py311_cpu" / "op").mkdir(parents=True)
    (tmp_path / "py311_cpu" / "op" / "lock").write_bytes(b"")
    assert str(tmp_path / "py311_cpu" / "op" / "lock") in left_lock()
