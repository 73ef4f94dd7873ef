"""Which plans no Hugging Face stack can start today, each with the reason and a way out."""

from __future__ import annotations

from ftdash.engine.configs.types import nodes_of
from ftdash.engine.mesh import Mesh, check_shape
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import (
    SWITCHES,
    Batching,
    Checkpointing,
    Loss,
    Method,
    Offload,
    Optimizer,
    Plan,
    PlanError,
    Precision,
    Quant,
    Strategy,
    flag_of,
)

ZERO_STAGE = {Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.ZERO3: 3}
FSDP2 = frozenset({Strategy.FSDP, Strategy.FSDP_NO_RESHARD, Strategy.HSDP})
SHARDED = FSDP2 | {Strategy.FSDP1, Strategy.ZERO3}


def uses_distributed_config(plan: Plan) -> bool:
    """Tensor and expert parallelism go through transformers' DistributedConfig, under torchrun."""
    return plan.tp > 1 or plan.ep > 1


def refusal(plan: Plan, shape: ModelShape | None = None) -> str | None:
    """Why this plan cannot be launched at all, or None. The planner still counts such plans."""
    planned_only = _planned_only(plan)
    if planned_only:
        return planned_only
    try:
        mesh = Mesh.from_plan(plan)
        if shape is not None:
            check_shape(mesh, plan, shape)
    except PlanError as error:
        return str(error)
    rules = (_mesh_refusal(plan, mesh), _strategy_refusal(plan), _method_refusal(plan), _script_refusal(plan))
    return next((reason for reason in rules if reason), None)


def _planned_only(plan: Plan) -> str | None:
    if plan.pp > 1 and plan.ep > 1:
        return (
            "--pp with --ep: transformers' DistributedConfig refuses expert dispatch under pipeline stages; "
            "train it with Megatron-LM, or drop one of the two"
        )
    if plan.pp > 1:
        return (
            "--pp: the Hugging Face trainers have no pipeline schedule for training; "
            "the plan holds for Megatron-LM, launch it there or use --strategy hsdp"
        )
    if plan.strategy is Strategy.MEGATRON:
        return "--strategy megatron is planned only: its distributed optimizer lives in Megatron-LM"
    return None


def _mesh_refusal(plan: Plan, mesh: Mesh) -> str | None:
    nodes = nodes_of(plan)
    if plan.gpus % nodes:
        return f"--gpus {plan.gpus} does not spread evenly over {nodes} nodes of {plan.gpus_per_node}"
    if plan.strategy is Strategy.HSDP and (mesh.replicate == 1 or mesh.shard == 1):
        return (
            f"--strategy hsdp needs two axes, got replicate {mesh.replicate} x shard {mesh.shard}: "
            "set --replicate to a divisor of the data-parallel ranks, or use --strategy fsdp or ddp"
        )
    if plan.ep > 1 and plan.ep % plan.tp:
        return f"--ep {plan.ep} must be a multiple of --tp {plan.tp} (transformers DistributedConfig)"
    return None


def _strategy_refusal(plan: Plan) -> str | None:
    strategy = plan.strategy
    if uses_distributed_config(plan):
        if strategy not in FSDP2 | {Strategy.NONE, Strategy.DDP}:
            return f"--tp/--ep with --strategy {strategy}: it composes with FSDP2 only; use fsdp"
        if strategy is Strategy.DDP and plan.gpus > plan.tp:
            return "--tp with --strategy ddp: replicated tensor-parallel groups are not supported; use fsdp"
        if plan.cp > 1:
            return "--cp with --tp/--ep: the model is sharded at load time; use --cp with fsdp alone"
        if plan.offload is not Offload.NONE:
            return "--offload with --tp/--ep is not offered by the trainer; use --strategy fsdp without them"
    if plan.cp > 1 and strategy not in FSDP2 and strategy not in ZERO_STAGE:
        return f"--cp with --strategy {strategy}: it comes with fsdp (ring attention) or zero (Ulysses)"
    if plan.precision in (Precision.MXFP8, Precision.NVFP4):
        return f"--precision {plan.precision}: accelerate does not configure its kernels; use bf16-mixed"
    return _offload_refusal(plan)


def _offload_refusal(plan: Plan) -> str | None:
    strategy, offload = plan.strategy, plan.offload
    if offload is Offload.NVME and strategy not in ZERO_STAGE:
        return f"--offload nvme is DeepSpeed's; --strategy {strategy} has none: use zero3"
    if offload is Offload.ALL and strategy in (Strategy.ZERO1, Strategy.ZERO2):
        return (
            f"--offload all with --strategy {strategy}: parameters can be offloaded only at stage 3; "
            "use --offload optimizer or --strategy zero3"
        )
    if offload is Offload.OPTIMIZER and strategy in FSDP2 | {Strategy.FSDP1}:
        return "--offload optimizer: FSDP offloads parameters and optimizer together; use --offload all"
    if offload is not Offload.NONE and strategy in (Strategy.DDP, Strategy.NONE):
        return f"--offload with --strategy {strategy}: nothing offers it; use fsdp or zero"
    return None


def _method_refusal(plan: Plan) -> str | None:
    if plan.method is not Method.QLORA:
        return None
    if plan.quant in (Quant.INT8, Quant.GPTQ4, Quant.MXFP4) and plan.strategy in SHARDED:
        return f"--quant {plan.quant} with {plan.strategy}: its packed integers cannot be sharded; use nf4-dq"
    if plan.quant_storage == "uint8" and plan.strategy is Strategy.FSDP1:
        return "--quant-storage uint8 with fsdp1: flat buffers need one floating dtype; use bf16"
    if plan.strategy is Strategy.ZERO3:
        return "--method qlora with zero3: bitsandbytes packs what DeepSpeed would split; use fsdp or zero2"
    if uses_distributed_config(plan):
        return "--method qlora with --tp/--ep: packed weights have no tensor-parallel layout; use fsdp"
    return None


def _script_refusal(plan: Plan) -> str | None:
    """Choices that the planner counts and the training script does not make; never dropped in silence."""
    planned_only = {
        **{flag_of(field): getattr(plan, field) for field, known in SWITCHES.items() if known.planned_only},
        "--optimizer adamw-bf16": plan.optimizer is Optimizer.ADAMW_BF16,
        f"--loss {plan.loss}": plan.loss in (Loss.NATIVE, Loss.UPCAST),
        f"--batching {plan.batching}": plan.batching in (Batching.PADDED, Batching.PADDING_FREE),
        f"--kbit-upcast {plan.kbit_upcast}": plan.kbit_upcast is not None,
        "--modules-to-save": bool(plan.modules_to_save),
        "--precision fp8": plan.precision is Precision.FP8,
        f"--quant {plan.quant}": plan.quant not in (None, Quant.NF4_DQ),
        "--adapter-dtype bf16": plan.adapter_dtype == "bf16" and plan.method is not Method.FULL,
        "--checkpointing selective under FSDP": plan.checkpointing is Checkpointing.SELECTIVE
        and plan.strategy in FSDP2 | {Strategy.FSDP1},
    }
    for flag, asked in planned_only.items():
        if asked:
            return (
                f"{flag} is planned only, not trained by ftdash's script: run your own with launch -- COMMAND"
            )
    return None
