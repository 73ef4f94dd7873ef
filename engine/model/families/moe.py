"""Mixture-of-experts decoders with grouped-query attention."""

from __future__ import annotations

from ftdash.engine.model.blocks import (
    Attention,
    FeedForward,
    block,
    decoder,
    experts,
    fused_qkv,
    gated_mlp,
    grouped_query,
    windows,
    with_window,
)
from ftdash.engine.model.config import HubConfig, ModelError
from ftdash.engine.model.shape import LayerShape, ModelShape


def sparse_stack(
    c: HubConfig, attention: Attention, sparse: FeedForward, is_sparse: list[bool], norm_params: int
) -> list[LayerShape]:
    """Layers of `sparse` experts, dense SwiGLU where `is_sparse` says no."""
    layer_windows = windows(c)
    return [
        block(with_window(attention, window), sparse if chosen else gated_mlp(c), norm_params)
        for chosen, window in zip(is_sparse, layer_windows, strict=True)
    ]


def top_k(c: HubConfig) -> int:
    return c.size("num_experts_per_tok")


def first_dense(c: HubConfig) -> list[bool]:
    """The DeepSeek rule, `first_k_dense_replace` dense layers first, or a list in `mlp_layer_types`."""
    kinds = c.words("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != c.layers:
            raise ModelError(
                f"{c.where}: key 'mlp_layer_types' has {len(kinds)} entries for {c.layers} layers"
            )
        return [kind == "sparse" for kind in kinds]
    dense = c.count("first_k_dense_replace", default=0)
    return [i >= dense for i in range(c.layers)]


def mixtral(c: HubConfig) -> ModelShape:
    """Mixtral; MiniMax-M2 and OLMoE differ in their q and k norms."""
    ffn = experts(c, count=c.size("num_local_experts"), top_k=top_k(c), width=c.width)
    attention = grouped_query(c)
    return decoder(
        c, [block(with_window(attention, w), ffn, 2 * c.hidden) for w in windows(c, everywhere=True)]
    )


def minimax_m2(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, norm_params=(c.heads + c.kv_heads) * c.head_dim)
    ffn = experts(c, count=c.size("num_local_experts"), top_k=top_k(c), width=c.width)
    return decoder(c, [block(attention, ffn, 2 * c.hidden)] * c.layers)


def olmoe(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    norms = c.hidden + c.hidden // c.heads * c.kv_heads
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=norms)
    ffn = experts(c, count=c.size("num_experts"), top_k=top_k(c), width=c.width)
    return decoder(c, [block(attention, ffn, 2 * c.hidden)] * c.layers)


def flex_olmo(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=(c.heads + c.kv_heads) * c.head_dim)
    ffn = experts(c, count=c.size("num_experts"), top_k=top_k(c), width=c.width)
    return decoder(c, [block(attention, ffn, 2 * c.hidden)] * c.layers)


def qwen_sparse(c: HubConfig, count: int) -> list[bool]:
    """Qwen's rule: every decoder_sparse_step-th layer is sparse, mlp_only_layers are not."""
    step, dense = c.size("decoder_sparse_step", default=1), set(c.numbers("mlp_only_layers"))
    return [i not in dense and count > 0 and (i + 1) % step == 0 for i in range(c.layers)]


def qwen_experts(c: HubConfig, count: int) -> FeedForward:
    """Qwen's routed experts, with a gated shared expert where the file has one; dense for no experts."""
    if count == 0:
        return gated_mlp(c)
    shared = c.count("shared_expert_intermediate_size", default=0)
    return experts(
        c,
        count=count,
        top_k=top_k(c),
        width=c.size("moe_intermediate_size"),
        shared_width=shared,
        loose_params=c.hidden if shared else 0,
    )


def qwen2_moe(c: HubConfig) -> ModelShape:
    count = c.count("num_experts")
    attention = grouped_query(c, bias=c.flag("qkv_bias", default=True))
    return decoder(c, sparse_stack(c, attention, qwen_experts(c, count), qwen_sparse(c, count), 2 * c.hidden))


def qwen3_moe(c: HubConfig) -> ModelShape:
    bias, count = c.flag("attention_bias"), c.count("num_experts")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    return decoder(c, sparse_stack(c, attention, qwen_experts(c, count), qwen_sparse(c, count), 2 * c.hidden))


def glm4_moe(c: HubConfig) -> ModelShape:
    """GLM-4.5: biases on q, k, v only; dots.llm1 has them on the output too, and always q/k norms."""
    bias = c.flag("attention_bias")
    is_dots = c.model_type == "dots1"
    norms = 2 * c.head_dim if is_dots or c.flag("use_qk_norm") else 0
    attention = grouped_query(c, bias=bias, out_bias=bias and is_dots, norm_params=norms)
    width = c.size("moe_intermediate_size")
    ffn = experts(
        c,
        count=c.size("n_routed_experts"),
        top_k=top_k(c),
        width=width,
        shared_width=width * c.count("n_shared_experts", default=0),
    )
    return decoder(c, sparse_stack(c, attention, ffn, first_dense(c), 2 * c.hidden))


def exaone_moe(c: HubConfig) -> ModelShape:
    width = c.size("moe_intermediate_size")
    ffn = experts(
        c,
        count=c.size("num_experts"),
        top_k=top_k(c),
        width=width,
        shared_width=width * c.count("num_shared_experts", default=0),
    )
    attention = grouped_query(c, norm_params=2 * c.head_dim)
    return decoder(c, sparse_stack(c, attention, ffn, first_dense(c), 2 * c.hidden))


def gpt_oss(c: HubConfig) -> ModelShape:
    """gpt-oss: biases on attention, experts and router, one learned sink a head."""
    bias = c.flag("attention_bias", default=True)
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=c.heads)
    ffn = experts(
        c,
        count=c.size("num_local_experts"),
        top_k=top_k(c),
        width=c.width,
        router="router",
        router_bias=True,
        expert_bias=True,
    )
    return decoder(c, [block(with_window(attention, w), ffn, 2 * c.hidden) for w in windows(c, full_every=2)])


def phimoe(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    ffn = experts(c, count=c.size("num_local_experts"), top_k=top_k(c), width=c.width, router="router")
    layers = [block(with_window(attention, w), ffn, 4 * c.hidden) for w in windows(c, everywhere=True)]
    return decoder(c, layers, final_norm=2 * c.hidden, head_bias=c.flag("lm_head_bias"))


def granitemoe(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    ffn = experts(
        c,
        count=c.size("num_local_experts"),
        top_k=top_k(c),
        width=c.width,
        router="router",
        shared_width=c.count("shared_intermediate_size", default=0),
        fused_shared=("input_linear", "output_linear"),
    )
    return decoder(c, [block(grouped_query(c, bias=bias, out_bias=bias), ffn, 2 * c.hidden)] * c.layers)


def ernie4_5_moe(c: HubConfig) -> ModelShape:
    """ERNIE 4.5: a range of sparse layers; the routers' correction bias is a parameter here."""
    bias, width = c.flag("use_bias"), c.size("moe_intermediate_size")
    every = c.size("moe_layer_interval", default=1)
    first, last = c.count("moe_layer_start_index", default=1), c.get("moe_layer_end_index")
    last = c.layers - 1 if last in (None, -1) else c.count("moe_layer_end_index")
    sparse = [(i + 1) % every == 0 and first <= i <= last for i in range(c.layers)]
    count = c.size("moe_num_experts")
    ffn = experts(
        c,
        count=count,
        top_k=c.size("moe_k"),
        width=width,
        shared_width=width * c.count("moe_num_shared_experts", default=0),
        shared_bias=bias,
        loose_params=count,
    )
    attention = grouped_query(c, bias=bias, out_bias=bias)
    layers = [block(attention, ffn if chosen else gated_mlp(c, bias=bias), 2 * c.hidden) for chosen in sparse]
    return decoder(c, layers, head_bias=bias)


def hunyuan_moe(c: HubConfig) -> ModelShape:
    """Hunyuan-A13B: every layer routes and has one shared feed-forward of the experts' width."""
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    given_k = c.get("moe_topk")
    per_layer_k = given_k if isinstance(given_k, list) else [given_k or 1] * c.layers
    layers = [
        block(
            attention,
            experts(
                c, count=c.size("num_experts"), top_k=k, width=c.width, router="wg", shared_width=c.width
            ),
            2 * c.hidden,
        )
        for k in per_layer_k[: c.layers]
    ]
    return decoder(c, layers)


def dbrx(c: HubConfig) -> ModelShape:
    attention_keys, ffn_keys = c.nested("attn_config"), c.nested("ffn_config")
    attention = fused_qkv(c, "Wqkv", "out_proj", kv_heads=attention_keys.size("kv_n_heads", default=1))
    ffn = experts(
        c,
        count=ffn_keys.size("moe_num_experts", default=4),
        top_k=ffn_keys.size("moe_top_k", default=1),
        width=ffn_keys.size("ffn_hidden_size", default=3584),
        router="layer",
    )
    return decoder(c, [block(attention, ffn, 2 * c.hidden)] * c.layers)


def llama4(c: HubConfig) -> ModelShape:
    """Llama 4's language model: experts in every interleave_moe_layer_step-th layer, one shared."""
    bias = c.flag("attention_bias")
    step = c.size("interleave_moe_layer_step", default=1)
    sparse = set(c.numbers("moe_layers")) or set(range(step - 1, c.layers, step))
    ffn = experts(
        c,
        count=c.size("num_local_experts"),
        top_k=top_k(c),
        width=c.width,
        router="router",
        shared_width=c.width,
    )
    dense = gated_mlp(c, c.size("intermediate_size_mlp"))
    attention = grouped_query(c, bias=bias, out_bias=bias)
    return decoder(
        c, [block(attention, ffn if i in sparse else dense, 2 * c.hidden) for i in range(c.layers)]
    )


BUILDERS = {
    "mixtral": mixtral,
    "minimax_m2": minimax_m2,
    "olmoe": olmoe,
    "flex_olmo": flex_olmo,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
    "glm4_moe": glm4_moe,
    "glm4v_moe_text": glm4_moe,
    "dots1": glm4_moe,
    "solar_open": glm4_moe,
    "sarvam_moe": glm4_moe,
    "deepseek": glm4_moe,
    "exaone_moe": exaone_moe,
    "gpt_oss": gpt_oss,
    "phimoe": phimoe,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoe,
    "ernie4_5_moe": ernie4_5_moe,
    "hunyuan_v1_moe": hunyuan_moe,
    "dbrx": dbrx,
    "llama4_text": llama4,
}
