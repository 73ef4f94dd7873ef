"""What a simulation is asked and what it answers, as the two processes exchange them in JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from ftdash.engine.model import load
from ftdash.engine.model.config import type_defaults
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import (
    SWITCHES,
    Attention,
    Checkpointing,
    ExpertLora,
    Loss,
    Method,
    Offload,
    Optimizer,
    Plan,
    Precision,
    Strategy,
    flag_of,
)


class SimulationError(ValueError):
    """A plan that cannot be simulated, or a simulation that failed: one line naming the flag."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank. `layer_counts` are the depths to run."""

    config: dict[str, Any]
    layer_counts: tuple[int, ...]
    world: int
    replicate: int
    shards: bool  # False: one process without FSDP, under autocast
    reshard: bool
    lora_rank: int
    lora_targets: tuple[str, ...]
    dora: bool
    expert_rank: int
    base_dtype: str
    compute_dtype: str
    reduce_dtype: str
    micro_batch: int
    seq_len: int
    grad_accum: int
    checkpointing: bool
    fused_loss: bool
    attention: str
    optimizer: str


EXTRAPOLATED = (4, 6)  # two blocks at either end kept apart, and none or two between them


class Peak(msgspec.Struct, frozen=True):
    """The largest allocation within one part of the step, by the tracker's categories, in bytes."""

    total: int
    breakdown: dict[str, int]


class Run(msgspec.Struct, frozen=True):
    """One simulated depth: its peaks by part of the step, and what the real class and peft count."""

    layers: int
    peaks: dict[str, Peak]
    total_params: int
    trainable_params: int


class Answer(msgspec.Struct, frozen=True):
    """One line of the worker: progress in words, a run, or an error."""

    progress: str = ""
    run: Run | None = None
    error: str = ""


def request_of(plan: Plan) -> Request:
    """The simulation of a plan. Raises SimulationError for what fake tensors cannot show."""
    _refuse(plan)
    shape = load.resolve(plan)
    config = load.hub_config(plan)
    if not type_defaults(config["model_type"]).model_class:
        unknown = config["model_type"]
        raise SimulationError(f"{shape.name} cannot be simulated: transformers has no class for {unknown!r}")
    counts = EXTRAPOLATED if is_uniform(shape) and shape.layers > 8 else (shape.layers,)
    lora = plan.method is Method.LORA
    mixed = plan.precision is not Precision.BF16
    return Request(
        config=config,
        layer_counts=counts,
        world=plan.gpus,
        replicate=_replicas(plan),
        shards=plan.strategy is not Strategy.NONE,
        reshard=plan.strategy is not Strategy.FSDP_NO_RESHARD,
        lora_rank=plan.lora_rank if lora else 0,
        lora_targets=_targets(plan, shape) if lora else (),
        dora=plan.dora,
        expert_rank=_expert_rank(plan, shape) if lora else 0,
        base_dtype="bfloat16" if lora or not mixed else "float32",
        compute_dtype="float32" if plan.precision is Precision.FP32 else "bfloat16",
        reduce_dtype="float32"
        if plan.reduce_dtype == "fp32" or plan.precision is Precision.FP32
        else "bfloat16",
        micro_batch=plan.micro_batch,
        seq_len=plan.seq_len,
        grad_accum=min(plan.grad_accum, 2),
        checkpointing=plan.checkpointing is Checkpointing.FULL,
        fused_loss=plan.loss is Loss.FUSED,
        attention="eager" if plan.attention is Attention.EAGER else "sdpa",
        optimizer="sgd" if plan.optimizer is Optimizer.SGD else plan.optimizer.value,
    )


def is_uniform(shape: ModelShape) -> bool:
    """Whether all layers cost the same, so that depth can be extrapolated."""
    return len({(g.layer.linears, g.layer.other_params, g.layer.moe) for g in shape.groups}) == 1


_SIMULATED = {
    "strategy": (Strategy.NONE, Strategy.FSDP, Strategy.FSDP_NO_RESHARD, Strategy.HSDP),
    "method": (Method.FULL, Method.LORA),
    "checkpointing": (Checkpointing.NONE, Checkpointing.FULL),
    "loss": (Loss.FULL, Loss.FUSED),
    "optimizer": (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH, Optimizer.SGD),
    "precision": (Precision.BF16_MIXED, Precision.BF16, Precision.FP32),
    "offload": (Offload.NONE,),
}


def _refuse(plan: Plan) -> None:
    for field, valid in _SIMULATED.items():
        value = getattr(plan, field)
        if value not in valid:
            names = ", ".join(choice.value for choice in valid)
            raise SimulationError(f"--{field} {value.value} cannot be simulated: one of {names}")
    for field in ("tp", "cp", "pp", "ep"):
        if getattr(plan, field) != 1:
            raise SimulationError(f"--{field} {getattr(plan, field)} cannot be simulated: only 1")
    unknown = [field for field, known in SWITCHES.items() if not known.simulated]
    for field in (*unknown, "lora_dropout", "mean_len", "modules_to_save"):
        if getattr(plan, field):
            raise SimulationError(f"{flag_of(field)} cannot be simulated")
    if plan.strategy is Strategy.NONE and plan.gpus != 1:
        raise SimulationError(f"--strategy none runs on one GPU, not --gpus {plan.gpus}")
    if plan.strategy is Strategy.NONE and plan.method is not Method.FULL:
        raise SimulationError(
            "--strategy none with --method lora cannot be simulated: --strategy fsdp --gpus 1"
        )


def _replicas(plan: Plan) -> int:
    if plan.strategy is not Strategy.HSDP:
        return 1
    replicate = plan.replicate or max(1, -(-plan.gpus // plan.gpus_per_node))
    if plan.gpus % replicate:
        raise SimulationError(f"--replicate {replicate} does not divide --gpus {plan.gpus}")
    return replicate


def _targets(plan: Plan, shape: ModelShape) -> tuple[str, ...]:
    """Module names for peft, whose own all-linear would adapt the experts and routers of an MoE too."""
    from ftdash.engine.model.lora import ALL_LINEAR, adapted_names

    if plan.lora_targets == (ALL_LINEAR,) and not shape.is_moe:
        return plan.lora_targets
    return adapted_names(shape, plan.lora_targets)


def _expert_rank(plan: Plan, shape: ModelShape) -> int:
    from ftdash.engine.model.lora import expert_rank

    if plan.expert_lora is ExpertLora.NONE or not shape.is_moe:
        return 0
    experts = next(group.layer.moe.experts for group in shape.groups if group.layer.moe)
    return expert_rank(plan.lora_rank, experts, plan.expert_lora)
