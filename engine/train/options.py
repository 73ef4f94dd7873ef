"""The training script's command line, as one frozen value."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path


class Variant(StrEnum):
    """Which weights learn: all, LoRA adapters, those on a 4-bit base, those on attention and experts."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    MOE_LORA = "moe-lora"


class TrainStrategy(StrEnum):
    """How the run is spread over ranks. The launcher decides; this is what the script holds it to."""

    AUTO = "auto"  # what the launcher's environment asks for
    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    FSDP_NO_RESHARD = "fsdp-no-reshard"
    FSDP1 = "fsdp1"
    HSDP = "hsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    TP = "tp"
    EP = "ep"


FSDP2_STRATEGIES = (TrainStrategy.FSDP, TrainStrategy.FSDP_NO_RESHARD, TrainStrategy.HSDP)
ZERO_STAGES = {TrainStrategy.ZERO1: 1, TrainStrategy.ZERO2: 2, TrainStrategy.ZERO3: 3}

OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion_32bit",
    "muon": "muon",
}

ATTENTION = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}


class TrainError(Exception):
    """The run cannot be what was asked for; the text is one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every choice of one training run. `data` empty: the shipped chat set."""

    model: str = "tiny-qwen3"
    data: str = ""
    variant: Variant = Variant.FULL
    strategy: TrainStrategy = TrainStrategy.AUTO
    steps: int = 100
    micro_batch: int = 1
    grad_accum: int = 1
    seq_len: int = 512
    lora_rank: int = 16
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    expert_lora: str = "none"
    quant_storage: str = "bf16"
    router_aux_loss: float | None = None
    router_logits: str = "on"
    freeze_router: bool = False
    packing: bool = False
    checkpointing: str = "none"
    attention: str = "sdpa"
    loss: str = "fused"
    optimizer: str = "adamw"
    precision: str = "fp32"
    lr: float = 1e-3
    warmup: int = 0
    seed: int = 42
    save_steps: int = 0
    resume: Path | None = None
    output_dir: Path = Path("ftdash-out")
    device: str = "auto"
    tp: int = 1
    ep: int = 1
    cp: int = 1
    replicate: int = 1
    log_steps: int = 10
    expert_every: int = 10
    export: bool = True
    smoke: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether to train on a GPU; `auto` takes one where torch sees any.

        Raises TrainError for `cuda` without one.
        """
        if self.device == "cpu":
            return False
        import torch

        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise TrainError("--device cuda: torch sees no GPU here; use --device cpu or auto")
        return available


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 to below 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def build_parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m ftdash.engine.train",
        description="Fine-tune a causal language model on chat data. Runs under `accelerate launch -m "
        "ftdash.engine.train ...`, `torchrun -m ftdash.engine.train ...` and the deepspeed launcher, or "
        "alone. Before the first step it checks that the strategy asked for is the one that runs, and stops "
        "with one line and exit code 3 when a library fell back.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        default=defaults.model,
        metavar="NAME",
        help="tiny-qwen3 or tiny-moe (built here, no "
        "network), a hub id, or a folder with config.json (default: %(default)s)",
    )
    add(
        "--data",
        default="",
        metavar="NAME",
        help='hub id, or a .jsonl file of {"messages": [...]} lines; '
        "default: the chat set that ships with ftdash",
    )
    add(
        "--variant",
        type=Variant,
        choices=list(Variant),
        default=defaults.variant,
        metavar="VARIANT",
        help="full | lora | qlora (4-bit base) | moe-lora (attention by target_modules, experts by "
        "target_parameters at rank max(1, r // experts)) (default: full)",
    )
    add(
        "--strategy",
        type=TrainStrategy,
        choices=list(TrainStrategy),
        default=defaults.strategy,
        metavar="STRATEGY",
        help=f"{' | '.join(TrainStrategy)}: the strategy that must really run; the "
        "launcher's config sets it up, this checks it. tp and ep run in the script's own loop through "
        "transformers' DistributedConfig under torchrun (default: auto, what the environment asks for)",
    )
    add("--steps", type=_positive, default=defaults.steps, metavar="N", help="optimizer steps (default: 100)")
    add("--micro-batch", type=_positive, default=1, metavar="N", help="sequences per rank and forward")
    add("--grad-accum", type=_positive, default=1, metavar="N", help="forwards per optimizer step")
    add(
        "--seq-len", type=_positive, default=defaults.seq_len, metavar="N", help="tokens; longer is cut (512)"
    )
    add("--packing", action="store_true", help="fill sequences with several conversations")
    add("--lora-rank", type=_positive, default=16, metavar="N")
    add("--lora-dropout", type=_share, default=0.0, metavar="P", help="of the adapters' input (default 0)")
    add(
        "--lora-targets",
        type=_names,
        default=defaults.lora_targets,
        metavar="NAMES",
        help="all-linear | attention | attention+mlp | module names, comma-separated. all-linear leaves "
        "experts and router alone",
    )
    add(
        "--expert-lora",
        choices=["none", "scaled", "full"],
        default="none",
        help="adapters on experts: rank max(1, r // E) (scaled), or r (full); moe-lora means scaled",
    )
    add(
        "--quant-storage",
        choices=["bf16", "uint8"],
        default="bf16",
        help="dtype that holds the packed 4-bit weights; FSDP cannot shard uint8",
    )
    add(
        "--router-aux-loss",
        type=float,
        default=None,
        metavar="X",
        help="coefficient of the load-balancing loss (default: the model's own)",
    )
    add(
        "--router-logits",
        choices=["on", "off"],
        default="on",
        help="off: no router logits, no balancing loss",
    )
    add("--freeze-router", action="store_true", help="keep the routers as they are")
    add(
        "--checkpointing",
        choices=["none", "selective", "full"],
        default="none",
        help="activation checkpointing",
    )
    add("--attention", choices=list(ATTENTION), default="sdpa")
    add(
        "--loss",
        choices=["full", "compiled", "chunked", "fused"],
        default="fused",
        help="how the head's loss is "
        "computed: fused is TRL's (no full logits), full is the model's own with full logits",
    )
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    add("--precision", choices=["bf16-mixed", "bf16", "fp16-mixed", "fp32"], default="fp32")
    add(
        "--lr", type=float, default=defaults.lr, metavar="X", help="peak learning rate, cosine to zero (1e-3)"
    )
    add("--warmup", type=_count, default=0, metavar="N", help="steps of linear warm-up")
    add("--seed", type=int, default=42)
    add("--save-steps", type=_count, default=0, metavar="N", help="checkpoint every N steps (0: never)")
    add("--resume", type=Path, default=None, metavar="DIR", help="a checkpoint-N folder to go on from")
    add(
        "--output-dir",
        type=Path,
        default=defaults.output_dir,
        metavar="DIR",
        help="checkpoints and the final model (default: ./ftdash-out)",
    )
    add("--no-export", dest="export", action="store_false", help="do not write the final model")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--tp", type=_positive, default=1, metavar="N", help="tensor-parallel ranks")
    add("--ep", type=_positive, default=1, metavar="N", help="expert-parallel ranks")
    add("--cp", type=_positive, default=1, metavar="N", help="context-parallel ranks")
    add("--replicate", type=_positive, default=1, metavar="N", help="HSDP replicas")
    add(
        "--log-steps", type=_positive, default=10, metavar="N", help="a plain log line per rank every N steps"
    )
    add("--expert-every", type=_positive, default=10, metavar="N", help="steps between expert counts")
    add(
        "--smoke", action="store_true", help="prove the gradient identities with real gloo processes, and end"
    )
    # The deepspeed launcher adds --local_rank=N to every script's arguments; the environment says the same.
    add("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    add(
        "--deepspeed",
        default=None,
        metavar="FILE",
        help="DeepSpeed JSON, for the deepspeed launcher; accelerate passes its own",
    )
    return parser


def parse(argv: list[str] | None = None) -> tuple[Options, str | None]:
    """Options and the DeepSpeed file. Exits with status 2 and one line for a value that cannot be."""
    parser = build_parser()
    parsed = parser.parse_args(argv)
    names = {field.name for field in fields(Options)}
    options = Options(**{key: value for key, value in vars(parsed).items() if key in names})
    if parsed.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(parsed.local_rank))
    try:
        _check(options)
    except TrainError as error:
        parser.exit(2, f"error: {error}\n")
    return options, parsed.deepspeed


def _check(options: Options) -> None:
    if options.resume is not None and not options.resume.is_dir():
        raise TrainError(f"--resume {options.resume}: no such folder")
    if options.data.endswith((".jsonl", ".json")) and not Path(options.data).is_file():
        raise TrainError(f"--data {options.data}: no such file")
    meshed = options.tp > 1 or options.ep > 1
    if options.strategy is TrainStrategy.TP and options.tp < 2:
        raise TrainError("--strategy tp needs --tp 2 or more")
    if options.strategy is TrainStrategy.EP and options.ep < 2:
        raise TrainError("--strategy ep needs --ep 2 or more")
    alone = (TrainStrategy.NONE, TrainStrategy.DDP, TrainStrategy.FSDP1, *ZERO_STAGES)
    if meshed and options.strategy in alone:
        raise TrainError(f"--strategy {options.strategy}: --tp and --ep go with tp, ep, fsdp and hsdp")
    if not options.lora_targets:
        raise TrainError("--lora-targets: name at least one module")
