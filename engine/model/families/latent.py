"""Decoders with multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and GLM-5."""

from __future__ import annotations

from ftdash.engine.model.blocks import Attention, block, decoder, experts, gated_mlp
from ftdash.engine.model.config import HubConfig
from ftdash.engine.model.families.moe import first_dense, top_k
from ftdash.engine.model.shape import AttentionShape, Linear, ModelShape, Role


def latent_attention(c: HubConfig) -> Attention:
    """Queries and keys/values through low-rank latents (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    h, heads, bias = c.hidden, c.heads, c.flag("attention_bias")
    nope, rope, v = (
        c.size("qk_nope_head_dim"),
        c.size("qk_rope_head_dim"),
        c.size("v_head_dim", default=h // heads),
    )
    # A file that says null means no query compression, whatever the class's default is.
    given = "q_lora_rank" not in c.values or c.values["q_lora_rank"] is not None
    q_rank = c.count("q_lora_rank", default=0) if given else 0
    kv_rank = c.size("kv_lora_rank")
    if q_rank:
        queries: tuple[Linear, ...] = (
            Linear("q_a_proj", h, q_rank, Role.ATTENTION, bias),
            Linear("q_b_proj", q_rank, heads * (nope + rope), Role.ATTENTION),
        )
    else:
        queries = (Linear("q_proj", h, heads * (nope + rope), Role.ATTENTION),)
    linears = (
        *queries,
        Linear("kv_a_proj_with_mqa", h, kv_rank + rope, Role.ATTENTION, bias),
        Linear("kv_b_proj", kv_rank, heads * (nope + v), Role.ATTENTION),
        Linear("o_proj", heads * v, h, Role.ATTENTION, bias),
    )
    shape = AttentionShape(
        heads, heads, nope + rope, v, q_lora_rank=q_rank, kv_lora_rank=kv_rank, rope_dim=rope
    )
    return Attention(shape, linears, q_rank + kv_rank)


def indexer(c: HubConfig) -> Attention:
    """Latent attention with the sparse-attention indexer of DeepSeek-V3.2 and GLM-5."""
    latent = latent_attention(c)
    heads, width = c.size("index_n_heads"), c.size("index_head_dim")
    linears = (
        Linear("wq_b", latent.shape.q_lora_rank, heads * width, Role.ATTENTION),
        Linear("wk", c.hidden, width, Role.ATTENTION),
        Linear("weights_proj", c.hidden, heads, Role.ATTENTION),
    )
    return Attention(latent.shape, latent.linears + linears, latent.loose_params + 2 * width)


def deepseek(c: HubConfig) -> ModelShape:
    """DeepSeek V2 and V3. The multi-token-prediction layers of a checkpoint are not part of the class."""
    sparse = first_dense(c)
    if c.model_type == "glm4_moe_lite" and c.words("mlp_layer_types") is None:
        sparse = [i > 0 for i in range(c.layers)]
    width = c.size("moe_intermediate_size")
    mlp_bias = c.model_type == "deepseek_v2" and c.flag("mlp_bias")
    ffn = experts(
        c,
        count=c.size("n_routed_experts"),
        top_k=top_k(c),
        width=width,
        shared_width=width * c.count("n_shared_experts", default=0),
        shared_bias=mlp_bias,
    )
    dense = gated_mlp(c, bias=mlp_bias)
    attention = indexer(c) if c.has("index_n_heads") else latent_attention(c)
    return decoder(c, [block(attention, ffn if chosen else dense, 2 * c.hidden) for chosen in sparse])


def dense_latent(c: HubConfig) -> ModelShape:
    """MiniCPM3 and Youtu: latent attention with a dense feed-forward."""
    layer = block(latent_attention(c), gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden)
    return decoder(c, [layer] * c.layers)


BUILDERS = {
    "minicpm3": dense_latent,
    "youtu": dense_latent,
    "sarvam_mla": deepseek,
    "glm_moe_dsa": deepseek,
    "deepseek_v32": deepseek,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "glm4_moe_lite": deepseek,
}
