"""Decoders before Llama: fused projections, layer norms with bias, a plain feed-forward of 4 × hidden."""

from __future__ import annotations

from msgspec.structs import replace

from ftdash.engine.model.blocks import (
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
from ftdash.engine.model.shape import ModelShape


def gpt2(c: HubConfig) -> ModelShape:
    """GPT-2 and GPT-BigCode (multi-query): learned positions, biases everywhere."""
    kv = 1 if c.model_type == "gpt_bigcode" and c.flag("multi_query", default=True) else c.heads
    attention = fused_qkv(c, "c_attn", "c_proj", bias=True, out_bias=True, kv_heads=kv)
    ffn = plain_mlp(c, "c_fc", "c_proj", c.size("n_inner", default=4 * c.hidden), bias=True)
    positions = c.size("n_positions", "max_position_embeddings")
    shape = decoder(
        c,
        [block(attention, ffn, 4 * c.hidden)] * c.layers,
        final_norm=2 * c.hidden,
        position_params=positions * c.hidden,
    )
    if c.flag("add_cross_attention"):
        return replace(shape, unplaced=("cross-attention to an encoder",))
    return shape


def gpt_neo(c: HubConfig) -> ModelShape:
    attention = grouped_query(c, out_bias=True, out_name="out_proj", kv_heads=c.heads)
    ffn = plain_mlp(c, "c_fc", "c_proj", c.size("intermediate_size", default=4 * c.hidden), bias=True)
    return decoder(
        c,
        [block(attention, ffn, 4 * c.hidden)] * c.layers,
        final_norm=2 * c.hidden,
        position_params=c.size("max_position_embeddings") * c.hidden,
    )


def gpt_neox(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias", default=True)
    attention = fused_qkv(c, "query_key_value", "dense", bias=bias, out_bias=bias, kv_heads=c.heads)
    ffn = plain_mlp(c, "dense_h_to_4h", "dense_4h_to_h", c.width, bias=True)
    return decoder(c, [block(attention, ffn, 4 * c.hidden)] * c.layers, final_norm=2 * c.hidden)


def gptj(c: HubConfig) -> ModelShape:
    """GPT-J and CodeGen: one norm a block, a bias on the head."""
    if c.model_type == "codegen":
        attention = fused_qkv(c, "qkv_proj", "out_proj", kv_heads=c.heads)
    else:
        attention = grouped_query(c, out_name="out_proj", kv_heads=c.heads)
    ffn = plain_mlp(c, "fc_in", "fc_out", c.size("n_inner", default=4 * c.hidden), bias=True)
    layer = block(attention, ffn, 2 * c.hidden)
    return decoder(c, [layer] * c.layers, final_norm=2 * c.hidden, head_bias=True)


def mpt(c: HubConfig) -> ModelShape:
    """MPT: no biases anywhere, ALiBi; transformers' class fixes the width at 4 × d_model."""
    attention = fused_qkv(c, "Wqkv", "out_proj", kv_heads=c.heads)
    ffn = plain_mlp(c, "up_proj", "down_proj", 4 * c.hidden, bias=False)
    shape = decoder(c, [block(attention, ffn, 2 * c.hidden)] * c.layers)
    return replace(shape, max_positions=c.size("max_seq_len", default=2048))


def opt(c: HubConfig) -> ModelShape:
    """OPT: learned positions with two spare rows; the 350M has narrower embeddings."""
    bias = c.flag("enable_bias", default=True)
    norm = 2 * c.hidden if c.flag("layer_norm_elementwise_affine", default=True) else 0
    width = c.size("word_embed_proj_dim", default=c.hidden)
    attention = grouped_query(c, bias=bias, out_bias=bias, out_name="out_proj", kv_heads=c.heads)
    ffn = plain_mlp(c, "fc1", "fc2", c.size("ffn_dim"), bias=bias)
    last = c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm")
    return decoder(
        c,
        [block(attention, ffn, 2 * norm)] * c.layers,
        final_norm=norm if last else 0,
        position_params=(c.size("max_position_embeddings") + 2) * c.hidden,
        embedding_width=width,
        other_params=2 * width * c.hidden if width != c.hidden else 0,
    )


def bloom(c: HubConfig) -> ModelShape:
    """BLOOM: ALiBi, and a norm right after the embedding."""
    attention = fused_qkv(c, "query_key_value", "dense", bias=True, out_bias=True, kv_heads=c.heads)
    ffn = plain_mlp(c, "dense_h_to_4h", "dense_4h_to_h", 4 * c.hidden, bias=True)
    return decoder(c, [block(attention, ffn, 4 * c.hidden)] * c.layers, final_norm=4 * c.hidden)


def falcon(c: HubConfig) -> ModelShape:
    """Falcon, and its first names RefinedWeb (40B) and RefinedWebModel (7B) with their older keys."""
    new = c.flag("new_decoder_architecture", default=c.model_type == "RefinedWeb")
    if new:
        kv = c.size("num_kv_heads", "n_head_kv", default=c.heads)
    else:
        kv = 1 if c.flag("multi_query", default=True) else c.heads
    bias = c.flag("bias")
    attention = fused_qkv(c, "query_key_value", "dense", bias=bias, out_bias=bias, kv_heads=kv)
    ffn = plain_mlp(
        c, "dense_h_to_4h", "dense_4h_to_h", c.size("ffn_hidden_size", default=4 * c.hidden), bias=bias
    )
    if not c.flag("parallel_attn", default=True):
        norms = 2
    else:
        norms = 2 if c.count("num_ln_in_parallel_attn", default=2 if new else 1) == 2 else 1
    return decoder(c, [block(attention, ffn, norms * 2 * c.hidden)] * c.layers, final_norm=2 * c.hidden)


def starcoder2(c: HubConfig) -> ModelShape:
    bias = c.flag("use_bias", default=True)
    attention = grouped_query(c, bias=bias, out_bias=bias)
    ffn = plain_mlp(c, "c_fc", "c_proj", c.width, bias=bias)
    layers = [block(with_window(attention, w), ffn, 4 * c.hidden) for w in windows(c, everywhere=True)]
    return decoder(c, layers, final_norm=2 * c.hidden)


def stablelm(c: HubConfig) -> ModelShape:
    head_dim = c.hidden // c.heads
    norms = (c.heads + c.kv_heads) * head_dim if c.flag("qk_layernorm") else 0
    attention = grouped_query(c, bias=c.flag("use_qkv_bias"), head_dim=head_dim, norm_params=norms)
    sides = 1 if c.flag("use_parallel_residual") else 2
    layer = block(attention, gated_mlp(c), sides * 2 * c.hidden)
    return decoder(c, [layer] * c.layers, final_norm=2 * c.hidden)


def phi(c: HubConfig) -> ModelShape:
    """Phi 1, 1.5 and 2: one norm a block, biases everywhere, also on the head."""
    norms = 4 * (c.hidden // c.heads) if c.flag("qk_layernorm") else 0
    attention = grouped_query(c, bias=True, out_bias=True, out_name="dense", norm_params=norms)
    ffn = plain_mlp(c, "fc1", "fc2", c.width, bias=True)
    layer = block(attention, ffn, 2 * c.hidden)
    return decoder(c, [layer] * c.layers, final_norm=2 * c.hidden, head_bias=True)


def persimmon(c: HubConfig) -> ModelShape:
    norms = 4 * c.head_dim if c.flag("qk_layernorm", default=True) else 0
    attention = fused_qkv(
        c, "query_key_value", "dense", bias=True, out_bias=True, kv_heads=c.heads, norm_params=norms
    )
    ffn = plain_mlp(c, "dense_h_to_4h", "dense_4h_to_h", c.width, bias=True)
    return decoder(c, [block(attention, ffn, 4 * c.hidden)] * c.layers, final_norm=2 * c.hidden)


BUILDERS = {
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "codegen": gptj,
    "mpt": mpt,
    "opt": opt,
    "bloom": bloom,
    "falcon": falcon,
    "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "phi": phi,
    "persimmon": persimmon,
}
