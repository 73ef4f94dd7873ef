"""The DeepSpeed JSON of a ZeRO plan; "auto" stands wherever the trainer owns the value."""

from __future__ import annotations

import json
from typing import Any

from ftdash.engine.configs.refusals import ZERO_STAGE
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Offload, Plan, Precision

NVME_PATH = "/local_nvme"


def deepspeed_json(plan: Plan, shape: ModelShape, *, on_cpu: bool = False) -> str:
    """The config for `plan.strategy` zero1, zero2 or zero3, as the trainers read it.

    `on_cpu` leaves out pinning, which needs an accelerator.
    """
    return json.dumps(_config(plan, shape, on_cpu), indent=2) + "\n"


def zero_plus_plus_json(plan: Plan, shape: ModelShape) -> str:
    """ZeRO++ on top of stage 3 (arXiv:2306.10209): secondary shards within a node, quantised collectives."""
    config = _config(plan, shape, on_cpu=False)
    config["zero_optimization"] |= {
        "zero_hpz_partition_size": plan.gpus_per_node,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    return json.dumps(config, indent=2) + "\n"


def moe_block_classes(shape: ModelShape) -> list[str]:
    """Class names that transformers gives a model's MoE block; DeepSpeed skips names a model lacks.

    Without a leaf module, a rank whose tokens miss an expert never enters that expert's gather and the
    job hangs (deepspeedai/DeepSpeed#4808, #4966).
    """
    special = {"gpt_oss": ["GptOssMLP"], "llama4_text": ["Llama4TextMoe"], "llama4": ["Llama4TextMoe"]}
    if shape.model_type in special:
        return special[shape.model_type]
    prefix = shape.layer_class.removesuffix("DecoderLayer").removesuffix("Block")
    return [f"{prefix}SparseMoeBlock", f"{prefix}MoE"]


def _config(plan: Plan, shape: ModelShape, on_cpu: bool) -> dict[str, Any]:
    stage = ZERO_STAGE[plan.strategy]
    config: dict[str, Any] = {}
    if plan.precision in (Precision.BF16_MIXED, Precision.BF16):
        config["bf16"] = {"enabled": "auto"}
    elif plan.precision is Precision.FP16_MIXED:
        config["fp16"] = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        # Elements, not bytes: the bucket costs twice this in bf16, four times with overlap_comm.
        "reduce_bucket_size": "auto" if stage == 3 else 200_000_000,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = 200_000_000
    else:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if shape.is_moe:
            zero["leaf_module"] = {"classes": moe_block_classes(shape)}
    zero |= _offload(plan, stage, on_cpu)
    config["zero_optimization"] = zero
    if plan.offload is not Offload.NONE:
        # Named here so that DeepSpeed builds its CPU Adam; a client optimizer is refused under offload.
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        }
    config |= {
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
    }
    return config


def _offload(plan: Plan, stage: int, on_cpu: bool) -> dict[str, Any]:
    if plan.offload is Offload.NONE:
        return {}
    if plan.offload is Offload.NVME:
        device: dict[str, Any] = {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": not on_cpu}
    else:
        device = {"device": "cpu", "pin_memory": not on_cpu}
    parts: dict[str, Any] = {"offload_optimizer": device}
    if stage == 3 and plan.offload in (Offload.ALL, Offload.NVME):
        parts["offload_param"] = dict(device)
    return parts
