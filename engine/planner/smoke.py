"""The published values that the planner must give to the digit, checked in a second without a test runner."""

from __future__ import annotations

import msgspec

from ftdash.engine.model.load import load_preset
from ftdash.engine.model.lora import lora_params
from ftdash.engine.plan import ExpertLora, Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.estimators import deepspeed_zero3
from ftdash.engine.planner.host import next_pow2
from ftdash.engine.planner.result import Prediction
from ftdash.engine.planner.time import model_flops

GB = 1e9


class Check(msgspec.Struct, frozen=True):
    """One value: what it is, what the planner says, what it must be, and how close."""

    what: str
    got: float
    want: float
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        return abs(self.got - self.want) <= self.tolerance


def _planned(plan: Plan) -> Prediction:
    return evaluate(plan)


def checks() -> tuple[Check, ...]:
    """Every check, computed by the planner as it is."""
    return (*_zero(), *_traffic(), *_moe(), *_rest())


def _zero() -> list[Check]:
    sizes = {Strategy.DDP: 120.0, Strategy.ZERO1: 31.40625, Strategy.ZERO2: 16.640625, Strategy.ZERO3: 1.875}
    found = []
    for stage, (strategy, want) in enumerate(sizes.items()):
        got = _planned(Plan(params=7.5e9, gpus=64, strategy=strategy)).memory.model_states.total / GB
        found.append(Check(f"ZeRO-{stage} model states, 7.5e9 parameters on 64 GPUs, GB", got, want))
    hybrid = _planned(Plan(params=8e9, gpus=16, strategy=Strategy.HSDP)).memory.model_states.total / GB
    whole = _planned(Plan(params=8e9, gpus=16, strategy=Strategy.FSDP)).memory.model_states.total / GB
    found.append(Check("fully sharded model states, 8e9 on 16 GPUs, GB", whole, 8.0))
    found.append(Check("HSDP in groups of 8, the same model, GB", hybrid, 16.0))
    return found


def _traffic() -> list[Check]:
    def sent(strategy: Strategy) -> float:
        plan = Plan(params=8e9, gpus=8, strategy=strategy, reduce_dtype="bf16")
        return _planned(plan).traffic.step_bytes / GB

    return [
        Check("DDP all-reduce of 8e9 bf16 gradients over 8 ranks, GB a rank", sent(Strategy.DDP), 28.0),
        Check("ZeRO-2, the same, GB", sent(Strategy.ZERO2), 28.0),
        Check("FSDP, two gathers and a reduce-scatter, GB", sent(Strategy.FSDP), 42.0),
        Check("6 x 8e9 x 2,048 tokens, FLOP", model_flops(8e9, 2048), 9.8304e13),
    ]


def _moe() -> list[Check]:
    shape = load_preset("qwen3-30b-a3b")
    full = lora_params(shape, 16, expert_lora=ExpertLora.FULL).expert
    scaled = lora_params(shape, 16, expert_lora=ExpertLora.SCALED).expert
    dense = lora_params(load_preset("qwen3-8b"), 16).total
    return [
        Check("Qwen3-30B-A3B, all parameters", shape.total_params, 30_532_122_624),
        Check("Qwen3-30B-A3B, active parameters", shape.active_params, 3_353_032_704),
        Check("expert LoRA, rank 16 each", full, 830_472_192),
        Check("expert LoRA, rank max(1, 16 // 128)", scaled, 51_904_512),
        Check("all-linear LoRA, rank 16, Qwen3-8B", dense, 43_646_976),
    ]


def _rest() -> list[Check]:
    piped = _planned(Plan(model="llama-3.1-8b", gpus=4, pp=4, micro_batches=16, strategy=Strategy.MEGATRON))
    both = deepspeed_zero3(6805e6, 131e6, 4, offload_optimizer=True, offload_params=True)
    none = deepspeed_zero3(6805e6, 131e6, 4, offload_optimizer=False)
    return [
        Check("pipeline bubble, 4 stages, 16 micro-batches", piped.time.bubble, 3 / 19, 1e-12),
        Check("DeepSpeed's ZeRO-3 estimate with offload, GiB", both.gpu_gib, 0.49, 0.005),
        Check("DeepSpeed's ZeRO-3 estimate without, GiB", none.gpu_gib, 29.01, 0.005),
        Check("pinned block for 2.25 GiB, GiB", next_pow2(2.25 * 2**30) / 2**30, 4.0),
    ]
