"""The smallest change of flags that makes a refused plan one that can be launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from ftdash.engine.configs.refusals import refusal
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Checkpointing, Method, Offload, Plan, Precision, Strategy

Change = tuple[tuple[str, Any], ...]  # fields of a plan or of a launch, and the values they get
MOST_CHANGES = 6


def remedy(plan: Plan, shape: ModelShape | None) -> Change:
    """Plan fields and the values that lift the refusal; empty when the plan is launched as it is, or when
    no change of a few flags helps.

    Flags that the reason names are changed first, and one change at a time, each to the value nearest to
    what was asked.
    """
    changed: dict[str, Any] = {}
    current = plan
    for _ in range(MOST_CHANGES):
        reason = refusal(current, shape)
        if reason is None:
            return tuple(changed.items())
        step = _step(current, shape, reason)
        if step is None:
            return ()
        changed |= step
        current = replace(current, **step)
    return ()


def flags(change: Change) -> str:
    """The change as flags a person can type."""
    words = []
    for name, value in change:
        flag = f"--{name.replace('_', '-')}"
        if value is False or value is None or value == ():
            words.append(f"no {flag}")
        else:
            words.append(f"{flag} {value}")
    return ", ".join(words)


def _step(plan: Plan, shape: ModelShape | None, reason: str) -> dict[str, Any] | None:
    """One change: the first that lifts all refusals, else the first named one that lifts this one."""
    named = [
        change
        for change in _candidates(plan)
        # What is trained is changed last, whatever the reason names.
        if any(_flag(name) in reason and name != "method" for name in change)
    ]
    others = [change for change in _candidates(plan) if change not in named]
    after = [(change, refusal(replace(plan, **change), shape)) for change in (*named, *others)]
    whole = next((change for change, left in after if left is None), None)
    if whole is not None:
        return whole
    return next((change for change, left in after[: len(named)] if left != reason), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """Single changes, the mildest first."""
    for name in ("dora", "quantize_experts", "compile", "optimizer_in_backward"):
        if getattr(plan, name):
            yield {name: False}
    if plan.modules_to_save:
        yield {"modules_to_save": ()}
    if plan.adapter_dtype != "fp32":
        yield {"adapter_dtype": "fp32"}
    if plan.quant is not None:
        yield {"quant": None}
    if plan.quant_storage != "bf16":
        yield {"quant_storage": "bf16"}
    if plan.checkpointing is Checkpointing.SELECTIVE:
        yield {"checkpointing": Checkpointing.FULL}
    for offload in (Offload.OPTIMIZER, Offload.ALL, Offload.NONE):
        if plan.offload is not Offload.NONE and offload is not plan.offload:
            yield {"offload": offload}
    if plan.precision is not Precision.BF16_MIXED:
        yield {"precision": Precision.BF16_MIXED}
    for name in ("ep", "tp", "cp"):
        size = getattr(plan, name)
        yield from ({name: less} for less in range(size - 1, 0, -1) if plan.gpus % less == 0)
    if plan.pp > 1:
        yield {"pp": 1}
    if plan.replicate is not None:
        yield {"replicate": None}
    elif plan.strategy is Strategy.HSDP:
        yield {"replicate": 2}
    if plan.gpus > plan.gpus_per_node:
        yield {"gpus": plan.gpus // plan.gpus_per_node * plan.gpus_per_node}
    for strategy in (Strategy.FSDP, Strategy.ZERO3, Strategy.HSDP, Strategy.DDP, Strategy.NONE):
        if strategy is not plan.strategy:
            yield {"strategy": strategy}
    if plan.method is Method.QLORA:
        yield {"method": Method.LORA}
