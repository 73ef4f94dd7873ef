"""Sums over a model's layers that no choice of a plan changes, computed once a model."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ftdash.engine.model.shape import ModelShape, Role


class ModelSums(msgspec.Struct, frozen=True):
    total: int
    active: int
    layers: int
    narrowest: int  # the smallest side of any matrix that can carry an adapter
    dense_products: float  # active parameters in dense matrix products, the head included
    expert_products: float  # active parameters in routed experts
    expert_width: int
    attention_flops: tuple[tuple[float, int | None], ...]  # a token and position of context; the window
    query_width: float  # queries and attention output of one layer, elements a token
    kv_width: float  # keys and values of one layer, elements a token
    kv_heads: int
    routed: tuple[tuple[int, int], ...]  # (layers, top_k) of each MoE group


@lru_cache(maxsize=512)
def model_sums(shape: ModelShape) -> ModelSums:
    """The sums of one model."""
    experts = 0.0
    narrowest = 10**9
    widths = [0]
    routed = []
    for group in shape.groups:
        layer = group.layer
        for linear in layer.linears:
            if linear.role is not Role.ROUTER:
                narrowest = min(narrowest, linear.d_in, linear.d_out)
            if linear.role is Role.EXPERT and layer.moe is not None:
                experts += group.count * linear.params / linear.count * layer.moe.top_k
        if layer.moe is not None:
            widths.append(layer.moe.expert_width)
            routed.append((group.count, layer.moe.top_k))
    lookup = 0 if shape.tied_embeddings else shape.embedding_params
    first = shape.groups[0].layer.attention
    return ModelSums(
        total=shape.total_params,
        active=shape.active_params,
        layers=shape.layers,
        narrowest=narrowest,
        dense_products=shape.active_params - lookup - experts,
        expert_products=experts,
        expert_width=max(widths),
        attention_flops=tuple(
            (
                3.0 * group.count * a.heads * (a.head_dim + a.v_head_dim),
                a.window,
            )
            for group in shape.groups
            for a in (group.layer.attention,)
        ),
        query_width=float(first.heads * (first.head_dim + first.v_head_dim)),
        kv_heads=first.kv_heads,
        kv_width=float(first.kv_heads * (first.head_dim + first.v_head_dim)),
        routed=tuple(routed),
    )
