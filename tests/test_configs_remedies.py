"""A refused plan is given the smallest change that lets it be launched."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ftdash.engine.configs.refusals import refusal
from ftdash.engine.configs.remedies import flags, remedy
from ftdash.engine.model.load import resolve
from ftdash.engine.plan import Method, Offload, Plan, Precision, Strategy

MOE = "qwen3-30b-a3b"


def plan(model: str = "qwen3-8b", gpus: int = 8, **choices: object) -> Plan:
    return Plan(model=model, gpus=gpus, **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (plan(strategy=Strategy.ZERO2, offload=Offload.ALL), "--offload optimizer"),
        (plan(MOE, pp=2, ep=2), "--pp 1"),
        (plan(strategy=Strategy.MEGATRON), "--strategy fsdp"),
        (plan(strategy=Strategy.FSDP1, method=Method.QLORA, quant_storage="uint8"), "--quant-storage bf16"),
        (plan(MOE, tp=8), "--tp 4"),
        (plan(strategy=Strategy.HSDP), "--replicate 2"),
        (plan(strategy=Strategy.ZERO3, method=Method.QLORA), "--strategy fsdp"),
        (plan(gpus=9), "--gpus 8"),
        (plan(method=Method.LORA, dora=True, compile=True), "no --compile, no --dora"),
        (plan(precision=Precision.FP8), "--precision bf16-mixed"),
        (plan(ep=4), "--ep 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_remedy_lifts_the_refusal_and_changes_little(refused, words):
    shape = resolve(refused)
    assert refusal(refused, shape) is not None
    change = remedy(refused, shape)
    assert flags(change) == words
    assert refusal(replace(refused, **dict(change)), shape) is None


def test_a_plan_that_is_launched_as_it_is_needs_no_remedy():
    fine = plan(strategy=Strategy.FSDP)
    assert remedy(fine, resolve(fine)) == ()
