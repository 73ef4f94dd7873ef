"""The mesh refuses what cannot be, names the factor and lists what could be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftdash.engine.mesh import Mesh, warnings
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import check


def refused(**fields: object) -> str:
    with pytest.raises(PlanError) as caught:
        check(Plan.from_dict(fields))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shard_is_filled_in() -> None:
    assert Mesh.solve(world=16, replicate=2, tp=2).shard == 4


@settings(deadline=None, max_examples=40)
@given(
    shard=st.integers(1, 8),
    replicate=st.integers(1, 4),
    tp=st.integers(1, 8),
    cp=st.integers(1, 4),
    pp=st.integers(1, 4),
)
def test_the_filled_product_is_the_world(shard: int, replicate: int, tp: int, cp: int, pp: int) -> None:
    world = shard * replicate * tp * cp * pp
    mesh = Mesh.solve(world=world, replicate=replicate, tp=tp, cp=cp, pp=pp)
    assert mesh.shard == shard
    assert mesh.replicate * mesh.shard * mesh.cp * mesh.tp * mesh.pp == world


def test_replicate_may_not_be_filled_in() -> None:
    with pytest.raises(PlanError, match="--replicate -1: must be at least 1"):
        Mesh.solve(world=8, replicate=-1)


def test_a_wrong_product_says_what_shard_would_have_to_be() -> None:
    with pytest.raises(PlanError, match=r"shard must be 1 or -1"):
        Mesh.solve(world=8, shard=8, cp=8)


def test_gpus_that_the_factors_do_not_divide_name_the_factor() -> None:
    assert "--tp must be one of 1, 2" in refused(model="llama-3.1-8b", gpus=6, tp=4)
    assert "--replicate 3 must divide the 8 data-parallel ranks: one of 1, 2, 4, 8" in refused(
        model="llama-3.1-8b", gpus=8, strategy="hsdp", replicate=3
    )


def test_context_parallel_ranks_are_not_free() -> None:
    assert Mesh.solve(world=8, cp=8).shard == 1
    with pytest.raises(PlanError):
        Mesh.solve(world=8, shard=8, cp=2)


def test_tp_over_the_kv_heads_is_refused_and_mla_is_exempt() -> None:
    assert "--tp 8 must divide the 4 KV heads of qwen3-30b-a3b: one of 1, 2, 4" in refused(
        model="qwen3-30b-a3b", gpus=8, tp=8
    )
    check(Plan.from_dict({"model": "deepseek-v3", "gpus": 64, "tp": 16, "gpus_per_node": 16}))


@pytest.mark.parametrize(
    ("model", "tp", "what"), [("qwen2.5-7b", 8, "28 attention heads"), ("yi-34b", 3, "attention heads")]
)
def test_tp_must_divide_the_heads(model: str, tp: int, what: str) -> None:
    assert what in refused(model=model, gpus=tp, tp=tp)


def test_pipeline_stages_must_divide_the_layers() -> None:
    message = refused(model="llama-3.1-8b", gpus=5, pp=5)
    assert message.startswith("--pp 5 must divide the 32 layers of llama-3.1-8b: one of 1, 2, 4, 8, 16")
    check(Plan.from_dict({"model": "llama-3.1-405b", "gpus": 64, "pp": 8, "tp": 8}))  # 126 + embedding + head


def test_expert_parallelism_borrows_from_shard_and_tp() -> None:
    assert "must divide shard 1 x cp 1 x tp 1 = 1" in refused(
        model="qwen3-30b-a3b", gpus=4, strategy="ddp", ep=2
    )
    check(Plan.from_dict({"model": "qwen3-30b-a3b", "gpus": 4, "tp": 2, "ep": 4}))
    assert "no experts" in refused(model="qwen3-8b", gpus=4, ep=4)
    assert "must divide the 128 experts" in refused(model="qwen3-30b-a3b", gpus=6, ep=6)


def test_sequences_must_split_over_context_parallel_ranks() -> None:
    assert "must be a multiple of 2 x cp 4 = 8" in refused(model="qwen3-8b", gpus=4, cp=4, seq_len=2049)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategy": "none", "gpus": 4}, "--strategy none trains one replica"),
        ({"strategy": "zero2", "gpus": 4, "offload": "all"}, "--offload all with --strategy zero2"),
        ({"strategy": "fsdp", "gpus": 4, "offload": "nvme"}, "only zero3 swaps to NVMe"),
        (
            {"strategy": "fsdp1", "gpus": 4, "method": "qlora", "quant_storage": "uint8"},
            "--quant-storage uint8",
        ),
        ({"quant": "nf4", "gpus": 1}, "--quant nf4 needs frozen weights"),
        ({"method": "lora", "lora_rank": 5000, "gpus": 1}, "--lora-rank 5000: from 1 to"),
        ({"method": "lora", "expert_lora": "full", "gpus": 1}, "has no experts"),
        ({"gpus": 1, "virtual_stages": 2}, "--virtual-stages 2: above 1 needs"),
    ],
)
def test_impossible_choices_name_the_flag(fields: dict[str, object], words: str) -> None:
    assert words in refused(model="qwen3-8b", **fields)


def test_what_is_possible_but_hurts_is_a_warning() -> None:
    def codes(nvlink: bool, **fields: object) -> list[str]:
        plan = Plan.from_dict({"model": "llama-3.1-8b", **fields})
        return [code for code, _ in warnings(Mesh.from_plan(plan), plan, nvlink)]

    assert codes(True, gpus=8, tp=4) == []
    assert codes(False, gpus=8, tp=4) == ["tp-over-pcie"]
    assert codes(True, gpus=16, tp=8, gpus_per_node=4) == ["tp-across-nodes"]
    assert codes(True, gpus=8, pp=4, ep=1) == ["planned-only"]


def test_ulysses_divides_heads_and_says_which_degrees_would() -> None:
    fields = {"model": "qwen3-8b", "gpus": 64, "strategy": "zero3", "seq_len": 32_768}
    assert "32 attention heads" in refused(cp=64, **fields)
    assert "one of 1, 2, 4, 8, 16, 32" in refused(cp=64, **fields)
    check(Plan.from_dict({**fields, "cp": 16}))
    odd = {**fields, "seq_len": 32_770}
    assert "--seq-len 32770" in refused(cp=4, **odd)
    check(Plan.from_dict({**odd, "cp": 2}))
