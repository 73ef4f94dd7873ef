"""Mixture-of-experts decoders with grouped-query attention."""

from __future__ import annotations

from ftdash.engine.model.blocks import FeedForward, block, decoder, experts, gated_mlp, grouped_query
from ftdash.engine.model.config import HubConfig
from ftdash.engine.model.shape import ModelShape


def mixtral(c: HubConfig) -> ModelShape:
    ffn = experts(c, count=c.size("num_local_experts"), top_k=c.size("num_experts_per_tok"), width=c.width)
    window = c.count("sliding_window", default=0) or None
    return decoder(c, [block(grouped_query(c, window=window), ffn, 2 * c.hidden)] * c.layers)


def _sparse_layers(c: HubConfig, experts_count: int) -> list[bool]:
    """Qwen's rule: every decoder_sparse_step-th layer is sparse, mlp_only_layers are not."""
    step, dense = c.size("decoder_sparse_step", default=1), set(c.numbers("mlp_only_layers"))
    return [i not in dense and experts_count > 0 and (i + 1) % step == 0 for i in range(c.layers)]


def qwen3_moe(c: HubConfig) -> ModelShape:
    bias, count = c.flag("attention_bias"), c.count("num_experts")
    attention = grouped_query(c, bias=bias, out_bias=bias, norm_params=2 * c.head_dim)

    def feed_forward(sparse: bool) -> FeedForward:
        if not sparse:
            return gated_mlp(c)
        return experts(
            c, count=count, top_k=c.size("num_experts_per_tok"), width=c.size("moe_intermediate_size")
        )

    layers = [block(attention, feed_forward(sparse), 2 * c.hidden) for sparse in _sparse_layers(c, count)]
    return decoder(c, layers)


BUILDERS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
