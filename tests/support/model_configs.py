"""Random small configs of every decoder family, and what the real transformers class makes of them."""

from __future__ import annotations

import random
from typing import Any

from ftdash.engine.model.config import type_defaults

_FLAGS = (
    "attention_bias", "mlp_bias", "tie_word_embeddings", "use_bias", "qk_layernorm", "use_qk_norm", "bias",
    "use_qkv_bias", "qkv_bias", "use_parallel_residual", "attention_out_bias", "multi_query", "parallel_attn",
    "new_decoder_architecture", "enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine",
    "lm_head_bias", "use_sliding_window", "mamba_rms_norm", "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip

_ALWAYS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (300, 777, 1000),
    "max_position_embeddings": (128, 256),
    "n_positions": (64, 128),
    "num_experts": (4, 8),
    "num_local_experts": (4, 8),
    "moe_num_experts": (4, 8),
    "n_routed_experts": (8, 16),
    "num_experts_per_tok": (2, 3),
    "moe_k": (2,),
    "moe_topk": (2,),
    "qk_rope_head_dim": (8, 16),
    "n_group": (1,),
    "topk_group": (1,),
    "mamba_n_heads": (8,),
    "mamba_num_heads": (8,),
}
_OFTEN: dict[str, tuple[Any, ...]] = {
    "moe_intermediate_size": (24, 40),
    "shared_expert_intermediate_size": (56, 72),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "moe_num_shared_experts": (0, 2),
    "moe_layer_interval": (1, 2),
    "moe_layer_start_index": (0, 1),
    "moe_layer_end_index": (-1, 2),
    "shared_intermediate_size": (12, 44),
    "first_k_dense_replace": (0, 1, 2),
    "decoder_sparse_step": (1, 2, 3),
    "interleave_moe_layer_step": (1, 2),
    "intermediate_size_mlp": (99,),
    "mlp_only_layers": ([], [0], [1]),
    "kv_lora_rank": (20, 32),
    "q_lora_rank": (None, 24, 48),
    "qk_nope_head_dim": (16, 24),
    "v_head_dim": (16, 20),
    "n_inner": (None, 200),
    "ffn_dim": (100, 222),
    "ffn_hidden_size": (None, 128),
    "word_embed_proj_dim": (48, None),
    "num_ln_in_parallel_attn": (None, 1, 2),
    "sliding_window": (64,),
    "mamba_d_state": (8, 16),
    "mamba_n_groups": (1, 2),
    "mamba_d_ssm": (64,),
    "mamba_head_dim": (16,),
    "n_groups": (2,),
    "ssm_state_size": (16,),
    "moe_shared_expert_intermediate_size": (33, 50),
    "moe_latent_size": (None, 48),
    "attn_layer_period": (2, 3),
    "attn_layer_offset": (0, 1),
    "expert_layer_period": (2,),
    "expert_layer_offset": (0, 1),
    "attn_layer_indices": ([0], [0, 1]),
    "linear_num_key_heads": (2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_key_head_dim": (16,),
    "linear_value_head_dim": (16, 24),
}


def random_config(model_type: str, rng: random.Random) -> dict[str, Any]:
    """Keys that the family's config class has, some left out so that its defaults count."""
    known = type_defaults(model_type).defaults
    heads, head_dim, layers = rng.choice((4, 8, 12)), rng.choice((16, 24, 32)), rng.choice((1, 2, 3, 5, 7))
    kv = rng.choice([k for k in (1, 2, 4, heads) if heads % k == 0])
    config: dict[str, Any] = {"model_type": model_type, "rope_theta": 10000.0}

    def first(names: tuple[str, ...], value: Any) -> None:
        for name in names:
            if name in known:
                config[name] = value
                return

    first(("hidden_size", "n_embd", "d_model"), heads * head_dim)
    first(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), layers)
    first(("num_attention_heads", "n_head", "n_heads"), heads)
    first(("intermediate_size",), rng.choice((100, 160, 333)))
    is_latent = "kv_lora_rank" in known
    first(("num_key_value_heads",), heads if is_latent else kv)
    if "num_kv_heads" in known and rng.random() < 0.8:
        config["num_kv_heads"] = kv
    if "head_dim" in known and not is_latent and rng.random() < 0.7:
        config["head_dim"] = rng.choice((16, 32, 64))
    for choices, chance in ((_ALWAYS, 1.0), (_OFTEN, 0.85)):
        for key, values in choices.items():
            if key in known and key not in config and rng.random() < chance:
                config[key] = rng.choice(values)
    for key in _FLAGS:
        if key in known and rng.random() < 0.5:
            config[key] = rng.random() < 0.5
    return config | _special(model_type, rng, layers, kv)


def _special(model_type: str, rng: random.Random, layers: int, kv: int) -> dict[str, Any]:
    if model_type == "gpt_neo":
        return {"attention_types": [[["global"], layers]]}
    if model_type == "dbrx":
        ffn = {"ffn_hidden_size": 88, "moe_num_experts": 4, "moe_top_k": 2}
        return {
            "attn_config": {"kv_n_heads": kv, "rope_theta": 1e4},
            "ffn_config": ffn,
            "tie_word_embeddings": False,
        }
    if model_type == "nemotron_h":
        pattern = "".join(rng.choice("M*-E") for _ in range(layers))
        return {"hybrid_override_pattern": pattern, "num_hidden_layers": layers}
    if model_type == "minimax":
        return {"layer_types": [rng.choice(("full_attention", "linear_attention")) for _ in range(layers)]}
    return {}


def real_model(config: dict[str, Any]) -> Any:
    """The real class on the meta device: no memory, real parameter shapes."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = {key: value for key, value in config.items() if key not in ("model_type", "source")}
    model_type = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    # Tiny vocabularies do not hold the published special tokens.
    tokens = {} if config.get("vocab_size", 10**6) > 10_000 else dict.fromkeys(_TOKENS)
    try:
        built = CONFIG_MAPPING[model_type](**keys, **tokens)
    except Exception:
        built = CONFIG_MAPPING[model_type](**keys)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(built)


_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def real_count(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in real_model(config).parameters())
