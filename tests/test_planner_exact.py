"""The planner's published values, to the digit, and the same formulas on random sizes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftdash.engine.model.load import load_preset
from ftdash.engine.model.lora import lora_params
from ftdash.engine.plan import ExpertLora, Plan
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.estimators import deepspeed_zero2, deepspeed_zero3
from ftdash.engine.planner.host import next_pow2
from ftdash.engine.planner.result import Prediction
from ftdash.engine.planner.setting import setting_of
from ftdash.engine.planner.time import bubble, model_flops

GB = 1e9


def plan(**fields: object) -> Prediction:
    return evaluate(Plan.from_dict(fields))


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("ddp", 120.0), ("zero1", 31.40625), ("zero2", 16.640625), ("zero3", 1.875)]
)
def test_model_states_are_the_zero_papers(strategy: str, gigabytes: float) -> None:
    assert plan(params=7.5e9, gpus=64, strategy=strategy).memory.model_states.total / GB == gigabytes


def test_zero3_keeps_one_copy_across_the_group() -> None:
    for gpus in (2, 4, 8, 16, 64):
        whole = plan(params=7.5e9, gpus=gpus, strategy="ddp").memory.model_states.total
        share = plan(params=7.5e9, gpus=gpus, strategy="zero3").memory.model_states.total
        assert abs(share * gpus - whole) <= 2 * gpus  # three terms, each rounded to a byte


def test_one_gpu_makes_all_stages_equal() -> None:
    sizes = {
        plan(params=7.5e9, gpus=1, strategy=s).memory.model_states.total
        for s in ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
    }
    assert sizes == {round(16 * 7.5e9)}


@settings(deadline=None, max_examples=40)
@given(
    params=st.integers(10**8, 10**11),
    gpus=st.integers(2, 512),
    strategy=st.sampled_from(["zero1", "zero2", "zero3"]),
)
def test_every_stage_saves_on_any_size(params: int, gpus: int, strategy: str) -> None:
    expected = {
        "zero1": 4 * params + Fraction(12 * params, gpus),
        "zero2": 2 * params + Fraction(14 * params, gpus),
        "zero3": Fraction(16 * params, gpus),
    }[strategy]
    found = plan(params=params, gpus=gpus, strategy=strategy).memory.model_states.total
    assert abs(found - expected) <= 2


def test_megatrons_distributed_optimizer_is_6_plus_12_over_n() -> None:
    found = plan(params=8e9, gpus=8, strategy="megatron").memory.model_states
    assert found.total == round(6 * 8e9 + 12 * 8e9 / 8)


def test_hsdp_shards_within_a_group_and_only_the_replica_all_reduce_crosses_nodes() -> None:
    assert plan(params=8e9, gpus=16, strategy="fsdp").memory.model_states.total == 8 * GB
    hybrid = plan(params=8e9, gpus=16, strategy="hsdp")
    assert hybrid.memory.model_states.total == 16 * GB
    across = [c.name for c in hybrid.traffic.collectives if c.link == "network"]
    assert across == ["replica_all_reduce"]


def test_ddp_all_reduce_moves_28_gb_per_rank() -> None:
    found = plan(params=8e9, gpus=8, strategy="ddp", reduce_dtype="bf16").traffic
    assert found.step_bytes == 28 * GB


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_1_and_2_move_what_ddp_moves(strategy: str) -> None:
    assert plan(params=8e9, gpus=8, strategy=strategy).traffic.step_bytes == 28 * GB


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "fsdp1"])
def test_full_sharding_moves_42_gb_per_micro_step(strategy: str) -> None:
    found = plan(params=8e9, gpus=8, strategy=strategy).traffic
    assert found.micro_step_bytes == 42 * GB
    assert plan(params=8e9, gpus=8, strategy=strategy, grad_accum=4).traffic.step_bytes == 4 * 42 * GB


@settings(deadline=None, max_examples=40)
@given(params=st.integers(10**8, 10**11), gpus=st.integers(2, 64))
def test_full_sharding_is_one_and_a_half_times_ddp(params: int, gpus: int) -> None:
    ddp = plan(params=params, gpus=gpus, strategy="ddp", reduce_dtype="bf16").traffic.step_bytes
    assert plan(params=params, gpus=gpus, strategy="fsdp").traffic.step_bytes == pytest.approx(
        1.5 * ddp, abs=3
    )


def test_compute_of_one_sequence() -> None:
    flops = model_flops(8e9, 2048)
    assert flops == pytest.approx(9.83e13, rel=1e-3)
    assert flops / 400e12 == pytest.approx(0.25, abs=0.005)


def test_nvlink_hides_the_gathers_and_pcie_does_not() -> None:
    fast = plan(params=8e9, gpus=8, strategy="fsdp", checkpointing="none", gpu="h100-sxm-80g").time
    assert fast.communication_s == pytest.approx(0.09, abs=0.005)
    assert fast.exposed_s == 0
    assert fast.bound_by == "compute"
    slow = plan(params=8e9, gpus=8, strategy="fsdp", checkpointing="none", gpu="h100-pcie-80g").time
    assert slow.communication_s > 2 * slow.compute_s
    assert slow.exposed_s == pytest.approx(slow.communication_s - slow.compute_s)
    assert slow.bound_by == "pcie"


def test_qwen3_30b_a3b_counts_and_states() -> None:
    found = plan(model="qwen3-30b-a3b", gpus=1, strategy="none")
    assert (found.model.total_params, found.model.active_params) == (30_532_122_624, 3_353_032_704)
    assert found.memory.model_states.total / GB == pytest.approx(488.5, abs=0.1)
    assert round(2 * found.model.total_params / GB, 1) == 61.1
    assert round(2 * found.model.active_params / GB, 1) == 6.7


@pytest.mark.parametrize(("mode", "count"), [("full", 830_472_192), ("scaled", 51_904_512)])
def test_expert_lora_counts(mode: str, count: int) -> None:
    shape = load_preset("qwen3-30b-a3b")
    assert lora_params(shape, 16, expert_lora=ExpertLora(mode)).expert == count
    trained = plan(
        model="qwen3-30b-a3b", gpus=1, strategy="none", method="lora", expert_lora=mode
    ).model.trainable_params
    without = plan(model="qwen3-30b-a3b", gpus=1, strategy="none", method="lora").model.trainable_params
    assert trained - without == count


def test_all_linear_lora_on_qwen3_8b() -> None:
    assert plan(model="qwen3-8b", gpus=1, strategy="none", method="lora").model.trainable_params == 43_646_976


@settings(deadline=None, max_examples=40)
@given(rank=st.integers(1, 256), gpus=st.sampled_from([1, 2, 4, 8, 16]))
def test_lora_under_fsdp_is_2_base_plus_16_trainable(rank: int, gpus: int) -> None:
    found = plan(model="qwen3-8b", gpus=gpus, strategy="fsdp", method="lora", lora_rank=rank)
    base, trained = 8_190_735_360, 43_646_976 // 16 * rank
    assert found.model.trainable_params == trained
    assert abs(found.memory.model_states.total - (2 * base + 16 * trained) / gpus) <= 2


@settings(deadline=None, max_examples=40)
@given(p=st.integers(1, 16), m=st.integers(1, 128))
def test_pipeline_bubble(p: int, m: int) -> None:
    s = setting_of(Plan.from_dict({"params": 7e9, "gpus": p, "strategy": "megatron"}))
    if 32 % p == 0 and s.shape.layers % p == 0:
        cut = setting_of(
            Plan.from_dict({"params": 7e9, "gpus": p, "pp": p, "grad_accum": m, "strategy": "megatron"})
        )
        assert bubble(cut) == pytest.approx(float(Fraction(p - 1, m + p - 1)))


def test_pipeline_bubble_of_four_stages_and_sixteen_micro_batches() -> None:
    found = plan(model="llama-3.1-8b", gpus=4, pp=4, micro_batches=16, strategy="megatron")
    assert found.time.bubble == pytest.approx(3 / 19)


@settings(deadline=None, max_examples=40)
@given(micro=st.integers(1, 8), tp=st.sampled_from([2, 4, 8]))
def test_tensor_parallel_makes_two_all_reduces_a_layer_each_way(micro: int, tp: int) -> None:
    found = plan(
        model="llama-3.1-8b", gpus=tp, tp=tp, strategy="none", micro_batch=micro, checkpointing="none"
    ).traffic
    activation = micro * 2048 * 4096 * 2
    assert found.micro_step_bytes == pytest.approx(4 * 32 * 2 * activation * (tp - 1) / tp)


def test_deepspeeds_estimator_with_gib_said() -> None:
    def z3(**kw: bool) -> tuple[float, float]:
        found = deepspeed_zero3(6805e6, 131e6, 4, **kw)
        return round(found.gpu_gib, 2), round(found.host_gib, 2)

    assert z3(offload_optimizer=True, offload_params=True) == (0.49, 171.12)
    assert z3(offload_optimizer=True) == (3.66, 152.1)
    assert z3(offload_optimizer=False) == (29.01, 2.93)
    small = (2851e6, 32e6, 8)
    assert deepspeed_zero2(2851e6, 8, offload_optimizer=True).gpu_gib == pytest.approx(5.31, abs=0.02)
    assert deepspeed_zero2(2851e6, 8, offload_optimizer=False).gpu_gib == pytest.approx(15.93, abs=0.02)
    assert deepspeed_zero2(2851e6, 8, offload_optimizer=True).host_gib == pytest.approx(127.5, abs=0.1)
    both = deepspeed_zero3(*small, offload_optimizer=True, offload_params=True)
    assert (both.gpu_gib, both.host_gib) == (pytest.approx(0.12, abs=0.02), pytest.approx(71.7, abs=0.1))
    assert deepspeed_zero3(*small, offload_optimizer=True).gpu_gib == pytest.approx(0.79, abs=0.02)


@pytest.mark.parametrize(("gib", "taken"), [(2.25, 4.0), (1.125, 2.0), (0.563, 1.0), (1.0, 1.0)])
def test_pinned_host_memory_rounds_up_to_powers_of_two(gib: float, taken: float) -> None:
    assert next_pow2(gib * 2**30) / 2**30 == taken


def test_modules_to_save_are_full_copies() -> None:
    """A public report: 168,509,440 of 436,607,616 parameters, 38.5952 % (huggingface/peft#2898)."""
    found = plan(
        model="gemma-3-270m",
        gpus=1,
        strategy="none",
        method="lora",
        lora_rank=16,
        lora_targets=["q_proj", "v_proj"],
        modules_to_save=["embed_tokens"],
    ).model
    assert found.trainable_params == 168_509_440
    share = found.trainable_params / (found.total_params + found.trainable_params)
    assert round(100 * share, 4) == 38.5952


def by_collective(**fields: object) -> dict[str, int]:
    return {flow.name: flow.step_bytes for flow in plan(**fields).traffic.collectives}


def test_ulysses_sends_queries_keys_values_and_output_both_ways() -> None:
    """Multi-head: 4·T·h·2 bytes·(p-1)/p a layer forward, as much backward; grouped keys are repeated to one
    head a rank (Llama 3 8B: 8 KV heads of 128, 16 ranks)."""
    fields = {"gpus": 16, "seq_len": 32_768, "strategy": "zero3", "checkpointing": "none"}
    tokens = 32_768 / 8
    multi = by_collective(model="llama-2-7b", cp=8, **fields)["cp_all_to_all"]
    assert multi == pytest.approx(2 * 32 * 4 * tokens * 4096 * 2 * 7 / 8, rel=1e-9)
    tokens = 32_768 / 16
    grouped = by_collective(model="llama-3-8b", cp=16, **fields)["cp_all_to_all"]
    assert grouped == pytest.approx(2 * 32 * (2 * 4096 + 2 * 16 * 128) * tokens * 2 * 15 / 16, rel=1e-9)
    assert "cp_ring" in by_collective(model="llama-2-7b", cp=8, **{**fields, "strategy": "fsdp"})
