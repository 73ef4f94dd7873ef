"""The parts that decoder blocks are made of, as shapes: attention, feed-forward, experts, norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from ftdash.engine.model.config import LARGEST_TOTAL, HubConfig, ModelError
from ftdash.engine.model.shape import (
    AttentionShape,
    LayerGroup,
    LayerShape,
    Linear,
    ModelShape,
    MoeShape,
    Role,
)


class Attention(msgspec.Struct, frozen=True):
    shape: AttentionShape
    linears: tuple[Linear, ...]
    loose_params: int = 0  # q/k norms, sinks


class FeedForward(msgspec.Struct, frozen=True):
    linears: tuple[Linear, ...]
    width: int = 0
    gated: bool = True
    moe: MoeShape | None = None
    loose_params: int = 0


def grouped_query(
    c: HubConfig,
    *,
    bias: bool = False,
    out_bias: bool = False,
    out_name: str = "o_proj",
    head_dim: int | None = None,
    kv_heads: int | None = None,
    window: int | None = None,
    norm_params: int = 0,
) -> Attention:
    """Separate q, k, v and output projections; multi-head when kv_heads equals heads."""
    heads, kv, dim = c.heads, kv_heads or c.kv_heads, head_dim or c.head_dim
    if heads % kv:
        raise ModelError(f"{c.where}: key 'num_key_value_heads' is {kv}: must divide the {heads} heads")
    linears = (
        Linear("q_proj", c.hidden, heads * dim, Role.ATTENTION, bias),
        Linear("k_proj", c.hidden, kv * dim, Role.ATTENTION, bias),
        Linear("v_proj", c.hidden, kv * dim, Role.ATTENTION, bias),
        Linear(out_name, heads * dim, c.hidden, Role.ATTENTION, out_bias),
    )
    return Attention(AttentionShape(heads, kv, dim, dim, window=window), linears, norm_params)


def fused_qkv(
    c: HubConfig,
    name: str,
    out_name: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    kv_heads: int | None = None,
    window: int | None = None,
    norm_params: int = 0,
) -> Attention:
    """One projection for q, k and v, such as Phi-3's qkv_proj or GPT-2's c_attn."""
    heads, kv, dim = c.heads, kv_heads or c.kv_heads, c.head_dim
    linears = (
        Linear(name, c.hidden, (heads + 2 * kv) * dim, Role.ATTENTION, bias),
        Linear(out_name, heads * dim, c.hidden, Role.ATTENTION, out_bias),
    )
    return Attention(AttentionShape(heads, kv, dim, dim, window=window), linears, norm_params)


def gated_mlp(
    c: HubConfig, width: int | None = None, *, bias: bool = False, fused: bool = False
) -> FeedForward:
    """SwiGLU or GeGLU: gate, up and down, or gate and up in one matrix (`fused`)."""
    f = width or c.width
    if fused:
        first: tuple[Linear, ...] = (Linear("gate_up_proj", c.hidden, 2 * f, Role.MLP, bias),)
    else:
        first = (
            Linear("gate_proj", c.hidden, f, Role.MLP, bias),
            Linear("up_proj", c.hidden, f, Role.MLP, bias),
        )
    return FeedForward((*first, Linear("down_proj", f, c.hidden, Role.MLP, bias)), width=f)


def plain_mlp(c: HubConfig, up: str, down: str, width: int, *, bias: bool) -> FeedForward:
    """One projection up, an activation, one down."""
    linears = (Linear(up, c.hidden, width, Role.MLP, bias), Linear(down, width, c.hidden, Role.MLP, bias))
    return FeedForward(linears, width=width, gated=False)


def experts(
    c: HubConfig,
    *,
    count: int,
    top_k: int,
    width: int,
    router: str = "gate",
    router_bias: bool = False,
    expert_bias: bool = False,
    shared_width: int = 0,
    shared_bias: bool = False,
    fused_shared: tuple[str, str] | None = None,
    loose_params: int = 0,
) -> FeedForward:
    """Routed SwiGLU experts with a linear router, and shared experts of `shared_width` in all.

    transformers keeps gate and up of all experts in one 3-D parameter; they are listed apart here
    because every count and every FLOP is the same, and adapters are counted per projection.
    """
    h = c.hidden
    stack = (
        Linear("gate_proj", h, width, Role.EXPERT, expert_bias, count),
        Linear("up_proj", h, width, Role.EXPERT, expert_bias, count),
        Linear("down_proj", width, h, Role.EXPERT, expert_bias, count),
    )
    shared: tuple[Linear, ...] = ()
    if shared_width and fused_shared:
        shared = (
            Linear(fused_shared[0], h, 2 * shared_width, Role.SHARED_EXPERT, shared_bias),
            Linear(fused_shared[1], shared_width, h, Role.SHARED_EXPERT, shared_bias),
        )
    elif shared_width:
        shared = (
            Linear("gate_proj", h, shared_width, Role.SHARED_EXPERT, shared_bias),
            Linear("up_proj", h, shared_width, Role.SHARED_EXPERT, shared_bias),
            Linear("down_proj", shared_width, h, Role.SHARED_EXPERT, shared_bias),
        )
    if top_k > count:
        raise ModelError(f"{c.where}: key 'num_experts_per_tok' is {top_k}: from 1 to the {count} experts")
    return FeedForward(
        (Linear(router, h, count, Role.ROUTER, router_bias), *stack, *shared),
        moe=MoeShape(count, top_k, width, shared_width),
        loose_params=loose_params,
    )


def block(attention: Attention, feed_forward: FeedForward, norm_params: int) -> LayerShape:
    """One decoder block; `norm_params` is the size of the norms around both halves."""
    return LayerShape(
        attention=attention.shape,
        linears=attention.linears + feed_forward.linears,
        other_params=attention.loose_params + feed_forward.loose_params + norm_params,
        gated=feed_forward.gated,
        ffn_width=feed_forward.width,
        moe=feed_forward.moe,
    )


def windows(c: HubConfig, *, full_every: int = 1, everywhere: bool = False) -> list[int | None]:
    """The attention window of each layer in tokens, None for full attention.

    `layer_types` decides where the file gives it; else every layer slides (`everywhere`), or all but
    each `full_every`-th.
    """
    window = c.count("sliding_window", default=0) or None
    if c.get("use_sliding_window") is False:
        window = None
    kinds = c.words("layer_types")
    if kinds is not None:
        if len(kinds) != c.layers:
            raise ModelError(f"{c.where}: key 'layer_types' has {len(kinds)} entries for {c.layers} layers")
        return [window if kind in ("sliding_attention", "chunked_attention") else None for kind in kinds]
    if everywhere:
        return [window] * c.layers
    return [window if full_every > 1 and (i + 1) % full_every else None for i in range(c.layers)]


def with_window(attention: Attention, window: int | None) -> Attention:
    return replace(attention, shape=replace(attention.shape, window=window))


def decoder(
    c: HubConfig,
    blocks: Iterable[LayerShape],
    *,
    final_norm: int | None = None,
    tied: bool | None = None,
    position_params: int = 0,
    embedding_width: int | None = None,
    head_bias: bool = False,
    other_params: int = 0,
    unplaced: tuple[str, ...] = (),
    unplaced_params: int = 0,
) -> ModelShape:
    """A causal language model around `blocks`; equal blocks are grouped, whatever their order.

    `final_norm` defaults to one RMS norm. Raises ModelError when the sum is beyond any real model.
    """
    h, vocab = c.hidden, c.vocab
    width = embedding_width or h
    is_tied = c.tied if tied is None else tied
    bias = vocab if head_bias else 0
    groups = tuple(LayerGroup(layer, count) for layer, count in Counter(blocks).items())
    shape = ModelShape(
        name="",
        model_type=c.model_type,
        hidden=h,
        vocab=vocab,
        groups=groups,
        tied_embeddings=is_tied,
        embedding_params=vocab * width + position_params,
        head_params=0 if is_tied else vocab * width + bias,
        other_params=(h if final_norm is None else final_norm) + other_params + (bias if is_tied else 0),
        max_positions=c.count("max_position_embeddings", default=0),
        layer_class=next(iter(c.known.blocks), ""),
        unplaced=unplaced,
        unplaced_params=unplaced_params,
    )
    if shape.total_params > LARGEST_TOTAL:
        raise ModelError(
            f"{c.where}: {shape.total_params:.3g} parameters: at most {LARGEST_TOTAL:.0e} can be planned"
        )
    return shape
