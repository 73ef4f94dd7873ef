"""A plan joined with what it names: model, mesh, GPU, adapters and dtypes; the planner's one input."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from msgspec.structs import replace

from ftdash.engine.hardware import Gpu, HardwareError, gpu, with_pcie
from ftdash.engine.mesh import Mesh, check_shape
from ftdash.engine.model.config import ModelError
from ftdash.engine.model.load import resolve
from ftdash.engine.model.lora import LoraCount, lora_params
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import (
    LARGEST_COUNT,
    Attention,
    Batching,
    Checkpointing,
    ExpertLora,
    Loss,
    Method,
    Offload,
    PipelineSchedule,
    Plan,
    PlanError,
    Precision,
    Strategy,
)
from ftdash.engine.planner.batching import Rows, rows_of
from ftdash.engine.planner.numerics import FSDP_FAMILY, Numerics, numerics, quant_of
from ftdash.engine.planner.sums import ModelSums, model_sums


class Setting(msgspec.Struct, frozen=True):
    plan: Plan
    shape: ModelShape
    sums: ModelSums
    mesh: Mesh
    gpu: Gpu
    lora: LoraCount | None
    dtypes: Numerics
    tokens: int  # of one micro-step of full rows on one rank
    rows: Rows  # of the mean micro-step
    mean_tokens: float  # of it on one rank
    trainable_params: int
    micro_steps: int  # micro-batches of one optimizer step on one rank
    expert_shard: float  # into how many parts the fullest rank's share of the experts is one
    expert_padding: float  # gathered expert stacks over their own size; 1 where they divide evenly


def setting_of(plan: Plan) -> Setting:
    """Join and check. Raises PlanError with one line naming the flag and the valid values."""
    _check_counts(plan)
    try:
        shape = resolve(plan)
        if plan.untied_head and shape.tied_embeddings:
            shape = _untied(shape)
        device = gpu(plan.gpu)
        if plan.pcie is not None:
            device = with_pcie(device, plan.pcie)
        sums = model_sums(shape)
        lora = None
        if plan.method is not Method.FULL:
            _check_adapters(plan, shape, sums)
            lora = _lora(
                shape,
                plan.lora_rank,
                tuple(plan.lora_targets),
                plan.expert_lora,
                tuple(plan.modules_to_save),
                plan.dora,
            )
    except (ModelError, HardwareError) as error:
        raise PlanError(str(error)) from None
    mesh = Mesh.from_plan(plan, shape)
    check_shape(mesh, plan, shape)
    _check_choices(plan, mesh)
    _check_units(plan, device)
    expert_shard, expert_padding = _expert_shards(plan, mesh, shape)
    rows = rows_of(plan)
    in_pipeline = mesh.pp > 1 and plan.micro_batches is not None
    return Setting(
        plan=plan,
        shape=shape,
        sums=sums,
        mesh=mesh,
        gpu=device,
        lora=lora,
        dtypes=numerics(plan),
        tokens=plan.micro_batch * plan.seq_len // mesh.cp,
        rows=rows,
        mean_tokens=rows.processed / mesh.cp,
        trainable_params=sums.total if lora is None else lora.total,
        micro_steps=plan.micro_batches if in_pipeline and plan.micro_batches else plan.grad_accum,
        expert_shard=expert_shard,
        expert_padding=expert_padding,
    )


@lru_cache(maxsize=256)
def _untied(shape: ModelShape) -> ModelShape:
    return replace(shape, tied_embeddings=False, head_params=shape.vocab * shape.hidden)


def _expert_shards(plan: Plan, mesh: Mesh, shape: ModelShape) -> tuple[float, float]:
    """FSDP2 chunks a parameter along its first dimension, for a stack of experts that is the experts: with
    more ranks than experts some ranks hold one whole expert and the others padding, which is gathered too."""
    ranks = mesh.expert_shard
    experts = max((group.layer.moe.experts for group in shape.groups if group.layer.moe), default=0)
    if not experts or plan.strategy not in FSDP_FAMILY or plan.strategy is Strategy.FSDP1:
        return float(ranks), 1.0
    here = experts // mesh.ep
    fullest = -(-here // ranks)
    return here / fullest, ranks * fullest / here


_lora = lru_cache(maxsize=1024)(lora_params)


def _check_adapters(plan: Plan, shape: ModelShape, sums: ModelSums) -> None:
    if not 1 <= plan.lora_rank <= sums.narrowest:
        raise PlanError(
            f"--lora-rank {plan.lora_rank}: from 1 to {sums.narrowest}, the narrowest matrix of {shape.name}"
        )
    if plan.expert_lora is not ExpertLora.NONE and not sums.routed:
        raise PlanError(f"--expert-lora {plan.expert_lora}: {shape.name} has no experts, so none")
    if plan.quantize_experts and not sums.routed:
        raise PlanError(f"--quantize-experts: {shape.name} has no experts")


def _check_counts(plan: Plan) -> None:
    for field, most in LARGEST_COUNT.items():
        value = getattr(plan, field)
        if value is not None and not 1 <= value <= most:
            raise PlanError(f"--{field.replace('_', '-')} {value}: must be a whole number from 1 to {most}")

    if plan.mean_len is not None and plan.mean_len > plan.seq_len:
        raise PlanError(f"--mean-len {plan.mean_len}: from 1 to --seq-len {plan.seq_len}, as longer is cut")
    if plan.mean_len is None and plan.batching is not Batching.PACKED:
        raise PlanError(f"--batching {plan.batching} needs --mean-len, the mean tokens of a sample")
    if not 0.0 <= plan.lora_dropout < 1.0:
        raise PlanError(f"--lora-dropout {plan.lora_dropout}: must be from 0 to below 1")
    if plan.lora_dropout and plan.expert_lora is not ExpertLora.NONE:
        raise PlanError(
            f"--lora-dropout {plan.lora_dropout} with --expert-lora {plan.expert_lora}: peft's adapters on "
            f"expert stacks take none; use 0"
        )


def _check_units(plan: Plan, device: Gpu) -> None:
    """What the GPU has no units or kernels for: float8 training needs compute capability 8.9 (torchao and
    Transformer Engine refuse less), MX and NVFP4 formats Blackwell, FlashAttention Ampere."""
    precision = plan.precision
    if precision is Precision.FP8 and device.fp8_flops is None:
        raise PlanError(
            f"--precision fp8 with --gpu {device.name}: it has no FP8 units; use {_precisions(device)}"
        )
    if precision in (Precision.MXFP8, Precision.NVFP4) and device.fp4_flops is None:
        raise PlanError(
            f"--precision {precision} with --gpu {device.name}: needs Blackwell (b200-180g, gb200-184g, "
            f"rtx5090-32g); use {_precisions(device)}"
        )
    if plan.attention is Attention.FLASH and device.bf16_flops is None:
        raise PlanError(
            f"--attention flash with --gpu {device.name}: FlashAttention needs Ampere or newer; "
            f"use sdpa or eager"
        )


def _precisions(device: Gpu) -> str:
    known = ["bf16-mixed", "bf16"] if device.bf16_flops else []
    return ", ".join([*known, "fp16-mixed", "fp32", *(["fp8"] if device.fp8_flops else [])])


def _check_choices(plan: Plan, mesh: Mesh) -> None:
    """Combinations that no framework runs, or that would silently do something else."""
    strategy, quant = plan.strategy, quant_of(plan)
    if quant is not None and plan.method is Method.FULL:
        raise PlanError(f"--quant {quant} needs frozen weights: use --method qlora")
    if plan.offload is Offload.ALL and strategy not in FSDP_FAMILY and strategy is not Strategy.ZERO3:
        raise PlanError(
            f"--offload all with --strategy {strategy}: parameters are offloaded only where they are "
            f"sharded; use zero3, fsdp, fsdp1 or hsdp, or --offload optimizer"
        )
    if plan.offload is Offload.NVME and strategy is not Strategy.ZERO3:
        raise PlanError(f"--offload nvme with --strategy {strategy}: only zero3 swaps to NVMe")
    if quant is not None and plan.quant_storage == "uint8" and strategy is Strategy.FSDP1:
        raise PlanError(
            "--quant-storage uint8 with --strategy fsdp1: flat parameters need one float dtype; use bf16"
        )
    if plan.save_every_product and plan.checkpointing is not Checkpointing.SELECTIVE:
        raise PlanError(
            f"--save-every-product with --checkpointing {plan.checkpointing}: it says what selective "
            f"checkpointing keeps; use --checkpointing selective"
        )
    if plan.loss is Loss.NATIVE and numerics(plan).autocast:
        raise PlanError(
            f"--loss native with --precision {plan.precision} and --strategy {strategy}: autocast computes "
            f"cross entropy in fp32; use --loss full, or --precision bf16"
        )
    if plan.optimizer_in_backward and plan.grad_accum > 1:
        raise PlanError(
            f"--grad-accum {plan.grad_accum} with --optimizer-in-backward: a gradient that was stepped "
            f"cannot accumulate; use 1"
        )
    if plan.pp_schedule is PipelineSchedule.INTERLEAVED and mesh.pp == 1:
        raise PlanError("--pp-schedule interleaved needs --pp at least 2")
    if plan.virtual_stages > 1 and plan.pp_schedule is not PipelineSchedule.INTERLEAVED:
        raise PlanError(
            f"--virtual-stages {plan.virtual_stages}: above 1 needs --pp-schedule interleaved; else 1"
        )
