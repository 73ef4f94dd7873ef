"""A plan and its model made small enough for a CPU, with every axis and every divisibility kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ftdash.engine.configs.refusals import ZERO_STAGE
from ftdash.engine.mesh import Mesh
from ftdash.engine.plan import Attention, Checkpointing, Loss, Offload, Optimizer, Plan, Precision, Strategy

MAX_PROCESSES = 8
LAYERS = 2
HEAD_DIM = 16
VOCAB = 512
SEQ_LEN = 128
MAX_PARAMS = 50_000_000


class RehearsalError(Exception):
    """The plan cannot be rehearsed here, or the rehearsal failed; the text is one line with the reason.

    `proved` is what held before that.
    """

    def __init__(self, reason: str, proved: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.proved = proved


def small_plan(plan: Plan, steps_rank: int = 8) -> tuple[Plan, list[str]]:
    """The plan on few ranks and short sequences, and what of it that leaves unproved.

    Every axis above 1 stays above 1. Raises RehearsalError when that needs more than 8 processes.
    """
    if plan.strategy is Strategy.FSDP1 and plan.gpus > 1:
        raise RehearsalError("fsdp1 places its units by GPU index: no CPU runs it, rehearse --strategy fsdp")
    if plan.cp > 1 and plan.strategy not in ZERO_STAGE:
        raise RehearsalError(
            "--cp under fsdp is ring attention, which torch has for GPUs only: its CPU operator has "
            "no sharding strategy; rehearse it with --cp 1, or as Ulysses with --strategy zero3"
        )
    mesh = Mesh.from_plan(plan)
    replicate, shard, tp, ep = (min(size, 2) for size in (mesh.replicate, mesh.shard, mesh.tp, mesh.ep))
    cp = min(mesh.cp, 2)
    left: list[str] = []
    if cp > 1 and shard > 1:
        # Its all-to-all stands on scatters that name global ranks (torch/distributed/nn/functional.py), which
        # only the group that begins with rank 0 has. ZeRO still shards over the ranks of that group.
        shard = 1
        left.append("data-parallel groups beside Ulysses': on gloo torch runs the first group alone")
    if mesh.ep > 1:
        ep = max(2, tp)
        # Experts that several ranks share stay shared.
        expert_shard = 2 if mesh.expert_shard > 1 else 1
        shard = max(shard, ep * expert_shard // tp)
    world = replicate * shard * tp * cp
    if world > MAX_PROCESSES:
        raise RehearsalError(
            f"replicate {replicate} x shard {shard} x cp {cp} x tp {tp} = {world} processes keep every axis "
            "above 1; "
            f"at most {MAX_PROCESSES} fit a rehearsal"
        )
    offload = plan.offload
    if offload is not Offload.NONE and plan.strategy not in ZERO_STAGE:
        left.append("parameter offload: FSDP pins host memory, which needs a GPU")
        offload = Offload.NONE
    if offload is Offload.NVME:
        left.append("NVMe offload: its asynchronous I/O was not tried; optimizer offload to the CPU was")
        offload = Offload.OPTIMIZER
    optimizer = plan.optimizer
    if optimizer not in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH, Optimizer.SGD, Optimizer.ADAFACTOR):
        left.append(f"optimizer {optimizer}: AdamW stood in for it")
        optimizer = Optimizer.ADAMW
    if plan.attention is Attention.FLASH:
        left.append("flash attention: sdpa stood in for it")
    if plan.precision is not Precision.FP32:
        left.append(f"{plan.precision}: the rehearsal computed in fp32")
    if plan.gpus > plan.gpus_per_node:
        left.append("the network between nodes, and the rendezvous on several hosts")
    small = replace(
        plan,
        model=None,
        config=None,
        params=None,
        gpus=world,
        gpus_per_node=MAX_PROCESSES,
        replicate=replicate if mesh.replicate > 1 and plan.strategy is not Strategy.DDP else None,
        tp=tp,
        cp=cp,
        ep=ep,
        lora_rank=min(plan.lora_rank, steps_rank),
        micro_batch=1,
        grad_accum=min(plan.grad_accum, 2),
        seq_len=SEQ_LEN,
        checkpointing=Checkpointing.FULL
        if plan.checkpointing is not Checkpointing.NONE
        else Checkpointing.NONE,
        loss=Loss.FULL if plan.loss is Loss.FULL else Loss.FUSED,
        attention=Attention.SDPA if plan.attention is Attention.FLASH else plan.attention,
        optimizer=optimizer,
        precision=Precision.FP32,
        offload=offload,
    )
    return small, left


def hub_config(plan: Plan) -> dict[str, Any]:
    """The hub config behind a plan's model. Raises RehearsalError for a bare parameter count."""
    from ftdash import presets

    if plan.config is not None:
        path = Path(plan.config)
        return json.loads((path / "config.json" if path.is_dir() else path).read_text())
    if plan.model is None:
        raise RehearsalError("--params describes no architecture: give --model or --config")
    return json.loads((presets.FOLDER / "models" / f"{plan.model}.json").read_text())


def small_config(config: Mapping[str, Any], *, tp: int, ep: int) -> dict[str, Any]:
    """The same architecture with few layers and small widths, every count divisible by the mesh.

    Ratios that decide code paths stay: grouped heads stay grouped, several experts a token stay several,
    dense layers before the mixture stay. Keys that are not known are kept as they are.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "num_hidden_layers" in nested:
        config = {**nested, "model_type": nested.get("model_type", config.get("model_type"))}
    small = {key: value for key, value in config.items() if key not in _DROPPED}
    heads = 2 * max(tp, 2)
    grouped = config.get("num_key_value_heads", config.get("num_attention_heads")) != config.get(
        "num_attention_heads"
    )
    mla = config.get("kv_lora_rank") is not None
    dense = int(config.get("first_k_dense_replace") or 0)
    layers = LAYERS + (1 if dense else 0)
    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": 4 * HEAD_DIM * max(tp, 2),
        "ffn_dim": 4 * HEAD_DIM * max(tp, 2),
        "num_attention_heads": heads,
        "num_key_value_heads": max(tp, heads // 2) if grouped else heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4 * SEQ_LEN,
        "moe_intermediate_size": 2 * HEAD_DIM,
        "shared_expert_intermediate_size": 2 * HEAD_DIM,
        "expert_ffn_hidden_size": 2 * HEAD_DIM,
        "first_k_dense_replace": min(dense, 1),
        "max_window_layers": layers,
        "sliding_window": SEQ_LEN // 2,
        "q_lora_rank": HEAD_DIM,
        "kv_lora_rank": HEAD_DIM,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": HEAD_DIM // 2,
        "qk_head_dim": HEAD_DIM + HEAD_DIM // 2,
        "v_head_dim": HEAD_DIM,
        "n_layer": layers,
        "n_embd": heads * HEAD_DIM,
        "n_head": heads,
        "n_positions": 4 * SEQ_LEN,
        "d_model": heads * HEAD_DIM,
        "n_layers": layers,
        "n_heads": heads,
        "max_seq_len": 4 * SEQ_LEN,
    }
    experts = 4 * max(ep, 2)
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if config.get(key):
            small[key] = experts
    for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"):
        if isinstance(config.get(key), int):
            small[key] = min(2, config[key])
    groups = math.gcd(int(config.get("n_group") or 1), experts)
    for key, value in (("n_group", groups), ("topk_group", min(groups, int(config.get("topk_group") or 1)))):
        if config.get(key) is not None:
            small[key] = value
    for key, value in changes.items():
        if config.get(key) is not None and not (mla and key == "head_dim"):
            small[key] = value
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers"):
        if isinstance(config.get(key), list):
            small[key] = _shorten(config[key], layers)
    if isinstance(config.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers - 1]
    return small


# Token ids of the large vocabulary, quantised weights, remote code: none of them fits the small model.
_DROPPED = frozenset(
    [
        "source",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "quantization_config",
        "auto_map",
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "rope_scaling",
        "num_nextn_predict_layers",
    ]
)


def _shorten(values: list[Any], layers: int) -> list[Any]:
    """As many entries as layers, of every kind that occurs while there is room."""
    kinds = list(dict.fromkeys(values))
    return [*kinds[:layers], *values[: max(0, layers - len(kinds))]][:layers]


def build_model(config: Mapping[str, Any], folder: Path, seed: int = 0) -> None:
    """Write config, random weights and a tokenizer to `folder`. Raises RehearsalError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ftdash.engine.train.tiny import build_tokenizer

    tokenizer = build_tokenizer(int(config["vocab_size"]))
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    try:
        built = AutoConfig.for_model(**{**config, **tokens})
        with torch.device("meta"):
            size = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(built).parameters())
        if size > MAX_PARAMS:
            raise RehearsalError(
                f"{config.get('model_type')}: its config keeps {size:,} parameters when made small"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(built)
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RehearsalError(
            f"{config.get('model_type')}: transformers cannot build it small: {str(error).splitlines()[0]}"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
