"""The flags that describe a plan, shared by `plan`, `fit`, `simulate`, `configs` and `launch`.

Every flag has the plan field's name; only flags that were given override a plan read with `--from`.
"""

from __future__ import annotations

import argparse
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ftdash.engine.hardware import HardwareError, full_name
from ftdash.engine.plan import (
    LARGEST_COUNT,
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
    PlanError,
    Precision,
    Quant,
    Strategy,
    flag_of,
)
from ftdash.tui.cli import UserError

if TYPE_CHECKING:
    from ftdash.engine.recipes import Recipe

COUNTS = {
    "gpus": "world size over all nodes (default 1)",
    "gpus-per-node": "GPUs of one node (default 8)",
    "nodes": "spread --gpus evenly over this many nodes; overrides --gpus-per-node",
    "replicate": "replicas of the sharding group (HSDP)",
    "tp": "tensor-parallel degree",
    "cp": "context-parallel degree",
    "pp": "pipeline stages",
    "virtual-stages": "stages per rank of the interleaved schedule",
    "micro-batches": "micro-batches through the pipeline (default: --grad-accum)",
    "ep": "expert-parallel degree",
    "lora-rank": "rank of the adapters (default 16)",
    "micro-batch": "sequences per rank and micro-step (default 1)",
    "grad-accum": "micro-steps per optimizer step (default 1)",
    "seq-len": "tokens per sequence (default 2048)",
    "mean-len": "mean tokens of a sample, where rows are not full",
}
LARGEST_NODES = 100_000
ADAPTER_FLAGS = (
    "lora-rank",
    "lora-targets",
    "lora-dropout",
    "dora",
    "modules-to-save",
    "adapter-dtype",
    "expert-lora",
    "quantize-experts",
    "kbit-upcast",
)
CHOICES: dict[str, type[StrEnum]] = {
    "strategy": Strategy,
    "pp-schedule": PipelineSchedule,
    "method": Method,
    "quant": Quant,
    "kbit-upcast": KbitUpcast,
    "expert-lora": ExpertLora,
    "batching": Batching,
    "checkpointing": Checkpointing,
    "loss": Loss,
    "attention": Attention,
    "optimizer": Optimizer,
    "precision": Precision,
    "offload": Offload,
}
DTYPES = {
    "quant-storage": ("bf16", "uint8"),
    "adapter-dtype": ("fp32", "bf16"),
    "reduce-dtype": ("fp32", "bf16"),
}
NAMES = {
    "lora-targets": "all-linear, attention, attention+mlp, or module names",
    "modules-to-save": "modules trained in full beside the adapters",
}


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a plan. None has a default here: `plan_from` knows which were given."""
    group = parser.add_argument_group("plan")
    group.add_argument("--model", metavar="PRESET", help="a preset's name, such as qwen3-8b")
    group.add_argument("--config", metavar="FILE", help="a Hugging Face config.json")
    group.add_argument("--params", metavar="N", help="a bare parameter count, such as 8.2e9")
    group.add_argument("--gpu", metavar="NAME", help="GPU model, such as h100-sxm-80g or l40s, or local")
    group.add_argument(
        "--pcie", metavar="GENxLANES", help="this machine's slots, such as 3x8 (default: the card's)"
    )
    group.add_argument("--lora-dropout", metavar="SHARE", help="dropout before the adapters (default 0)")
    group.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE",
        help="a saved plan, run.json, accelerate YAML, DeepSpeed JSON, Axolotl YAML or torchtitan TOML",
    )
    group.add_argument("--recipe", metavar="NAME", help="a named recipe, or NAME:VARIANT, to start from")
    for name, text in COUNTS.items():
        group.add_argument(f"--{name}", metavar="N", help=text)
    for name, kind in CHOICES.items():
        group.add_argument(f"--{name}", metavar="|".join(kind))
    for name, values in DTYPES.items():
        group.add_argument(f"--{name}", metavar="|".join(values))
    for field, switch in sorted(SWITCHES.items()):
        group.add_argument(flag_of(field), action="store_true", default=None, help=switch.text)
    for name, text in NAMES.items():
        group.add_argument(f"--{name}", metavar="NAME,…", help=text)


def plan_from(args: argparse.Namespace) -> Plan:
    """The plan that the flags describe, checked for itself and against the model it names.

    What was assumed of a `--from` file is left in `args.notes`, told once the command has its result.
    Raises UserError with one line naming the flag and the valid values.
    """
    fields, notes = _start(args)
    named = [flag for flag in ("model", "config", "params") if getattr(args, flag) is not None]
    if len(named) > 1:
        raise UserError(
            f"--{named[0]} and --{named[1]} both name the model: give one of --model, --config, --params"
        )
    if named:
        fields = {k: v for k, v in fields.items() if k not in ("model", "config", "params")}
    for flag in ("model", "config", "pcie"):
        if getattr(args, flag) is not None:
            fields[flag] = getattr(args, flag)
    if args.gpu is not None:
        fields["gpu"] = _gpu(args.gpu)
    if args.params is not None:
        fields["params"] = _parameters(args.params)
    if args.lora_dropout is not None:
        fields["lora_dropout"] = _share("lora-dropout", args.lora_dropout)
    if not any(fields.get(key) is not None for key in ("model", "config", "params")):
        raise UserError("name the model: --model PRESET, --config FILE or --params N")

    for field, limit in LARGEST_COUNT.items():
        text = getattr(args, field)
        if text is not None:
            fields[field] = _count(field.replace("_", "-"), text, limit)
    for name, kind in CHOICES.items():
        text = getattr(args, _field(name))
        if text is not None:
            fields[_field(name)] = _choice(name, text, tuple(kind))
    for name, values in DTYPES.items():
        text = getattr(args, _field(name))
        if text is not None:
            fields[_field(name)] = _choice(name, text, values)
    fields |= {field: True for field in SWITCHES if getattr(args, field)}
    for name in NAMES:
        text = getattr(args, _field(name))
        if text is not None:
            fields[_field(name)] = _names(name, text)
    if args.nodes is not None:
        _spread(fields, _count("nodes", args.nodes, LARGEST_NODES), gpus_given=args.gpus is not None)
    try:
        if "strategy" not in fields and fields.get("gpus", 1) == 1:
            fields["strategy"] = Strategy.NONE
        plan = Plan.from_dict(fields)
        from ftdash.engine.planner import check

        check(plan)
        _check_adapter_flags(args, plan)
    except msgspec.ValidationError as error:
        raise UserError(f"--from {args.from_file}: {error}") from None
    except PlanError as error:
        raise UserError(str(error)) from None
    args.notes = [f"--from {args.from_file}: {note}" for note in notes]
    return plan


def _check_adapter_flags(args: argparse.Namespace, plan: Plan) -> None:
    """Adapter flags beside `--method full` contradict it. Without a method they say what LoRA would be, which
    the tables show beside full training, so they are checked as LoRA's. Raises UserError or PlanError."""
    if plan.method is not Method.FULL:
        return
    given = [name for name in ADAPTER_FLAGS if getattr(args, _field(name)) not in (None, False)]
    if not given:
        return
    if args.method is not None:
        raise UserError(f"--{given[0]} with --method full: it trains no adapters; use --method lora or qlora")
    from ftdash.engine.planner import check

    check(replace(plan, method=Method.LORA, optimizer_in_backward=False))


def strategy_was_given(args: argparse.Namespace) -> bool:
    return any(value is not None for value in (args.strategy, args.from_file, args.recipe))


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """The recipe that --recipe names. Raises UserError."""
    from ftdash.engine.recipes import RecipeError, load_recipe

    if args.recipe is None:
        return None
    if args.from_file is not None:
        raise UserError("--recipe and --from both start a plan: give one of them")
    try:
        return load_recipe(args.recipe)
    except RecipeError as error:
        raise UserError(str(error)) from None


def _start(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The fields that a file or a recipe sets before any flag does, and what was assumed of the file."""
    recipe = recipe_of(args)
    if recipe is not None:
        return recipe.plan.to_dict(), []
    return _saved(args.from_file) if args.from_file is not None else ({}, [])


def _field(name: str) -> str:
    return name.replace("-", "_")


def _saved(path: str) -> tuple[dict[str, Any], list[str]]:
    """The plan's fields out of a saved plan, a run.json, or a config that somebody already has.

    Counts are held to the same bounds as the flags. The notes say what was assumed.
    """
    from ftdash.engine.configs import ConfigError
    from ftdash.engine.configs.importer import fields_from_file

    try:
        fields, notes = fields_from_file(path)
    except ConfigError as error:
        raise UserError(str(error)) from None
    for field, limit in LARGEST_COUNT.items():
        value = fields.get(field)
        if value is not None and (type(value) is not int or not 1 <= value <= limit):
            raise UserError(f"--from {path}: {field} is {value!r}: must be a whole number from 1 to {limit}")
    for name, values in DTYPES.items():
        if fields.get(_field(name)) not in (None, *values):
            raise UserError(
                f"--from {path}: {_field(name)} is {fields[_field(name)]!r}: one of {', '.join(values)}"
            )
    return fields, notes


def _parameters(text: str) -> float:
    from ftdash.engine.model.config import LARGEST_TOTAL
    from ftdash.engine.model.load import LEAST_TOTAL

    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not LEAST_TOTAL <= value <= LARGEST_TOTAL or value != int(value):
        raise UserError(
            f"--params {text}: must be a whole number from {LEAST_TOTAL:g} to {LARGEST_TOTAL:g}, "
            f"such as 8.2e9"
        )
    return value


def _count(name: str, text: str, limit: int) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise UserError(f"--{name} {text}: must be a whole number from 1 to {limit}") from None
    if name == "replicate" and value == -1:
        raise UserError("--replicate -1: must be at least 1 (only the shard degree is filled in)")
    if not 1 <= value <= limit:
        raise UserError(f"--{name} {text}: must be a whole number from 1 to {limit}")
    return value


def _gpu(name: str) -> str:
    try:
        return full_name(name)
    except HardwareError as error:
        raise UserError(str(error)) from None


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UserError(f"--{name} {text}: must be a number from 0 to below 1")
    return value


def _choice(name: str, text: str, values: tuple[str, ...]) -> str:
    if text not in values:
        raise UserError(f"--{name} {text}: one of {', '.join(values)}")
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UserError(f"--{name}: give at least one name")
    return names


def _spread(fields: dict[str, Any], nodes: int, *, gpus_given: bool) -> None:
    """`--nodes`: an even share of --gpus each, or so many full nodes when --gpus was not given."""
    if not gpus_given:
        fields["gpus"] = nodes * fields.get("gpus_per_node", 8)
    gpus = fields["gpus"]
    if gpus % nodes:
        raise UserError(
            f"--nodes {nodes}: {gpus} GPUs do not spread evenly; --gpus must be a multiple of {nodes}"
        )
    fields["gpus_per_node"] = gpus // nodes
