"""Dense decoders of the Llama line: separate projections, RMS norms, a gated feed-forward."""

from __future__ import annotations

from ftdash.engine.model.blocks import block, decoder, gated_mlp, grouped_query
from ftdash.engine.model.config import HubConfig
from ftdash.engine.model.shape import ModelShape


def llama(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias)
    layer = block(attention, gated_mlp(c, bias=c.flag("mlp_bias")), 2 * c.hidden)
    return decoder(c, [layer] * c.layers)


def mistral(c: HubConfig) -> ModelShape:
    layer = block(
        grouped_query(c, window=c.count("sliding_window", default=0) or None), gated_mlp(c), 2 * c.hidden
    )
    return decoder(c, [layer] * c.layers)


def qwen2(c: HubConfig) -> ModelShape:
    layer = block(grouped_query(c, bias=True), gated_mlp(c), 2 * c.hidden)
    return decoder(c, [layer] * c.layers)


def qwen3(c: HubConfig) -> ModelShape:
    bias = c.flag("attention_bias")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)
    return decoder(c, [block(attention, gated_mlp(c), 2 * c.hidden)] * c.layers)


BUILDERS = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
