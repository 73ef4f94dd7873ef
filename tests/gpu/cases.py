"""The configurations that the check trains, each as large as the GPU's memory and the time allow."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ftdash.engine.model.load import load_config_file
from ftdash.engine.plan import Checkpointing, Method, Optimizer, Plan, Precision, Strategy
from ftdash.engine.planner import evaluate

# Layer shapes of Qwen3-8B and Qwen3-30B-A3B (their config.json); the check chooses the number of layers.
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
# Widths of Qwen3-0.6B, for GPUs that cannot train two layers of the above.
_SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
_SMALL_MOE = {"moe_intermediate_size": 384, "num_experts": 32}
# What is too small to say anything, and quick: proves that the check runs.
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
_TINY_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

MEMORY_SHARE = 0.65  # of the GPU, as predicted: an error of a third still fits
MOST_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration: `most_params` keeps the time to build and train it within a minute."""

    name: str
    base: dict[str, Any]
    plan: Plan
    most_params: float


def _plan(**choices: Any) -> Plan:
    return Plan(gpus=1, gpus_per_node=1, strategy=Strategy.NONE, optimizer=Optimizer.ADAMW, **choices)


def _cases() -> list[Case]:
    full, none = Checkpointing.FULL, Checkpointing.NONE
    lora = {"method": Method.LORA, "lora_rank": 16}
    moe_lora = {**lora, "lora_targets": ("attention",)}
    return [
        Case("dense-full", DENSE, _plan(seq_len=4096, checkpointing=full), 6e9),
        Case(
            "dense-full-bf16", DENSE, _plan(seq_len=2048, checkpointing=none, precision=Precision.BF16), 6e9
        ),
        Case("dense-lora-4096", DENSE, _plan(seq_len=4096, checkpointing=full, **lora), 9e9),
        Case("dense-lora-2048", DENSE, _plan(seq_len=2048, checkpointing=none, **lora), 9e9),
        Case("dense-qlora", DENSE, _plan(seq_len=2048, checkpointing=full, method=Method.QLORA), 3e9),
        Case("moe-lora", MOE, _plan(seq_len=2048, checkpointing=full, **moe_lora), 12e9),
        Case("moe-full", MOE, _plan(seq_len=2048, checkpointing=full, precision=Precision.BF16), 6e9),
    ]


def cases(gpu: str, budget_bytes: int, folder: Path, *, tiny: bool = False) -> list[Case]:
    """Every case with a config.json below `folder` that its plan names.

    `gpu` is the plan's GPU; predicted device memory stays below `budget_bytes`. `tiny` makes two small layers
    and 64 tokens of each.
    """
    found = []
    for case in _cases():
        plan = structs.replace(case.plan, gpu=gpu)
        if tiny:
            moe = _TINY_MOE if "num_experts" in case.base else {}
            base = {**case.base, **_TINY, **moe}
            plan = structs.replace(
                plan, seq_len=case.plan.seq_len // 32, config=_written(base, 2, folder / case.name)
            )
        else:
            plan = _sized(case, plan, budget_bytes, folder / case.name)
        found.append(replace(case, plan=plan))
    return found


def _written(base: dict[str, Any], layers: int, folder: Path) -> str:
    target = folder / f"{layers}-layers"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**base, "num_hidden_layers": layers}))
    return str(target)


def _sized(case: Case, plan: Plan, budget_bytes: int, folder: Path) -> Plan:
    """The plan with the most layers that stay within memory and size, of narrow ones where no two fit."""
    narrow = {**case.base, **_SMALL, **(_SMALL_MOE if "num_experts" in case.base else {})}
    chosen = plan
    for width, base in (("wide", case.base), ("narrow", narrow)):
        for layers in range(1, MOST_LAYERS + 1):
            larger = structs.replace(plan, config=_written(base, layers, folder / width))
            params = load_config_file(str(larger.config)).total_params
            if params > case.most_params or evaluate(larger).memory.device > budget_bytes:
                break
            chosen = larger
        if layers > 2:
            return chosen
    return chosen if chosen is not plan else structs.replace(plan, config=_written(narrow, 1, folder))
