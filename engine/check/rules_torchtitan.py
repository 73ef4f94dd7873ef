"""Checks of torchtitan job files: the degrees of its mesh, and whether the model can be cut that way."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind
from ftdash.engine.check.findings import Finding, error
from ftdash.engine.check.registry import check
from ftdash.engine.configs import torchtitan
from ftdash.engine.configs.values import BadValue


@check
def mesh(bundle: Bundle) -> Iterator[Finding]:
    """Only the shard degree may be -1, and ep borrows from the other axes (torchtitan's ParallelDims)."""
    for document in bundle.of(Kind.TORCHTITAN):
        try:
            sizes = torchtitan.degrees(document.data)
        except BadValue as refused:
            yield error("mesh-axis", document.where("parallelism"), str(refused), "write the size out")
            continue
        yield from _product(document, sizes, bundle)
        yield from _experts(document, sizes)
        yield from _heads(document, sizes["tp"])


def _product(document: Document, sizes: dict[str, int], bundle: Bundle) -> Iterator[Finding]:
    """Context parallelism is an axis of its own here: shard 8 x cp 8 takes 64 processes."""
    world = bundle.world
    axes = {axis: size for axis, size in sizes.items() if axis != "ep"}
    if world is None:
        return
    if axes["shard"] == torchtitan.REST:
        wrong = world.value % -math.prod(axes.values())
    else:
        wrong = world.value != math.prod(axes.values())
    if wrong:
        named = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        yield error(
            "mesh-product",
            document.where("parallelism"),
            f"{named} does not make {world.value} processes ({world.where})",
            "make the product of all axes equal to the number of processes",
        )


def _experts(document: Document, sizes: dict[str, int]) -> Iterator[Finding]:
    shard, cp, tp, ep = (sizes[axis] for axis in ("shard", "cp", "tp", "ep"))
    if ep > 1 and shard != torchtitan.REST and (shard * cp * tp) % ep:
        yield error(
            "mesh-ep",
            document.where("parallelism", "expert_parallel_degree"),
            f"expert_parallel_degree {ep} does not divide shard {shard} x cp {cp} x tp {tp}",
            "a degree that divides them",
        )


def _heads(document: Document, tp: int) -> Iterator[Finding]:
    shape = torchtitan.preset_of(document.data)
    if shape is None:
        return
    for group in shape.groups:
        attention = group.layer.attention
        counts = [attention.heads] if attention.is_mla else [attention.heads, attention.kv_heads]
        bad = next((count for count in counts if count % tp), None)
        if bad is not None:
            yield error(
                "tp-heads",
                document.where("parallelism", "tensor_parallel_degree"),
                f"tensor_parallel_degree {tp} does not divide the {bad} heads of {shape.name}",
                f"a degree that divides {math.gcd(*counts)}",
            )
            return
