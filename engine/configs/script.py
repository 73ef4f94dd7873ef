"""The training script's arguments for a plan."""

from __future__ import annotations

from pathlib import Path

from ftdash.engine.configs.refusals import FSDP2, uses_distributed_config
from ftdash.engine.configs.types import ConfigError, TrainArgs
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Checkpointing, ExpertLora, Method, Plan, Strategy


def model_source(plan: Plan, shape: ModelShape) -> str:
    """What the training script loads: a tiny model's name, a local folder, or the hub id behind a preset.

    Raises ConfigError for a bare parameter count.
    """
    if plan.config is not None:
        path = Path(plan.config)
        return str((path if path.is_dir() else path.parent).absolute())
    if plan.model is None:
        raise ConfigError("--params describes no model that could be trained: give --model or --config")
    hub_id = shape.source.split(" ")[0]
    return hub_id if "/" in hub_id else plan.model


def script_argv(plan: Plan, mesh: Mesh, train: TrainArgs, deepspeed_file: str | None) -> tuple[str, ...]:
    """Arguments of `python -m ftdash.engine.train` that make it train `plan`, and hold it to the strategy."""
    argv = ["--model", train.model, "--strategy", script_strategy(plan)]
    if train.data:
        argv += ["--data", train.data]
    argv += ["--variant", str(plan.method)]
    if plan.method is not Method.FULL:
        argv += ["--lora-rank", str(plan.lora_rank), "--lora-targets", ",".join(plan.lora_targets)]
        if plan.lora_dropout:
            argv += ["--lora-dropout", str(plan.lora_dropout)]
        if plan.expert_lora is not ExpertLora.NONE:
            argv += ["--expert-lora", str(plan.expert_lora)]
    if plan.method is Method.QLORA:
        argv += ["--quant-storage", plan.quant_storage]
    argv += ["--micro-batch", str(plan.micro_batch), "--grad-accum", str(plan.grad_accum)]
    argv += ["--seq-len", str(plan.seq_len), "--checkpointing", _checkpointing(plan)]
    argv += ["--loss", str(plan.loss), "--attention", str(plan.attention)]
    argv += ["--optimizer", str(plan.optimizer), "--precision", str(plan.precision)]
    for flag, size in (("--tp", mesh.tp), ("--ep", mesh.ep), ("--cp", mesh.cp)):
        if size > 1:
            argv += [flag, str(size)]
    if plan.strategy in FSDP2 and mesh.replicate > 1:
        argv += ["--replicate", str(mesh.replicate)]
    argv += ["--steps", str(train.steps), "--output-dir", train.output_dir, "--device", train.device]
    if train.save_steps:
        argv += ["--save-steps", str(train.save_steps)]
    if train.resume is not None:
        argv += ["--resume", train.resume]
    if train.learning_rate is not None:
        argv += ["--lr", str(train.learning_rate)]
    if train.seed is not None:
        argv += ["--seed", str(train.seed)]
    if deepspeed_file is not None:
        argv += ["--deepspeed", deepspeed_file]
    return (*argv, *train.extra)


def script_strategy(plan: Plan) -> str:
    """The name under which the script checks what really runs."""
    if plan.ep > 1:
        return "ep"
    if plan.tp > 1:
        return "tp"
    if plan.gpus == 1 and plan.strategy in FSDP2 | {Strategy.DDP, Strategy.FSDP1}:
        return "none"
    return str(plan.strategy)


def _checkpointing(plan: Plan) -> str:
    """Under FSDP the accelerate file recomputes a full fine-tune: two places at once are refused."""
    owned = plan.strategy in FSDP2 | {Strategy.FSDP1} and plan.gpus > 1 and not uses_distributed_config(plan)
    return str(Checkpointing.NONE if owned and plan.method is Method.FULL else plan.checkpointing)
