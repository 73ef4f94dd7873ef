"""LoRA adapters and 4-bit loading, as each variant means them."""

from __future__ import annotations

from typing import Any

from ftdash.engine.train.options import Options, TrainError, Variant

ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP_TARGETS = ["gate_proj", "up_proj", "down_proj"]
EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def quantization(options: Options) -> Any | None:
    """The 4-bit config (nf4, double quantisation, bf16 compute) under qlora, else None."""
    if options.variant is not Variant.QLORA:
        return None
    import torch
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise TrainError("--variant qlora needs bitsandbytes: pip install 'ftdash[qlora]'") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16 if options.quant_storage == "bf16" else torch.uint8,
    )


def expert_count(config: Any) -> int:
    """Routed experts per layer of a model's config, 0 for a dense model."""
    text = config.get_text_config()
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if value := getattr(text, name, None):
            return int(value)
    return 0


def lora_config(options: Options, model_config: Any) -> Any | None:
    """The LoraConfig of the variant, or None for `full`. Raises TrainError for experts in a dense model."""
    if options.variant is Variant.FULL:
        return None
    from peft import LoraConfig

    experts = expert_count(model_config)
    scaled = options.variant is Variant.MOE_LORA or options.expert_lora == "scaled"
    on_experts = scaled or options.expert_lora == "full"
    if on_experts and not experts:
        asked = "--variant moe-lora" if options.variant is Variant.MOE_LORA else "--expert-lora"
        raise TrainError(f"{asked}: {options.model} has no experts")
    if on_experts and options.variant is Variant.QLORA:
        raise TrainError("--expert-lora: adapters on 4-bit experts are not supported; use --variant moe-lora")
    rank = options.lora_rank
    expert_rank = max(1, rank // experts) if scaled else rank
    if on_experts and options.lora_dropout:
        raise TrainError("--lora-dropout: PEFT has none on expert parameters; leave it 0")
    parameters: dict[str, Any] = {}
    if on_experts:
        parameters["target_parameters"] = list(EXPERT_PARAMETERS)
        parameters["rank_pattern"] = dict.fromkeys(EXPERT_PARAMETERS, expert_rank)
        # Alpha follows the rank, so that the adapters' scale is the same on experts and attention.
        parameters["alpha_pattern"] = dict.fromkeys(EXPERT_PARAMETERS, 2 * expert_rank)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=options.lora_dropout,
        target_modules=_target_modules(options, experts),
        **parameters,
    )


def _target_modules(options: Options, experts: int) -> list[str] | str:
    """Module names for PEFT; `all-linear` leaves out routers, experts and the head."""
    targets = options.lora_targets
    if targets == ("attention",) or (options.variant is Variant.MOE_LORA and targets == ("all-linear",)):
        return ATTENTION_TARGETS
    if targets == ("attention+mlp",):
        return ATTENTION_TARGETS + MLP_TARGETS
    if targets == ("all-linear",):
        # PEFT's own "all-linear" adapts routers and experts of an MoE too.
        return ATTENTION_TARGETS if experts else "all-linear"
    return list(targets)
