"""Advice is checked by planning again, in combination where one remedy is not enough."""

from __future__ import annotations

import pytest

from ftdash.engine.plan import Plan
from ftdash.engine.planner import Verdict, evaluate
from ftdash.engine.planner import advice as advice_module
from ftdash.engine.planner.fit import search
from ftdash.engine.planner.result import Advice, Prediction


def plan(**fields: object) -> Prediction:
    return evaluate(Plan.from_dict(fields))


def advice(**fields: object) -> dict[str, Advice]:
    return {one.code: one for one in plan(**fields).advice}


def test_every_remedy_saves_what_it_says() -> None:
    found = plan(model="qwen3-8b", gpus=2, gpu="rtx4090-24g")
    assert found.verdict is Verdict.DOES_NOT_FIT
    remedies = [one for one in found.advice if one.plan is not None and one.saves_bytes]
    assert remedies
    for one in remedies:
        again = evaluate(one.plan)
        assert found.memory.device - again.memory.device == one.saves_bytes


def test_remedies_are_combined_where_none_is_enough() -> None:
    found = plan(model="llama-3.1-70b", gpus=16, checkpointing="none", seq_len=8192)
    first = found.advice[0]
    assert first.code.count("+") >= 1
    assert "full-checkpointing" in first.code
    assert evaluate(first.plan).memory.headroom >= 0


def test_pcie_prefers_zero2_where_the_weights_fit() -> None:
    found = advice(model="llama-3.1-8b", gpus=8, gpu="h100-pcie-80g", checkpointing="none")
    assert found["zero2-on-pcie"].speed > 1.05
    assert "zero2-on-pcie" not in advice(model="llama-3.1-8b", gpus=8, checkpointing="none")


def test_pcie_prefers_lora_where_the_weights_do_not_fit() -> None:
    found = advice(model="qwen3-8b", gpus=4, gpu="rtx4090-24g", strategy="fsdp", offload="all")
    assert "zero2-on-pcie" not in found
    assert found["lora-on-pcie"].speed > 1


def test_more_tokens_per_micro_step_since_accumulation_gathers_again() -> None:
    found = advice(model="llama-3.1-8b", gpus=8, gpu="h100-pcie-80g", grad_accum=4)
    changed = found["more-tokens-per-micro-step"].plan
    assert (changed.micro_batch, changed.grad_accum) == (2, 2)
    assert found["more-tokens-per-micro-step"].speed > 1.05


def test_replicas_across_nodes() -> None:
    slow = {"model": "llama-3.1-8b", "gpus": 16, "gpu": "l40s-48g", "checkpointing": "full"}
    assert "hsdp-across-nodes" in advice(**slow)


def test_cp_only_when_the_sequence_forces_it() -> None:
    assert "cp-not-needed" in advice(model="qwen3-8b", gpus=8, cp=2, seq_len=4096)
    codes = " ".join(advice(model="llama-3.1-8b", gpus=8, seq_len=262_144, loss="fused", gpu="a100-80g"))
    assert "context-parallel" in codes


def test_tensor_parallelism_stays_inside_a_node() -> None:
    assert "tp-across-nodes" in advice(model="llama-3.1-70b", gpus=16, gpus_per_node=4, tp=8)
    assert "tp-over-pcie" in advice(model="llama-3.1-8b", gpus=4, gpu="rtx4090-24g", tp=4)


def test_moe_kernels_are_named_and_the_vendors_figure_marked() -> None:
    text = advice(model="qwen3-30b-a3b", gpus=4, method="lora")["grouped-gemm"].text
    assert "ScatterMoE" in text
    assert "vendor's figure" in text


def test_megatron_past_seventy_billion_dense() -> None:
    assert "megatron-style" in advice(model="llama-3.1-405b", gpus=512)
    assert "megatron-style" not in advice(model="llama-3.1-70b", gpus=64, method="lora")
    assert "megatron-style" not in advice(model="qwen3-235b-a22b", gpus=256)


def test_a_frozen_moe_is_compared_with_a_replicated_quantised_base() -> None:
    found = advice(model="qwen3-30b-a3b", gpus=8, strategy="zero3", method="lora")
    assert evaluate(found["replicate-quantised"].plan).traffic.micro_step_bytes == 0


def test_traps_are_named() -> None:
    assert "uint8-not-sharded" in advice(
        model="qwen3-8b", gpus=2, strategy="fsdp", method="qlora", quant_storage="uint8"
    )
    assert "token-indices" in advice(
        model="llama-3.1-8b", gpus=1, strategy="none", method="lora", modules_to_save=["embed_tokens"]
    )
    assert "accumulate-sharded" in advice(model="qwen3-8b", gpus=8, strategy="fsdp", grad_accum=4)
    assert "kbit-upcast" in advice(model="ministral-8b", gpus=1, strategy="none", method="qlora")
    assert "save-gathers-base" in advice(model="qwen3-30b-a3b", gpus=8, strategy="zero3", method="lora")


def test_an_moe_under_eight_percent_headroom_is_tight() -> None:
    verdicts = {
        seq: plan(
            model="qwen3-30b-a3b", gpus=1, gpu="h100-sxm-80g", strategy="none", method="lora", seq_len=seq
        )
        for seq in (2048, 6144, 8192)
    }
    for found in verdicts.values():
        share = found.memory.headroom / found.memory.capacity
        expected = Verdict.DOES_NOT_FIT if share < 0 else Verdict.TIGHT if share < 0.08 else Verdict.FITS
        assert found.verdict is expected


def test_fit_ranks_what_fits_by_speed_and_keeps_the_batch() -> None:
    base = Plan.from_dict({"model": "qwen3-8b", "gpus": 8, "micro_batch": 4, "grad_accum": 2})
    found = search(base)
    assert found.candidates
    for one in found.candidates:
        again = evaluate(one.plan)
        assert again.memory.headroom >= 0
        assert again.time.tokens_per_step == 4 * 2 * 8 * 2048
    speeds = [one.tokens_per_s_per_gpu for one in found.candidates]
    assert speeds[0] >= 0.99 * max(speeds)
    assert speeds[-1] <= speeds[0]


def test_fit_finds_qlora_for_two_small_cards_and_nothing_for_full_training() -> None:
    cards = {"model": "qwen3-32b", "gpus": 2, "gpu": "rtx4090-24g"}
    assert search(Plan.from_dict({**cards, "method": "qlora"})).candidates
    assert not [c for c in search(Plan.from_dict(cards)).candidates if c.plan.offload == "none"]


def test_advice_is_worked_out_once_and_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Verdict] = []

    def count(_: object, found: Prediction) -> tuple[Advice, ...]:
        asked.append(found.verdict)
        return ()

    monkeypatch.setattr(advice_module, "advise", count)
    found = plan(model="qwen3-32b", gpus=2, gpu="rtx4090-24g")
    assert asked == []
    assert found.advice == found.advice == ()
    assert asked == [Verdict.DOES_NOT_FIT]
    assert found.to_json()["advice"] == []
