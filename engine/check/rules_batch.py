"""Checks of batch arithmetic and of values that two files set differently."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle, is_false, is_true
from ftdash.engine.check.documents import Document, Kind, Sourced
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check

# DeepSpeed key, trainer argument; the trainer raises on a difference (HfTrainerDeepSpeedConfig).
_SHARED = (
    (("train_micro_batch_size_per_gpu",), "per_device_train_batch_size"),
    (("gradient_accumulation_steps",), "gradient_accumulation_steps"),
    (("gradient_clipping",), "max_grad_norm"),
    (("optimizer", "params", "lr"), "learning_rate"),
    (("optimizer", "params", "weight_decay"), "weight_decay"),
    (("fp16", "enabled"), "fp16"),
    (("bf16", "enabled"), "bf16"),
)


def _number(found: Sourced | None) -> int | None:
    return (
        found.value if found and isinstance(found.value, int) and not isinstance(found.value, bool) else None
    )


def _ranks_a_sample(document: Document) -> int:
    """Ranks that work on one sample together: sequence and tensor parallelism in a DeepSpeed file."""
    sizes = (document.get("sequence_parallel_size"), document.get("tensor_parallel", "autotp_size"))
    return math.prod(_number(size) or 1 for size in sizes)


@check
def deepspeed_batch(bundle: Bundle) -> Iterator[Finding]:
    """train_batch_size = micro-batch x accumulation x world (bigcode-project/starcoder#77)."""
    for document in bundle.of(Kind.DEEPSPEED):
        total = document.get("train_batch_size")
        batch = _number(total)
        if total is None or batch is None:
            continue
        micro = _number(document.get("train_micro_batch_size_per_gpu"))
        accumulation = _number(document.get("gradient_accumulation_steps"))
        if micro is None:
            micro = _number(bundle.argument("per_device_train_batch_size"))
        if accumulation is None:
            accumulation = _number(bundle.argument("gradient_accumulation_steps"))
        world = bundle.world
        shared = _ranks_a_sample(document)
        if world and shared > 1:
            world = Sourced(max(1, world.value // shared), f"{world.where}, {shared} ranks a sample")
        if micro and accumulation and world:
            right = micro * accumulation * world.value
            if right != batch:
                alone = " (a world of 1: not started by a distributed launcher)" if world.value == 1 else ""
                yield error(
                    "batch-arithmetic",
                    total.where,
                    f"train_batch_size {batch} is not micro-batch {micro} x accumulation {accumulation} x "
                    f"world {world.value} = {right}{alone}; world from {world.where}",
                    f'set "train_batch_size": "auto" (or {right}), and let the trainer own it',
                )
            continue
        known = [part for part in (micro, accumulation, world.value if world else None) if part]
        product = 1
        for part in known:
            product *= part
        if known and batch % product:
            yield error(
                "batch-arithmetic",
                total.where,
                f"train_batch_size {batch} is not a multiple of {' x '.join(map(str, known))} = {product}",
                'set "train_batch_size": "auto", or a multiple',
            )


@check
def deepspeed_against_trainer(bundle: Bundle) -> Iterator[Finding]:
    """Values that the DeepSpeed file and the trainer both set must agree, or the trainer raises."""
    for document in bundle.of(Kind.DEEPSPEED):
        for keys, argument in _SHARED:
            ours, theirs = document.get(*keys), bundle.argument(argument)
            if ours is None or theirs is None or ours.value == "auto":
                continue
            if _same(ours.value, theirs.value):
                continue
            yield error(
                "deepspeed-trainer-mismatch",
                ours.where,
                f"{'.'.join(keys)} is {ours.value} here, {argument} is {theirs.value} at {theirs.where}",
                f'set {".".join(keys)} to "auto": the trainer fills it in',
            )


@check
def accelerate_accumulation(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        for key, argument in (
            ("gradient_accumulation_steps", "gradient_accumulation_steps"),
            ("gradient_clipping", "max_grad_norm"),
        ):
            ours, theirs = document.get("deepspeed_config", key), bundle.argument(argument)
            if ours and theirs and ours.value != "auto" and not _same(ours.value, theirs.value):
                yield error(
                    "deepspeed-trainer-mismatch",
                    ours.where,
                    f"deepspeed_config {key} is {ours.value} here, {argument} is {theirs.value} at "
                    f"{theirs.where}",
                    f"give both the same value, or leave {key} out of the accelerate file",
                )


@check
def tokens_across_devices(bundle: Bundle) -> Iterator[Finding]:
    """A mean of per-rank means weighs short shards too much when ranks hold unequal loss tokens."""
    found = bundle.argument("average_tokens_across_devices")
    if is_false(found) and found and not (bundle.world and bundle.world.value == 1):
        yield warning(
            "tokens-not-averaged",
            found.where,
            "average_tokens_across_devices is off: each rank divides by its own token count, so the loss and "
            "gradient change with the number of ranks and with padding",
            "leave it at its default, True",
        )


@check
def two_precisions(bundle: Bundle) -> Iterator[Finding]:
    bf16, fp16 = bundle.argument("bf16"), bundle.argument("fp16")
    if is_true(bf16) and is_true(fp16) and bf16 and fp16:
        yield error(
            "two-precisions", fp16.where, "bf16 and fp16 are both on", "keep one: bf16 from Ampere on"
        )
    for document in bundle.of(Kind.DEEPSPEED):
        half, brain = document.get("fp16", "enabled"), document.get("bf16", "enabled")
        if is_true(half) and is_true(brain) and half:
            yield error("two-precisions", half.where, "fp16 and bf16 are both enabled", "keep one of them")
    for document in bundle.of(Kind.ACCELERATE):
        mixed = document.get("mixed_precision")
        if mixed is None:
            continue
        for name, found in (("bf16", bf16), ("fp16", fp16)):
            other = {"bf16": "fp16", "fp16": "bf16"}[name]
            if is_true(found) and found and mixed.value == other:
                yield error(
                    "two-precisions",
                    mixed.where,
                    f"mixed_precision is {mixed.value} here, but {name} is on at {found.where}",
                    "give both the same precision",
                )


def _same(left: object, right: object) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return abs(float(left) - float(right)) <= 1e-12 + 1e-6 * abs(float(right))
    return str(left).lower() == str(right).lower()
