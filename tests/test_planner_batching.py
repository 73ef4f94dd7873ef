"""Samples shorter than their rows: what is processed, what of it is data, and what memory is planned for."""

from __future__ import annotations

import pytest

from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.result import Prediction

FIELDS = {"model": "qwen3-8b", "gpus": 8, "gpu": "a100-80g", "method": "lora", "micro_batch": 4}


def plan(**fields: object) -> Prediction:
    return evaluate(Plan.from_dict(FIELDS | {"seq_len": 2048, "attention": "flash"} | fields))


@pytest.mark.parametrize(
    ("batching", "processed", "useful"),
    [
        ("packed", 4 * 2048, 4 * 4 * 500),
        ("padded", 4 * 2048, 4 * 500),
        ("longest", 4 * 500 * (1 + 1 / 2 + 1 / 3 + 1 / 4), 4 * 500),
        ("padding-free", 4 * 500, 4 * 500),
    ],
)
def test_tokens_of_a_step_are_counted_as_processed_and_as_data(
    batching: str, processed: float, useful: float
) -> None:
    time = plan(batching=batching, mean_len=500).time
    assert time.tokens_per_step == round(8 * processed)
    assert time.tokens_per_step * time.useful_share == pytest.approx(8 * useful, rel=1e-4)
    assert time.useful_tokens_per_s_per_gpu == pytest.approx(time.tokens_per_s_per_gpu * useful / processed)


def test_memory_is_planned_for_full_rows_whatever_their_mean() -> None:
    full = plan().memory
    for batching in ("packed", "padded", "longest", "padding-free"):
        assert plan(batching=batching, mean_len=300).memory == full


def test_a_mask_costs_memory_where_no_kernel_takes_lengths() -> None:
    fields = {"attention": "sdpa", "checkpointing": "none"}
    masked, plain = plan(mean_len=500, **fields).memory, plan(**fields).memory
    # A mask of 2,048 positions in 16 bits a token and layer, and 8 KV heads of 128 repeated to 32.
    extra = 36 * 4 * 2048 * (2 * 2048 + 2 * 2 * (32 - 8) * 128)
    assert masked.peak.activations - plain.peak.activations == pytest.approx(extra)


def test_samples_apart_attend_to_less_than_a_full_row() -> None:
    fields = {"seq_len": 32_768, "micro_batch": 1}
    packed, full = plan(mean_len=512, **fields).time, plan(**fields).time
    assert packed.compute_s < full.compute_s
    assert plan(mean_len=512, attention="sdpa", **fields).time.compute_s >= full.compute_s


def test_a_run_of_mostly_padding_is_told_to_pack() -> None:
    found = plan(batching="padded", mean_len=256)
    advice = next(a for a in found.advice if a.code == "pack-samples")
    assert advice.speed == pytest.approx(8, rel=0.1)
    assert advice.plan is not None
    assert evaluate(advice.plan).time.useful_share == 1.0
    assert "pack-samples" not in {a.code for a in plan(mean_len=256).advice}


def test_hours_are_of_data() -> None:
    padded, full = plan(batching="padded", mean_len=1024).time, plan().time
    assert padded.gpu_hours(1e9) == pytest.approx(2 * full.gpu_hours(1e9))
    found = plan(batching="padded", mean_len=1024).to_json()
    assert found["tokens"]["useful_share"] == 0.5
    assert "tokens" not in plan().to_json()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mean_len": 4096}, "--mean-len 4096: from 1 to --seq-len 2048"),
        ({"mean_len": 0}, "--mean-len 0: must be a whole number from 1"),
        ({"batching": "longest"}, "--batching longest needs --mean-len"),
    ],
)
def test_lengths_that_cannot_be_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(**fields)
