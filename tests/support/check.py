"""Small configs and scripts that checks are tried on, each well-formed until a test breaks it."""

# ruff: noqa: E501

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import yaml

from ftdash.engine.check.findings import Severity
from ftdash.engine.check.registry import check_files

FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    },
}
DDP = {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 1, "mixed_precision": "bf16"}
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", {args})
model = AutoModelForCausalLM.from_pretrained("{model}", {load})
trainer = SFTTrainer(model=model, args=args, train_dataset=None{peft})
trainer.train()
{end}
"""


def script(
    args: str = "", load: str = "", peft: str = "", end: str = "", model: str = "Qwen/Qwen3-8B"
) -> str:
    return SCRIPT.format(args=args, load=load, peft=peft, end=textwrap.dedent(end), model=model)


def fsdp2(**section: object) -> dict:
    kept = {**FSDP2["fsdp_config"], **section}
    return {**FSDP2, "fsdp_config": {key: value for key, value in kept.items() if value is not None}}


def fsdp1(**section: object) -> dict:
    return {**FSDP2, "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", **section}}


def zero3(top: dict | None = None, **zero: object) -> dict:
    return {**ZERO3, **(top or {}), "zero_optimization": {**ZERO3["zero_optimization"], **zero}}


def titan(parallelism: str) -> str:
    return f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{parallelism}\n'


def sbatch(body: str, **options: object) -> str:
    names = {"nodes": 2, "ntasks-per-node": 1, "gres": "gpu:8"} | {
        key.replace("_", "-"): v for key, v in options.items()
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in names.items() if value is not None]
    return "#!/bin/bash\n" + "\n".join(lines) + "\n" + textwrap.dedent(body)


HEAD = """
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 50000))
"""
GOOD_RUN = (
    "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d "
    "--rdzv_endpoint $MASTER_ADDR:$MASTER_PORT train.py\n"
)
LORA = ", peft_config=LoraConfig(r=16)"
FOUR_BIT = "quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage={storage}), dtype={dtype}"
BF16 = FOUR_BIT.format(storage="torch.bfloat16", dtype="torch.bfloat16")


def written(folder: Path, files: dict[str, object]) -> list[Path]:
    paths = []
    for name, content in files.items():
        path = folder / name
        if isinstance(content, str):
            path.write_text(content)
        else:
            path.write_text(
                json.dumps(content, indent=2)
                if name.endswith((".json", ".ipynb"))
                else yaml.safe_dump(content)
            )
        paths.append(path)
    return paths


def codes(folder: Path, files: dict[str, object]) -> dict[str, Severity]:
    folder.mkdir()
    return {finding.code: finding.severity for finding in check_files(written(folder, files))}
