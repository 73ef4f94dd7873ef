"""The inputs of the Plan pane: which control stands for which field of a plan, and over which range."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from ftdash.engine.plan import (
    FRAMEWORK_SWITCHES,
    SWITCHES,
    Attention,
    Batching,
    Checkpointing,
    ExpertLora,
    KbitUpcast,
    Loss,
    Method,
    Offload,
    Optimizer,
    PipelineSchedule,
    Plan,
    Precision,
    Quant,
    Strategy,
)
from ftdash.tui import format as fmt
from ftdash.tui.widgets.choice import Choice, Picker
from ftdash.tui.widgets.slider import Slider, geometric

BY_PARAMETERS = "by parameters"
AUTO = "auto"
Control = Slider | Choice | Picker

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
POWERS = tuple(float(2**n) for n in range(11))
SEQUENCES = (*(float(n) for power in range(8, 20) for n in (2**power, 2**power * 3 // 2)), float(2**20))

DROPOUTS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)
PRICE = "price"  # of one GPU-hour; it is the pane's, since no run becomes another one by it
PRICES = (0.0, *(step / 4 for step in range(1, 61)))
SLOTS = ("3x4", "3x8", "3x16", "4x4", "4x8", "4x16", "5x8", "5x16")


class WholeModules(StrEnum):
    """What is trained in full beside the adapters, as the names of modules joined by +."""

    NONE = "none"
    EMBEDDING = "embed_tokens"
    HEAD = "lm_head"
    BOTH = "embed_tokens+lm_head"


STAGES = (
    (Strategy.DDP, "ddp"),
    (Strategy.ZERO1, "z1"),
    (Strategy.ZERO2, "z2"),
    (Strategy.ZERO3, "z3"),
    (Strategy.FSDP, "fsdp"),
    (Strategy.HSDP, "hsdp"),
)
OTHER_STAGES = (Strategy.NONE, Strategy.FSDP_NO_RESHARD, Strategy.FSDP1, Strategy.MEGATRON)


def _options(kind: Iterable[StrEnum]) -> list[tuple[str, str]]:
    return [(member.value, member.value) for member in kind]


def _yes_no(plan: Plan, field: str) -> Choice:
    on = getattr(plan, field)
    return Choice(field, SWITCHES[field].label, (("no", "no"), ("yes", "yes")), "yes" if on else "no")


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _auto(value: float) -> str:
    return AUTO if value == 0 else f"{value:,.0f}"


def first_controls(plan: Plan, models: Iterable[str], gpus: Iterable[str]) -> list[Control]:
    """The dozen choices that decide most."""
    stages = [(kind.value, text) for kind, text in (*STAGES, *((kind, kind.value) for kind in OTHER_STAGES))]
    return [
        Picker("model", "Model", (*models, BY_PARAMETERS), plan.model or plan.config or BY_PARAMETERS),
        Slider("params", "Parameters", geometric(1e8, 2e12, 24), plan.params or 8e9, fmt=fmt.count, log=True),
        Picker("gpu", "GPU", tuple(gpus), plan.gpu),
        Slider("gpus", "GPUs", tuple(map(float, WORLD_SIZES)), plan.gpus, fmt=_whole, log=True),
        Choice("strategy", "Stage", stages, plan.strategy),
        Choice("method", "Method", _options(Method), plan.method),
        Slider("lora_rank", "LoRA rank", POWERS, plan.lora_rank, fmt=_whole, log=True),
        Choice("expert_lora", "Experts", _options(ExpertLora), plan.expert_lora),
        Slider("seq_len", "Sequence", SEQUENCES, plan.seq_len, fmt=_whole, log=True),
        Slider("micro_batch", "Micro-batch", POWERS[:9], plan.micro_batch, fmt=_whole, log=True),
        Slider("grad_accum", "Accumulate", POWERS, plan.grad_accum, fmt=_whole, log=True),
        Choice("checkpointing", "Checkpoints", _options(Checkpointing), plan.checkpointing),
    ]


def more_controls(plan: Plan) -> list[Control]:
    """The rest: numerics, mesh, offload, adapters, quantisation."""
    degrees = (0.0, *POWERS)
    return [
        Picker("optimizer", "Optimizer", [kind.value for kind in Optimizer], plan.optimizer),
        Picker("precision", "Precision", [kind.value for kind in Precision], plan.precision),
        Choice("loss", "Loss", _options(Loss), plan.loss),
        Choice("attention", "Attention", _options(Attention), plan.attention),
        Choice("offload", "Offload", _options(Offload), plan.offload),
        _yes_no(plan, "activation_offload"),
        _yes_no(plan, "compile"),
        _yes_no(plan, "optimizer_in_backward"),
        Picker("batching", "Rows", [kind.value for kind in Batching], plan.batching),
        Slider("mean_len", "Mean sample", (0.0, *SEQUENCES), plan.mean_len or 0, fmt=_auto),
        Slider("gpus_per_node", "GPUs a node", POWERS[:5], plan.gpus_per_node, fmt=_whole, log=True),
        Slider("replicate", "Replicas", degrees, plan.replicate or 0, fmt=_auto),
        Slider("tp", "Tensor", POWERS[:6], plan.tp, fmt=_whole, log=True),
        Slider("cp", "Context", POWERS[:7], plan.cp, fmt=_whole, log=True),
        Slider("pp", "Pipeline", POWERS[:7], plan.pp, fmt=_whole, log=True),
        Choice("pp_schedule", "Schedule", _options(PipelineSchedule), plan.pp_schedule),
        Slider("virtual_stages", "Virt stages", POWERS[:5], plan.virtual_stages, fmt=_whole, log=True),
        Slider("micro_batches", "In pipeline", degrees, plan.micro_batches or 0, fmt=_auto),
        Slider("ep", "Expert par.", POWERS[:8], plan.ep, fmt=_whole, log=True),
        Choice(
            "lora_targets",
            "LoRA on",
            [(name, name) for name in ("all-linear", "attention", "attention+mlp")],
            plan.lora_targets[0] if plan.lora_targets else "all-linear",
        ),
        Slider("lora_dropout", "Dropout", DROPOUTS, plan.lora_dropout, fmt=fmt.percent, whole=False),
        _yes_no(plan, "dora"),
        Choice("modules_to_save", "Train whole", _options(WholeModules), _whole_modules(plan)),
        Picker("quant", "Quantised", (AUTO, *(kind.value for kind in Quant)), plan.quant or AUTO),
        _yes_no(plan, "quantize_experts"),
        Choice("quant_storage", "Q. storage", [("bf16", "bf16"), ("uint8", "uint8")], plan.quant_storage),
        Choice("adapter_dtype", "Adapters", _dtypes(), plan.adapter_dtype or AUTO),
        Choice("reduce_dtype", "Reduce in", _dtypes(), plan.reduce_dtype or AUTO),
        Picker(
            "kbit_upcast",
            "k-bit fp32",
            (AUTO, *(kind.value for kind in KbitUpcast)),
            plan.kbit_upcast or AUTO,
        ),
        *(_yes_no(plan, field) for field in FRAMEWORK_SWITCHES),
        Picker("pcie", "PCIe slots", (AUTO, *SLOTS), plan.pcie or AUTO),
        Slider(PRICE, "GPU-hour at", PRICES, 0.0, fmt=_price, whole=False),
    ]


def _price(value: float) -> str:
    return f"{value:,.2f}" if value else "unknown"


def _whole_modules(plan: Plan) -> str:
    """The choice that says most of what the plan trains in full."""
    joined = "+".join(plan.modules_to_save)
    return joined if joined in set(WholeModules) else WholeModules.NONE.value


def _dtypes() -> list[tuple[str, str]]:
    return [(AUTO, AUTO), ("fp32", "fp32"), ("bf16", "bf16")]


_KINDS: dict[str, type[StrEnum]] = {
    "strategy": Strategy,
    "method": Method,
    "expert_lora": ExpertLora,
    "batching": Batching,
    "checkpointing": Checkpointing,
    "optimizer": Optimizer,
    "precision": Precision,
    "loss": Loss,
    "attention": Attention,
    "offload": Offload,
    "pp_schedule": PipelineSchedule,
    "quant": Quant,
    "kbit_upcast": KbitUpcast,
}
_ZERO_IS_AUTO = ("replicate", "micro_batches", "mean_len")


def changed(plan: Plan, name: str, value: float | str) -> Plan:
    """The plan with one input moved. `value` is as the control tells it."""
    if name == "model":
        if value == BY_PARAMETERS:
            return replace(plan, model=None, config=None, params=plan.params or 8e9)
        return replace(plan, model=str(value), config=None, params=None)
    if name == "params":
        return replace(plan, model=None, config=None, params=float(value))
    field: Any
    if name in _ZERO_IS_AUTO:
        field = int(value) or None
    elif name == "lora_dropout":
        field = float(value)
    elif name == "modules_to_save":
        field = tuple(WholeModules(str(value)).split("+")) if value != WholeModules.NONE else ()
    elif name == "lora_targets":
        field = (str(value),)
    elif name in SWITCHES:
        field = value == "yes"
    elif value == AUTO:
        field = None
    elif name in _KINDS:
        field = _KINDS[name](str(value))
    else:
        field = value if isinstance(value, str) else int(value)
    return replace(plan, **{name: field})


def shown(plan: Plan, name: str) -> float | str | None:
    """What the control `name` shows for this plan; None for a model's parameters, which are computed."""
    if name == "model":
        return plan.model or plan.config or BY_PARAMETERS
    if name == "params":
        return plan.params
    if name == PRICE:
        return None
    value = getattr(plan, name)
    if name == "lora_targets":
        return value[0] if value else "all-linear"
    if name == "modules_to_save":
        return _whole_modules(plan)
    if name in SWITCHES:
        return "yes" if value else "no"
    if value is None:
        return 0.0 if name in _ZERO_IS_AUTO else AUTO
    return str(value) if isinstance(value, str) else float(value)
