"""How many parameters one rank holds, gathers and trains: by block and for the root unit.

The root unit is everything outside the wrapped blocks (embedding, final norm, untied head): FSDP
gathers it as one and keeps it through forward and backward.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ftdash.engine.model.lora import LoraCount
from ftdash.engine.model.shape import LayerShape, ModelShape, Role
from ftdash.engine.planner.numerics import Numerics
from ftdash.engine.planner.setting import Setting


class Unit(msgspec.Struct, frozen=True):
    """One FSDP unit as one rank computes it: after tensor, expert and pipeline cuts, before sharding.

    `frozen_*` are bytes as stored, `trainable_*` parameters, `gathered` bytes once whole on a rank:
    trainable parameters in the compute dtype, frozen ones as stored.
    """

    frozen_dense: float = 0.0
    frozen_experts: float = 0.0
    trainable_dense: float = 0.0
    trainable_experts: float = 0.0
    gathered: float = 0.0
    gathered_experts: float = 0.0
    packed_dense: float = 0.0  # bytes of `frozen_dense` that are k-bit weights
    packed_experts: float = 0.0
    frozen_params: float = 0.0
    largest_matrix: float = 0.0  # parameters of the largest k-bit matrix; 0 without quantisation
    adapted_experts: float = 0.0  # parameters of the expert stacks that carry adapters

    @property
    def trainable(self) -> float:
        return self.trainable_dense + self.trainable_experts


class Stage(msgspec.Struct, frozen=True):
    """What one pipeline stage holds on one rank: `blocks` are (count, layer, unit), counts may be fractions;
    `whole` is the sum of all blocks and the root."""

    blocks: tuple[tuple[float, LayerShape, Unit], ...]
    root: Unit
    whole: Unit
    block: Unit  # the one that is largest when gathered
    embedding: float  # parameters, after the tensor cut
    head: float  # parameters of the head that computes logits here; 0 on a stage without one
    root_trains: bool
    layers: float


def stages(s: Setting) -> tuple[Stage, ...]:
    """The first and the last pipeline stage: the only ones that can need most."""
    mesh = s.mesh
    return _stages(s.shape, s.lora, mesh.tp, mesh.ep, mesh.pp, s.dtypes, s.plan.quantize_experts)


@lru_cache(maxsize=4096)
def _stages(
    shape: ModelShape,
    lora: LoraCount | None,
    tp: int,
    ep: int,
    pp: int,
    dtypes: Numerics,
    quantize_experts: bool,
) -> tuple[Stage, ...]:
    blocks = tuple(
        (group.count / pp, group.layer, _unit(group.layer, lora, index, tp, ep, dtypes, quantize_experts))
        for index, group in enumerate(shape.groups)
    )
    if pp == 1:
        return (_stage(shape, lora, blocks, tp, dtypes, first=True, last=True),)
    return (
        _stage(shape, lora, blocks, tp, dtypes, first=True, last=False),
        _stage(shape, lora, blocks, tp, dtypes, first=False, last=True),
    )


def _stage(
    shape: ModelShape,
    lora: LoraCount | None,
    blocks: tuple[tuple[float, LayerShape, Unit], ...],
    tp: int,
    dtypes: Numerics,
    *,
    first: bool,
    last: bool,
) -> Stage:
    embedding = shape.embedding_params / tp if first or (last and shape.tied_embeddings) else 0.0
    size = embedding + (shape.head_params / tp + shape.other_params if last else 0.0)
    if lora is None:
        root = Unit(trainable_dense=size, gathered=size * dtypes.compute)
    else:
        saved = lora.modules_to_save / tp
        frozen = size * dtypes.upcast_frozen
        root = Unit(
            frozen_dense=frozen,
            trainable_dense=saved,
            gathered=frozen + saved * dtypes.compute,
            frozen_params=size,
        )
    return Stage(
        blocks=blocks,
        root=root,
        whole=_sum(((1.0, root), *((count, unit) for count, _, unit in blocks))),
        block=max((unit for _, _, unit in blocks), key=lambda unit: unit.gathered),
        embedding=embedding,
        head=(shape.head_params or shape.embedding_params) / tp if last else 0.0,
        root_trains=root.trainable_dense > 0,
        layers=sum(count for count, _, _ in blocks),
    )


def _sum(parts: tuple[tuple[float, Unit], ...]) -> Unit:
    def over(field: str) -> float:
        return sum(count * getattr(unit, field) for count, unit in parts)

    return Unit(
        **{field: over(field) for field in Unit.__struct_fields__ if field != "largest_matrix"},
        largest_matrix=max(unit.largest_matrix for _, unit in parts),
    )


def _unit(
    layer: LayerShape,
    lora: LoraCount | None,
    index: int,
    tp: int,
    ep: int,
    dtypes: Numerics,
    quantize_experts: bool,
) -> Unit:
    expert_cut = ep if ep > 1 else tp
    experts = sum(linear.params for linear in layer.linears if linear.role is Role.EXPERT) / expert_cut
    router = sum(linear.params for linear in layer.linears if linear.role is Role.ROUTER)
    others = [linear for linear in layer.linears if linear.role not in (Role.EXPERT, Role.ROUTER)]
    linears = sum(linear.params for linear in others) / tp
    loose = router + layer.other_params
    compute = dtypes.compute
    if lora is None:
        return Unit(
            trainable_dense=linears + loose,
            trainable_experts=experts,
            gathered=(linears + loose + experts) * compute,
            gathered_experts=experts * compute,
        )
    adapters = lora.layers[index]
    quant = dtypes.quant
    packed = linears * quant if quant is not None else 0.0
    packed_experts = experts * quant if quant is not None and quantize_experts else 0.0
    frozen_dense = (packed or linears * dtypes.frozen) + loose * dtypes.upcast_frozen
    frozen_experts = packed_experts or experts * dtypes.frozen
    trainable_dense = (adapters.attention + adapters.mlp) / tp
    trainable_experts = adapters.expert / expert_cut
    return Unit(
        frozen_dense=frozen_dense,
        frozen_experts=frozen_experts,
        trainable_dense=trainable_dense,
        trainable_experts=trainable_experts,
        gathered=frozen_dense + frozen_experts + (trainable_dense + trainable_experts) * compute,
        gathered_experts=frozen_experts + trainable_experts * compute,
        packed_dense=packed,
        packed_experts=packed_experts,
        frozen_params=linears + loose + experts,
        adapted_experts=experts if adapters.expert else 0.0,
        largest_matrix=max((x.d_in * x.d_out / tp for x in others), default=0.0)
        if quant is not None
        else 0.0,
    )
