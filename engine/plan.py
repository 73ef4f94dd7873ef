"""A plan: every choice that a distributed fine-tune is made of, as one frozen value.

The field names are the command line's flags with underscores. A plan holds choices only;
what they cost is computed by `ftdash.engine.planner`, what they become by `ftdash.engine.configs`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec


class PlanError(ValueError):
    """A plan that cannot be: the text is one line naming the flag and the valid values."""


class Strategy(StrEnum):
    """How parameters, gradients and optimizer state are spread over the data-parallel ranks."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"  # FSDP2, re-sharding after forward
    FSDP_NO_RESHARD = "fsdp-no-reshard"
    FSDP1 = "fsdp1"
    HSDP = "hsdp"
    MEGATRON = "megatron"  # Megatron's distributed optimizer, 6 + 12/n


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class ExpertLora(StrEnum):
    """Adapters on the experts of an MoE: none, rank max(1, r // E) each, or rank r each."""

    NONE = "none"
    SCALED = "scaled"
    FULL = "full"


class Quant(StrEnum):
    NF4 = "nf4"
    NF4_DQ = "nf4-dq"
    INT8 = "int8"
    GPTQ4 = "gptq4"
    MXFP4 = "mxfp4"


class KbitUpcast(StrEnum):
    """What of a k-bit model is turned into fp32: all that is not quantised, or the norms alone."""

    ALL = "all"  # peft's prepare_model_for_kbit_training
    NORMS = "norms"
    NONE = "none"


class Batching(StrEnum):
    """How samples shorter than --seq-len become rows."""

    PACKED = "packed"  # several samples a row
    PADDED = "padded"  # each to --seq-len
    LONGEST = "longest"  # each to the longest of its micro-batch
    PADDING_FREE = "padding-free"  # one after the other, --micro-batch of them, no row is filled up


class Checkpointing(StrEnum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Loss(StrEnum):
    FULL = "full"
    COMPILED = "compiled"
    CHUNKED = "chunked"
    FUSED = "fused"
    NATIVE = "native"  # on the logits in their own dtype, as loops of one's own compute it in pure bf16
    UPCAST = "upcast"  # the model returns fp32 logits, alive through backward


class Attention(StrEnum):
    FLASH = "flash"
    SDPA = "sdpa"
    EAGER = "eager"


class Optimizer(StrEnum):
    ADAMW = "adamw"  # fused, no whole-model temporaries
    ADAMW_FOREACH = "adamw-foreach"
    ADAMW_BF16 = "adamw-bf16"  # both moments in bf16 (Megatron's precision-aware optimizer)
    ADAMW_8BIT = "adamw-8bit"
    ADAMW_4BIT = "adamw-4bit"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    LION = "lion"
    MUON = "muon"


class Precision(StrEnum):
    BF16_MIXED = "bf16-mixed"
    BF16 = "bf16"
    FP16_MIXED = "fp16-mixed"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Offload(StrEnum):
    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"
    NVME = "nvme"


class PipelineSchedule(StrEnum):
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    GPIPE = "gpipe"


# The largest count that any input may say; the least is 1. Beyond them nothing real is meant.
LARGEST_COUNT = {
    "gpus": 1_000_000,
    "gpus_per_node": 1024,
    "replicate": 1_000_000,
    "tp": 4096,
    "cp": 4096,
    "pp": 4096,
    "virtual_stages": 256,
    "micro_batches": 1_000_000,
    "ep": 4096,
    "lora_rank": 1_000_000,
    "micro_batch": 1_000_000,
    "grad_accum": 1_000_000,
    "seq_len": 100_000_000,
    "mean_len": 100_000_000,
}


class Switch(NamedTuple):
    """What a yes-or-no choice of a plan is called, and who besides the planner knows it."""

    label: str  # in the Plan pane
    text: str
    planned_only: bool = True  # ftdash's own training script cannot be told of it
    simulated: bool = False  # the simulation counts it, or has nothing to count


# What who trains chooses, and what follows from the framework; together every yes-or-no field of a plan.
TRAINING_SWITCHES: dict[str, Switch] = {
    "activation_offload": Switch("Act offload", "move saved activations to the host", planned_only=False),
    "compile": Switch("Compile", "torch.compile on the blocks"),
    "optimizer_in_backward": Switch(
        "Opt. in bwd", "step each parameter as its gradient arrives; no gradients are kept"
    ),
    "dora": Switch("DoRA", "weight-decomposed adapters", simulated=True),
    "quantize_experts": Switch("Q. experts", "quantise the experts of an MoE as well", simulated=True),
}
FRAMEWORK_SWITCHES: dict[str, Switch] = {
    "old_bitsandbytes": Switch(
        "Old bnb",
        "before 0.43.2, whose 4-bit linears keep their inputs",
        planned_only=False,
        simulated=True,
    ),
    "reentrant": Switch(
        "Re-entrant",
        "the model checkpoints its blocks re-entrantly (transformers' default before 5)",
        simulated=True,
    ),
    "unsharded_init": Switch(
        "Load whole",
        "every rank loads the whole model before sharding (no zero.Init, no RAM-efficient loading)",
        planned_only=False,
        simulated=True,
    ),
    "wrap_embeddings": Switch(
        "Wrap embed.", "embedding and head are FSDP units of their own (torchtitan, torchtune)"
    ),
    "untied_head": Switch("Untie head", "the framework gives a tied head weights of its own (LitGPT)"),
    "whole_graph": Switch(
        "Whole graph",
        "the step is one traced graph on one stream (SimpleFSDP, torchtitan's graph_trainer)",
    ),
    "save_every_product": Switch(
        "All matmuls",
        "selective checkpointing keeps every matrix product, not every second one"
        " (torchtitan's graph_trainer)",
    ),
    "fused_qkv": Switch(
        "Fused qkv", "q, k and v are one product, whatever the model has (torchtitan since June 2026)"
    ),
    "fused_norms": Switch(
        "Fused norms", "RMSNorm is one kernel that keeps its 16-bit input (Liger, Unsloth)"
    ),
    "expert_loop": Switch("Expert loop", "experts run one after the other (transformers before 5)"),
}
SWITCHES = TRAINING_SWITCHES | FRAMEWORK_SWITCHES


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of one run. `None` means: let the strategy's own default decide. What its yes-or-no
    fields mean is told in SWITCHES.

    Exactly one of `model` (a preset's name), `config` (path of a config.json) and `params`
    (a bare parameter count) names the model.
    """

    model: str | None = None
    config: str | None = None
    params: float | None = None

    gpu: str = "h100-sxm-80g"
    gpus: int = 1  # world size over all nodes
    gpus_per_node: int = 8

    strategy: Strategy = Strategy.FSDP
    replicate: int | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    virtual_stages: int = 1
    micro_batches: int | None = None  # in flight through the pipeline; None: grad_accum
    ep: int = 1

    method: Method = Method.FULL
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_dropout: float = 0.0
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    quant: Quant | None = None  # None: nf4-dq under qlora, none otherwise
    quantize_experts: bool = False
    quant_storage: str = "bf16"
    kbit_upcast: KbitUpcast | None = None  # None: all under mixed precision where FSDP does not shard
    old_bitsandbytes: bool = False
    adapter_dtype: str | None = None  # "fp32" | "bf16"
    expert_lora: ExpertLora = ExpertLora.NONE

    micro_batch: int = 1
    grad_accum: int = 1
    seq_len: int = 2048
    batching: Batching = Batching.PACKED
    mean_len: int | None = None  # mean tokens of a sample; None: every row is full
    checkpointing: Checkpointing = Checkpointing.FULL
    save_every_product: bool = False
    loss: Loss = Loss.FULL
    attention: Attention = Attention.SDPA
    compile: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    optimizer_in_backward: bool = False
    precision: Precision = Precision.BF16_MIXED
    reduce_dtype: str | None = None  # "fp32" | "bf16"
    offload: Offload = Offload.NONE
    activation_offload: bool = False
    unsharded_init: bool = False
    untied_head: bool = False
    fused_qkv: bool = False
    fused_norms: bool = False
    expert_loop: bool = False
    wrap_embeddings: bool = False
    reentrant: bool = False
    whole_graph: bool = False
    pcie: str | None = None  # generation and lanes of this machine's slots, such as "3x8"; None: the card's

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, as it is stored in run.json and in *.plan files."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """A plan from stored JSON values. Raises msgspec.ValidationError, naming the field."""
        return msgspec.convert(data, cls)
