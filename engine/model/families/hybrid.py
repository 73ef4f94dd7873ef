"""Decoders that mix attention with state-space or linear-attention layers.

The planner knows no activations or FLOPs of those mixers, so their parameters are counted but not
placed: they stand in `unplaced_params`, and `unplaced` says in words what they are. A layer without
attention keeps the model's attention shape, with none of its matrices.
"""

from __future__ import annotations

import math

from ftdash.engine.model.blocks import (
    Attention,
    FeedForward,
    block,
    decoder,
    experts,
    gated_mlp,
    grouped_query,
    plain_mlp,
)
from ftdash.engine.model.config import HubConfig, ModelError
from ftdash.engine.model.families.moe import qwen_experts, qwen_sparse, top_k
from ftdash.engine.model.shape import LayerShape, Linear, ModelShape, MoeShape, Role


def _words(kind: str, count: int, params: int) -> tuple[str, ...]:
    if not count:
        return ()
    return (f"{count} {kind} mixers, {count * params:,} parameters, cannot be placed",)


def _layer_kinds(c: HubConfig, *keys: str) -> list[str] | None:
    for key in keys:
        kinds = c.words(key)
        if kinds is not None:
            if len(kinds) != c.layers:
                raise ModelError(f"{c.where}: key {key!r} has {len(kinds)} entries for {c.layers} layers")
            return ["attention" if "attention" in kind and "linear" not in kind else kind for kind in kinds]
    return None


def mamba1_params(c: HubConfig) -> int:
    """One Mamba mixer as Jamba has it (arXiv:2312.00752, with norms on dt, B and C)."""
    h, inner = c.hidden, c.size("mamba_expand") * c.hidden
    state, conv = c.size("mamba_d_state"), c.size("mamba_d_conv")
    given = c.get("mamba_dt_rank")
    rank = math.ceil(h / 16) if given == "auto" else c.size("mamba_dt_rank")
    bias = c.flag("mamba_proj_bias")
    projections = h * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner + inner * h
    biases = (2 * inner + h if bias else 0) + (inner if c.flag("mamba_conv_bias", default=True) else 0)
    return projections + biases + inner * state + inner + inner * conv + rank + 2 * state


def mamba2_params(
    hidden: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    *,
    bias: bool,
    out_bias: bool,
    conv_bias: bool,
    norm: bool,
) -> int:
    """One Mamba-2 mixer (arXiv:2405.21060): fused input projection, short convolution, gated norm."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    into = inner + channels + heads
    biases = bias * into + out_bias * hidden + conv_bias * channels
    return hidden * into + inner * hidden + biases + channels * kernel + 3 * heads + norm * inner


def _bamba_mixer(c: HubConfig, *, inner: int, norm: bool, out_bias: bool) -> int:
    heads = c.size("mamba_n_heads")
    return mamba2_params(
        c.hidden,
        heads,
        inner // heads,
        c.size("mamba_n_groups"),
        c.size("mamba_d_state"),
        c.size("mamba_d_conv"),
        bias=c.flag("mamba_proj_bias"),
        out_bias=out_bias,
        conv_bias=c.flag("mamba_conv_bias", default=True),
        norm=norm,
    )


def _mixed(
    c: HubConfig,
    is_attention: list[bool],
    attention: Attention,
    feed_forwards: list[FeedForward],
    mixer: int,
    kind: str,
) -> ModelShape:
    bare = Attention(attention.shape, ())
    layers = [
        block(attention if chosen else bare, ffn, 2 * c.hidden)
        for chosen, ffn in zip(is_attention, feed_forwards, strict=True)
    ]
    count = is_attention.count(False)
    return decoder(c, layers, unplaced=_words(kind, count, mixer), unplaced_params=count * mixer)


def jamba(c: HubConfig) -> ModelShape:
    period, offset = c.size("attn_layer_period"), c.count("attn_layer_offset")
    is_attention = [i % period == offset for i in range(c.layers)]
    every, start, count = c.size("expert_layer_period"), c.count("expert_layer_offset"), c.size("num_experts")
    dense = gated_mlp(c)
    sparse = experts(c, count=count, top_k=top_k(c), width=c.width, router="router") if count > 1 else dense
    ffns = [sparse if i % every == start else dense for i in range(c.layers)]
    return _mixed(c, is_attention, grouped_query(c), ffns, mamba1_params(c), "Mamba")


def bamba(c: HubConfig) -> ModelShape:
    indices = set(c.numbers("attn_layer_indices"))
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    mixer = _bamba_mixer(
        c, inner=c.size("mamba_expand") * c.hidden, norm=True, out_bias=c.flag("mamba_proj_bias")
    )
    ffns = [gated_mlp(c, bias=c.flag("mlp_bias"))] * c.layers
    return _mixed(c, [i in indices for i in range(c.layers)], attention, ffns, mixer, "Mamba-2")


def granite_hybrid(c: HubConfig) -> ModelShape:
    """Granite 4: a shared feed-forward in every layer, routed experts where the file has any."""
    kinds = _layer_kinds(c, "layer_types", "layers_block_type") or ["mamba"] * c.layers
    bias, shared = c.flag("attention_bias"), c.count("shared_intermediate_size", default=0)
    names = ("input_linear", "output_linear")
    count = c.count("num_local_experts", default=0)
    if count:
        ffn = experts(
            c,
            count=count,
            top_k=top_k(c),
            width=c.width,
            router="router",
            shared_width=shared,
            fused_shared=names,
        )
    else:
        linears = (
            Linear(names[0], c.hidden, 2 * shared, Role.MLP),
            Linear(names[1], shared, c.hidden, Role.MLP),
        )
        ffn = FeedForward(linears, width=shared)
    mixer = _bamba_mixer(
        c, inner=c.size("mamba_expand") * c.hidden, norm=True, out_bias=c.flag("mamba_proj_bias")
    )
    attention = grouped_query(c, bias=bias, out_bias=bias)
    chosen = [kind == "attention" for kind in kinds]
    return _mixed(c, chosen, attention, [ffn] * c.layers, mixer, "Mamba-2")


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: HubConfig) -> ModelShape:
    """Nemotron-H: every layer is one thing, a mixer, attention, a feed-forward or experts."""
    pattern = c.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = set(pattern) - set(_NEMOTRON_LETTERS)
        if unknown:
            raise ModelError(f"{c.where}: key 'hybrid_override_pattern' has {sorted(unknown)}: M, *, - or E")
        kinds = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    else:
        given = c.words("layers_block_type") or c.words("layer_types")
        if given is None:
            raise ModelError(f"{c.where}: key 'hybrid_override_pattern' is missing (letters M, *, - and E)")
        names = {"full_attention": "attention", "linear_attention": "mamba"}
        kinds = [names.get(kind, kind) for kind in given]
    attention = grouped_query(c)
    none = FeedForward((), gated=False)
    bare = Attention(attention.shape, ())
    layers: dict[str, LayerShape] = {
        "mamba": block(bare, none, c.hidden),
        "attention": block(attention, none, c.hidden),
    }
    if "mlp" in kinds:
        ffn = plain_mlp(c, "up_proj", "down_proj", c.width, bias=c.flag("mlp_bias"))
        layers["mlp"] = block(bare, ffn, c.hidden)
    if "moe" in kinds:
        layers["moe"] = block(bare, _nemotron_experts(c), c.hidden)
    mixer = mamba2_params(
        c.hidden,
        c.size("mamba_num_heads"),
        c.size("mamba_head_dim"),
        c.size("mamba_n_groups", "n_groups"),
        c.size("ssm_state_size"),
        c.size("mamba_d_conv", "conv_kernel"),
        bias=c.flag("use_bias"),
        out_bias=c.flag("use_bias"),
        conv_bias=c.flag("mamba_conv_bias", "use_conv_bias", default=True),
        norm=True,
    )
    count = kinds.count("mamba")
    return decoder(
        c,
        [layers[kind] for kind in kinds],
        tied=False,  # the class does not tie, whatever the file says
        unplaced=_words("Mamba-2", count, mixer),
        unplaced_params=count * mixer,
    )


def _nemotron_experts(c: HubConfig) -> FeedForward:
    """Squared-ReLU experts, optionally between two projections into a narrower latent space."""
    h, count, width = c.hidden, c.size("n_routed_experts"), c.size("moe_intermediate_size")
    latent = c.size("moe_latent_size", default=h)
    shared = c.size("moe_shared_expert_intermediate_size")
    bias = c.flag("mlp_bias")
    linears = [
        Linear("gate", h, count, Role.ROUTER),
        Linear("up_proj", latent, width, Role.EXPERT, False, count),
        Linear("down_proj", width, latent, Role.EXPERT, False, count),
        Linear("up_proj", h, shared, Role.SHARED_EXPERT, bias),
        Linear("down_proj", shared, h, Role.SHARED_EXPERT, bias),
    ]
    if latent != h:
        linears += [
            Linear("fc1_latent_proj", h, latent, Role.SHARED_EXPERT, bias),
            Linear("fc2_latent_proj", latent, h, Role.SHARED_EXPERT, bias),
        ]
    return FeedForward(tuple(linears), gated=False, moe=MoeShape(count, top_k(c), width, shared))


def falcon_h1(c: HubConfig) -> ModelShape:
    """Falcon-H1: attention and a Mamba-2 mixer side by side in every layer."""
    inner = c.size("mamba_d_ssm", default=c.size("mamba_expand") * c.hidden)
    mixer = _bamba_mixer(c, inner=inner, norm=c.flag("mamba_rms_norm"), out_bias=c.flag("projectors_bias"))
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    layer = block(attention, gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden)
    return decoder(
        c,
        [layer] * c.layers,
        unplaced=_words("Mamba-2", c.layers, mixer),
        unplaced_params=c.layers * mixer,
    )


def delta_net_params(c: HubConfig) -> int:
    """One gated delta-net mixer of Qwen3-Next and Qwen3.5 (arXiv:2412.06464)."""
    value_heads, value_dim = c.size("linear_num_value_heads"), c.size("linear_value_head_dim")
    keys, values = c.size("linear_num_key_heads") * c.size("linear_key_head_dim"), value_heads * value_dim
    projections = c.hidden * (2 * keys + 2 * values + 2 * value_heads) + values * c.hidden
    convolution = (2 * keys + values) * c.size("linear_conv_kernel_dim")
    return projections + convolution + 2 * value_heads + value_dim


def qwen3_next(c: HubConfig) -> ModelShape:
    """Qwen3-Next and Qwen3.5: every fourth layer attends, with a gate as wide as the queries."""
    every = c.size("full_attention_interval", default=4)
    kinds = _layer_kinds(c, "layer_types")
    chosen = [k == "attention" for k in kinds] if kinds else [(i + 1) % every == 0 for i in range(c.layers)]
    bias = c.flag("attention_bias")
    plain = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    gated_query = Linear("q_proj", c.hidden, 2 * c.heads * c.head_dim, Role.ATTENTION, bias)
    attention = Attention(plain.shape, (gated_query, *plain.linears[1:]), plain.loose_params)
    count = c.count("num_experts", default=0)
    if count:
        sparse = qwen_experts(c, count)
        ffns = [sparse if routed else gated_mlp(c) for routed in qwen_sparse(c, count)]
    else:
        ffns = [gated_mlp(c)] * c.layers
    return _mixed(c, chosen, attention, ffns, delta_net_params(c), "gated delta-net")


def minimax(c: HubConfig) -> ModelShape:
    """MiniMax-Text-01: lightning attention, every eighth layer full in the published model."""
    kinds = _layer_kinds(c, "layer_types")
    old = c.numbers("attn_type_list")
    if kinds:
        chosen = [kind == "attention" for kind in kinds]
    elif old:
        chosen = [kind == 1 for kind in old]
    else:
        chosen = [(i + 1) % 2 == 1 for i in range(c.layers)]
    wide = c.heads * c.head_dim
    mixer = c.hidden * 4 * wide + wide * c.hidden + wide
    ffn = experts(c, count=c.size("num_local_experts"), top_k=top_k(c), width=c.width)
    return _mixed(c, chosen, grouped_query(c), [ffn] * c.layers, mixer, "lightning-attention")


BUILDERS = {
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "minimax": minimax,
    "minimax_text_01": minimax,
}
