"""A plan joined with what it names: model, mesh, GPU, adapters and dtypes; the planner's one input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ftdash.engine.hardware import Gpu, HardwareError, gpu
from ftdash.engine.mesh import Mesh, check_shape
from ftdash.engine.model.config import ModelError
from ftdash.engine.model.load import resolve
from ftdash.engine.model.lora import LoraCount, lora_params
from ftdash.engine.model.shape import ModelShape, Role
from ftdash.engine.plan import Method, Offload, PipelineSchedule, Plan, PlanError, Strategy
from ftdash.engine.planner.numerics import FSDP_FAMILY, Numerics, numerics, quant_of


@dataclass(frozen=True, slots=True)
class Setting:
    plan: Plan
    shape: ModelShape
    mesh: Mesh
    gpu: Gpu
    lora: LoraCount | None
    dtypes: Numerics

    @property
    def tokens(self) -> int:
        """Tokens of one micro-step on one rank."""
        return self.plan.micro_batch * self.plan.seq_len // self.mesh.cp

    @property
    def local_seq(self) -> int:
        return self.plan.seq_len // self.mesh.cp

    @property
    def trainable_params(self) -> int:
        return self.shape.total_params if self.lora is None else self.lora.total

    @property
    def micro_steps(self) -> int:
        """Micro-batches of one optimizer step on one rank."""
        if self.mesh.pp > 1 and self.plan.micro_batches is not None:
            return self.plan.micro_batches
        return self.plan.grad_accum

    @property
    def nvlink(self) -> bool:
        return self.gpu.has_nvlink


def setting_of(plan: Plan) -> Setting:
    """Join and check. Raises PlanError with one line naming the flag and the valid values."""
    try:
        shape = resolve(plan)
        device = gpu(plan.gpu)
        lora = None
        if plan.method is not Method.FULL:
            _check_adapters(plan, shape)
            lora = _lora(
                _Shaped(shape),
                plan.lora_rank,
                plan.lora_targets,
                plan.expert_lora,
                plan.modules_to_save,
                plan.dora,
            )
    except (ModelError, HardwareError) as error:
        raise PlanError(str(error)) from None
    mesh = Mesh.from_plan(plan)
    check_shape(mesh, plan, shape)
    _check_choices(plan, mesh)
    return Setting(plan, shape, mesh, device, lora, numerics(plan))


class _Shaped:
    """A shape as a cache key by identity: hashing a nested shape costs more than a plan may take."""

    __slots__ = ("shape",)

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shaped) and other.shape is self.shape


@lru_cache(maxsize=1024)
def _lora(shaped: _Shaped, rank, targets, expert_lora, modules_to_save, dora) -> LoraCount:  # type: ignore[no-untyped-def]
    return lora_params(shaped.shape, rank, targets, expert_lora, modules_to_save, dora)


def _check_adapters(plan: Plan, shape: ModelShape) -> None:
    widest = min(
        min(linear.d_in, linear.d_out)
        for group in shape.groups
        for linear in group.layer.linears
        if linear.role is not Role.ROUTER
    )
    if not 1 <= plan.lora_rank <= widest:
        raise PlanError(
            f"--lora-rank {plan.lora_rank}: from 1 to {widest}, the narrowest matrix of {shape.name}"
        )
    if plan.expert_lora != "none" and not shape.is_moe:
        raise PlanError(f"--expert-lora {plan.expert_lora}: {shape.name} has no experts, so none")
    if plan.quantize_experts and not shape.is_moe:
        raise PlanError(f"--quantize-experts: {shape.name} has no experts")


def _check_choices(plan: Plan, mesh: Mesh) -> None:
    """Combinations that no framework runs, or that would silently do something else."""
    strategy, quant = plan.strategy, quant_of(plan)
    if quant is not None and plan.method is Method.FULL:
        raise PlanError(f"--quant {quant} needs frozen weights: use --method qlora")
    if plan.offload is Offload.ALL and strategy not in FSDP_FAMILY and strategy is not Strategy.ZERO3:
        raise PlanError(
            f"--offload all with --strategy {strategy}: parameters are offloaded only where they are sharded; "
            f"use zero3, fsdp, fsdp1 or hsdp, or --offload optimizer"
        )
    if plan.offload is Offload.NVME and strategy is not Strategy.ZERO3:
        raise PlanError(f"--offload nvme with --strategy {strategy}: only zero3 swaps to NVMe")
    if quant is not None and plan.quant_storage == "uint8" and strategy is Strategy.FSDP1:
        raise PlanError(
            "--quant-storage uint8 with --strategy fsdp1: flat parameters need one float dtype; use bf16"
        )
    if plan.optimizer_in_backward and plan.grad_accum > 1:
        raise PlanError(
            "--optimizer-in-backward with --grad-accum above 1: a stepped gradient cannot accumulate; use 1"
        )
    if plan.pp_schedule is PipelineSchedule.INTERLEAVED and mesh.pp == 1:
        raise PlanError("--pp-schedule interleaved needs --pp at least 2")
    if plan.virtual_stages > 1 and plan.pp_schedule is not PipelineSchedule.INTERLEAVED:
        raise PlanError("--virtual-stages above 1 needs --pp-schedule interleaved")
