"""Counts the parameters that LoRA trains, as peft creates them, by layer and by role."""

from __future__ import annotations

import msgspec

from ftdash.engine.model.config import ModelError
from ftdash.engine.model.shape import LayerShape, Linear, ModelShape, Role
from ftdash.engine.plan import ExpertLora

ALL_LINEAR = "all-linear"
_GROUPS: dict[str, tuple[Role, ...]] = {
    ALL_LINEAR: (Role.ATTENTION, Role.MLP, Role.SHARED_EXPERT),
    "attention": (Role.ATTENTION,),
    "attention+mlp": (Role.ATTENTION, Role.MLP, Role.SHARED_EXPERT),
}


class LayerLora(msgspec.Struct, frozen=True):
    """Adapters on one layer of a group (`LayerGroup` of the shape, in the same order)."""

    attention: int
    mlp: int  # dense and shared-expert projections
    expert: int
    adapted: tuple[Linear, ...]  # the linears that carry an adapter

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.expert


class LoraCount(msgspec.Struct, frozen=True, cache_hash=True):
    """Trainable parameters under LoRA. `layers` runs parallel to the shape's groups."""

    layers: tuple[LayerLora, ...]
    modules_to_save: int  # full trainable copies of named modules outside the blocks, or of norms
    attention: int
    mlp: int
    expert: int

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.expert + self.modules_to_save


def expert_rank(rank: int, experts: int, mode: ExpertLora) -> int:
    """The rank of each expert's adapter: 0, max(1, rank // experts), or rank."""
    if mode is ExpertLora.NONE:
        return 0
    return max(1, rank // experts) if mode is ExpertLora.SCALED else rank


def lora_params(
    shape: ModelShape,
    rank: int,
    targets: tuple[str, ...] = (ALL_LINEAR,),
    expert_lora: ExpertLora = ExpertLora.NONE,
    modules_to_save: tuple[str, ...] = (),
    dora: bool = False,
    fused_experts: bool = False,
) -> LoraCount:
    """What LoRA of `rank` trains: A (rank × d_in) and B (d_out × rank) a matrix, with DoRA d_out more.

    `targets` are groups (all-linear, attention, attention+mlp) or module names; all-linear leaves the
    output head alone, as peft does, and routers too. Expert stacks are counted a projection at a time,
    E·3·r·(h + f) a layer, as published; with `fused_experts` gate and up share one adapter, as peft's
    target_parameters has it on transformers' gate_up_proj: E·r·((h + 2f) + (f + h)).
    Raises ModelError naming the target that no layer has.
    """
    if rank < 1:
        raise ModelError(f"--lora-rank {rank}: a whole number from 1")
    names = {linear.name for group in shape.groups for linear in group.layer.linears}
    for target in targets:
        if target not in _GROUPS and target not in names:
            valid = ", ".join([*_GROUPS, *sorted(names)])
            raise ModelError(f"--lora-targets {target}: not in {shape.name}; one of {valid}")
    layers = tuple(
        _layer(group.layer, rank, targets, expert_lora, dora, fused_experts) for group in shape.groups
    )
    counts = [group.count for group in shape.groups]
    return LoraCount(
        layers=layers,
        modules_to_save=sum(_saved_module(shape, name) for name in modules_to_save),
        attention=sum(n * layer.attention for n, layer in zip(counts, layers, strict=True)),
        mlp=sum(n * layer.mlp for n, layer in zip(counts, layers, strict=True)),
        expert=sum(n * layer.expert for n, layer in zip(counts, layers, strict=True)),
    )


def adapted_names(shape: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The module names that `targets` stand for in this model, experts aside, as peft takes them."""
    count = lora_params(shape, 1, targets)
    return tuple(sorted({linear.name for layer in count.layers for linear in layer.adapted}))


def _layer(
    layer: LayerShape, rank: int, targets: tuple[str, ...], mode: ExpertLora, dora: bool, fused: bool
) -> LayerLora:
    sums = {Role.ATTENTION: 0, Role.MLP: 0, Role.EXPERT: 0}
    adapted = []
    for linear in layer.linears:
        if linear.role is Role.EXPERT:
            r = expert_rank(rank, linear.count, mode)
        else:
            chosen = any(linear.role in _GROUPS.get(t, ()) or t == linear.name for t in targets)
            r = rank if chosen and linear.role is not Role.ROUTER else 0
        if not r:
            continue
        adapted.append(linear)
        role = Role.MLP if linear.role is Role.SHARED_EXPERT else linear.role
        # A fused gate_up_proj reads its input through one A; the second projection adds only its B.
        inputs = (
            0 if fused and role is Role.EXPERT and linear.name == "up_proj" and layer.gated else linear.d_in
        )
        sums[role] += linear.count * (r * (inputs + linear.d_out) + (linear.d_out if dora else 0))
    return LayerLora(sums[Role.ATTENTION], sums[Role.MLP], sums[Role.EXPERT], tuple(adapted))


_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
_HEADS = ("lm_head", "embed_out")


def _saved_module(shape: ModelShape, name: str) -> int:
    """The full trainable copy of one module. A tied head is a module of its own to peft, as large."""
    if name in _EMBEDDINGS:
        return shape.embedding_params
    if name in _HEADS:
        return shape.head_params or shape.embedding_params
    found = sum(
        group.count * linear.params
        for group in shape.groups
        for linear in group.layer.linears
        if linear.name == name and linear.role is not Role.EXPERT
    )
    if not found:
        raise ModelError(f"--modules-to-save {name}: embed_tokens, lm_head or a projection of {shape.name}")
    return found
