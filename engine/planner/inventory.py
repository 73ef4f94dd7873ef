"""How many parameters one rank holds, gathers and trains: by block and for the root unit.

The root unit is everything outside the wrapped blocks (embedding, final norm, untied head): FSDP
gathers it as one and keeps it through forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftdash.engine.model.shape import LayerShape, Role
from ftdash.engine.planner.setting import Setting


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP unit as one rank computes it: after tensor, expert and pipeline cuts, before sharding.

    Sizes are parameters; `quantised` are those of `frozen_*` that the base stores in k bits.
    """

    frozen_dense: float = 0.0
    frozen_experts: float = 0.0
    quantised_dense: float = 0.0
    quantised_experts: float = 0.0
    trainable_dense: float = 0.0
    trainable_experts: float = 0.0

    @property
    def trainable(self) -> float:
        return self.trainable_dense + self.trainable_experts

    def frozen_bytes(self, s: Setting, dense_shard: float = 1, expert_shard: float = 1) -> float:
        """Stored bytes of the frozen part, divided over the ranks that shard it."""
        d = s.dtypes
        quant = d.quant or 0.0
        dense = (self.frozen_dense - self.quantised_dense) * d.upcast_frozen + self.quantised_dense * quant
        experts = (self.frozen_experts - self.quantised_experts) * d.frozen + self.quantised_experts * quant
        return dense / dense_shard + experts / expert_shard

    def gathered_bytes(self, s: Setting) -> float:
        """The unit once gathered: trainable parameters in the compute dtype, frozen ones as stored."""
        return self.trainable * s.dtypes.compute + self.frozen_bytes(s)


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline stage holds on one rank: `blocks` are (count, layer, unit), counts may be fractions."""

    blocks: tuple[tuple[float, LayerShape, Unit], ...]
    root: Unit
    embedding: float  # parameters, after the tensor cut
    head: float  # parameters of the head that computes logits here; 0 on a stage without one
    root_trains: bool

    def total(self, field: str) -> float:
        return sum(count * getattr(unit, field) for count, _, unit in self.blocks) + getattr(self.root, field)

    @property
    def layers(self) -> float:
        return sum(count for count, _, _ in self.blocks)

    def largest_block(self, s: Setting) -> Unit:
        return max((unit for _, _, unit in self.blocks), key=lambda unit: unit.gathered_bytes(s))


def stages(s: Setting) -> tuple[Stage, ...]:
    """The first and the last pipeline stage: the only ones that can need most."""
    pp = s.mesh.pp
    if pp == 1:
        return (_stage(s, first=True, last=True),)
    return (_stage(s, first=True, last=False), _stage(s, first=False, last=True))


def _stage(s: Setting, *, first: bool, last: bool) -> Stage:
    shape, mesh = s.shape, s.mesh
    blocks = tuple(
        (group.count / mesh.pp, group.layer, _unit(s, group.layer, index))
        for index, group in enumerate(shape.groups)
    )
    embedding = shape.embedding_params / mesh.tp if first or (last and shape.tied_embeddings) else 0.0
    untied = shape.head_params / mesh.tp if last else 0.0
    rest = shape.other_params if last else 0
    size = embedding + untied + rest
    saved = s.lora.modules_to_save / mesh.tp if s.lora is not None and (first or last) else 0.0
    full = s.lora is None
    root = Unit(trainable_dense=size) if full else Unit(frozen_dense=size, trainable_dense=saved)
    head = (shape.head_params or shape.embedding_params) / mesh.tp if last else 0.0
    return Stage(blocks, root, embedding, head, root_trains=full or saved > 0)


def _unit(s: Setting, layer: LayerShape, index: int) -> Unit:
    tp, ep = s.mesh.tp, s.mesh.ep
    expert_cut = ep if ep > 1 else tp
    experts = sum(linear.params for linear in layer.linears if linear.role is Role.EXPERT) / expert_cut
    router = sum(linear.params for linear in layer.linears if linear.role is Role.ROUTER)
    linears = (
        sum(linear.params for linear in layer.linears if linear.role not in (Role.EXPERT, Role.ROUTER)) / tp
    )
    dense = linears + router + layer.other_params
    if s.lora is None:
        return Unit(trainable_dense=dense, trainable_experts=experts)
    adapters = s.lora.layers[index]
    quantised = s.dtypes.quant is not None
    return Unit(
        frozen_dense=dense,
        frozen_experts=experts,
        quantised_dense=linears if quantised else 0.0,
        quantised_experts=experts if quantised and s.plan.quantize_experts else 0.0,
        trainable_dense=(adapters.attention + adapters.mlp) / tp,
        trainable_experts=adapters.expert / expert_cut,
    )
