"""Dense decoders of the Llama line: separate or fused projections, RMS norms, a gated feed-forward."""

from __future__ import annotations

from msgspec.structs import replace

from ftdash.engine.model.blocks import (
    Attention,
    FeedForward,
    block,
    decoder,
    fused_qkv,
    gated_mlp,
    grouped_query,
    plain_mlp,
    windows,
    with_window,
)
from ftdash.engine.model.config import HubConfig
from ftdash.engine.model.shape import Linear, ModelShape, Role


def stack(
    c: HubConfig,
    attention: Attention,
    feed_forward: FeedForward,
    norm_params: int,
    layer_windows: list[int | None],
) -> ModelShape:
    """A model of equal layers, which may differ in their attention window only."""
    return decoder(c, [block(with_window(attention, w), feed_forward, norm_params) for w in layer_windows])


def llama(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    return stack(c, attention, gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden, windows(c))


def mistral(c: HubConfig) -> ModelShape:
    return stack(c, grouped_query(c), gated_mlp(c), 2 * c.hidden, windows(c, everywhere=True))


def qwen2(c: HubConfig) -> ModelShape:
    return stack(c, grouped_query(c, bias=True), gated_mlp(c), 2 * c.hidden, windows(c))


def qwen3(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    return stack(c, attention, gated_mlp(c), 2 * c.hidden, windows(c))


def hunyuan(c: HubConfig) -> ModelShape:
    return qwen3(c)


def gemma(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    return stack(c, attention, gated_mlp(c), 2 * c.hidden, windows(c))


def gemma2(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    return stack(c, attention, gated_mlp(c), 4 * c.hidden, windows(c, full_every=2))


def gemma3(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    every = c.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return stack(c, attention, gated_mlp(c), 4 * c.hidden, windows(c, full_every=every))


def phi3(c: HubConfig) -> ModelShape:
    attention = fused_qkv(c, "qkv_proj", "o_proj")
    return stack(c, attention, gated_mlp(c, fused=True), 2 * c.hidden, windows(c, everywhere=True))


def glm(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, bias=c.flag("attention_bias"))
    return stack(c, attention, gated_mlp(c, fused=True), 2 * c.hidden, windows(c))


def glm4(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, bias=c.flag("attention_bias", default=True))
    return stack(c, attention, gated_mlp(c, fused=True), 4 * c.hidden, windows(c))


def olmo(c: HubConfig) -> ModelShape:
    """OLMo 1 normalises without weights, between blocks and at the end."""
    bias = c.flag("attention_bias")
    layer = block(grouped_query(c, bias=bias, out_bias=bias), gated_mlp(c), 0)
    return decoder(c, [layer] * c.layers, final_norm=0)


def olmo2(c: HubConfig) -> ModelShape:
    """OLMo 2 and 3: q and k are normalised over all heads at once."""
    bias = c.flag("attention_bias")
    norms = (c.heads + c.kv_heads) * c.head_dim
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=norms)
    full_every = 4 if c.model_type == "olmo3" else 1
    return stack(c, attention, gated_mlp(c), 2 * c.hidden, windows(c, full_every=full_every))


def cohere(c: HubConfig) -> ModelShape:
    """Command R: one norm a block, attention and feed-forward side by side."""
    bias = c.flag("attention_bias")
    norms = (c.heads + c.kv_heads) * c.head_dim if c.flag("use_qk_norm") else 0
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=norms)
    every = c.size("sliding_window_pattern", default=4) if c.model_type == "cohere2" else 1
    return stack(c, attention, gated_mlp(c), c.hidden, windows(c, full_every=every))


def exaone4(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, norm_params=2 * c.head_dim)
    every = c.get("sliding_window_pattern")
    full_every = every if isinstance(every, int) and every > 0 else 1
    return stack(c, attention, gated_mlp(c), 2 * c.hidden, windows(c, full_every=full_every))


def ernie4_5(c: HubConfig) -> ModelShape:
    bias = c.flag("use_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    return stack(c, attention, gated_mlp(c, bias=bias), 2 * c.hidden, windows(c))


def seed_oss(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, bias=c.flag("attention_bias"), out_bias=c.flag("attention_out_bias"))
    return stack(c, attention, gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden, windows(c))


def helium(c: HubConfig) -> ModelShape:
    """Helium: the output projection is square, whatever the heads add up to."""
    attention = grouped_query(c, bias=c.flag("attention_bias"))
    square = Linear("o_proj", c.hidden, c.hidden, Role.ATTENTION)
    attention = replace(attention, linears=(*attention.linears[:-1], square))
    return stack(c, attention, gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden, windows(c))


def arcee(c: HubConfig) -> ModelShape:
    """Arcee AFM: squared ReLU, one projection up."""
    bias = c.flag("attention_bias")
    ffn = plain_mlp(c, "up_proj", "down_proj", c.width, bias=c.flag("mlp_bias"))
    return stack(c, grouped_query(c, bias=bias, out_bias=bias), ffn, 2 * c.hidden, windows(c))


def apertus(c: HubConfig) -> ModelShape:
    """Apertus: the xIELU activation has two learned numbers a layer."""
    bias = c.flag("attention_bias")
    learned = 2 if c.get("hidden_act") in (None, "xielu") else 0
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim + learned)
    ffn = plain_mlp(c, "up_proj", "down_proj", c.width, bias=False)
    return stack(c, attention, ffn, 2 * c.hidden, windows(c))


def nemotron(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    ffn = plain_mlp(c, "up_proj", "down_proj", c.width, bias=c.flag("mlp_bias"))
    layer = block(grouped_query(c, bias=bias, out_bias=bias), ffn, 4 * c.hidden)
    return decoder(c, [layer] * c.layers, final_norm=2 * c.hidden)


def bitnet(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=c.hidden)
    return stack(c, attention, gated_mlp(c), 2 * c.hidden + c.width, windows(c))


def internlm(c: HubConfig) -> ModelShape:
    """InternLM 1, whose class lives with its weights: biases on all four attention projections."""
    bias = c.flag("bias", default=True)
    return stack(c, grouped_query(c, bias=bias, out_bias=bias), gated_mlp(c), 2 * c.hidden, windows(c))


def internlm2(c: HubConfig) -> ModelShape:
    """InternLM 2, whose class lives with its weights: one wqkv, and w1, w2, w3."""
    bias = c.flag("bias", default=False)
    attention = fused_qkv(c, "wqkv", "wo", bias=bias, out_bias=bias)
    return stack(c, attention, gated_mlp(c), 2 * c.hidden, windows(c))


def qwen1(c: HubConfig) -> ModelShape:
    """Qwen 1, whose class lives with its weights: `intermediate_size` counts gate and up together."""
    attention = fused_qkv(c, "c_attn", "c_proj", bias=True)
    return decoder(
        c,
        [block(attention, gated_mlp(c, c.width // 2), 2 * c.hidden)] * c.layers,
        tied=c.flag("tie_word_embeddings"),
    )


BUILDERS = {
    "llama": llama,
    "exaone": llama,
    "internlm3": llama,
    "iquestcoder": llama,
    "cwm": llama,
    "granite": llama,
    "smollm3": llama,
    "mistral": mistral,
    "ministral": mistral,
    "ministral3": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_vl_text": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen3_vl_text": qwen3,
    "hunyuan_v1_dense": hunyuan,
    "gemma": gemma,
    "vaultgemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "glm": glm,
    "glm4": glm4,
    "glm4v_text": glm4,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "cohere": cohere,
    "cohere2": cohere,
    "exaone4": exaone4,
    "ernie4_5": ernie4_5,
    "seed_oss": seed_oss,
    "helium": helium,
    "arcee": arcee,
    "apertus": apertus,
    "nemotron": nemotron,
    "bitnet": bitnet,
    "internlm": internlm,
    "internlm2": internlm2,
    "qwen": qwen1,
}
