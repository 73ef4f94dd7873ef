"""`ftdash configs`: write the config files and commands of a plan, or convert an inherited FSDP1 file."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from, recipe_of

if TYPE_CHECKING:
    from ftdash.engine.configs import Generated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--out", metavar="DIR", help="folder for the files; without it they are printed")
    parser.add_argument("--overwrite", action="store_true", help="replace files that differ")
    parser.add_argument("--data", metavar="NAME", help="hub id or local JSONL")
    parser.add_argument("--steps", metavar="N", default="100", help="optimizer steps (default 100)")
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto")
    parser.add_argument(
        "--output-dir", metavar="DIR", default="ftdash-out", help="where training writes checkpoints"
    )
    parser.add_argument("--main-address", metavar="HOST", help="the first node, for runs on several")
    parser.add_argument("--main-port", metavar="PORT", help="a free port on the first node")
    parser.add_argument(
        "--debug-switches", metavar="NAME,…", help="debug switches for the environment; list: show them"
    )
    parser.add_argument("--convert", metavar="FILE", help="convert an FSDP1 accelerate YAML to FSDP2")
    parser.add_argument("--json", action="store_true", help="print files, commands and notes as JSON")


def run(args: argparse.Namespace) -> int:
    if args.convert is not None:
        return _convert(args)
    if args.debug_switches == "list":
        return _list_switches()
    generated, exports = _generate(args)
    if args.json:
        _print_json(generated)
        return 0
    if args.out is None:
        for name, text in generated.files.items():
            sys.stdout.write(f"── {name}\n{text}\n")
    else:
        for line in _write(Path(args.out), generated.files, args.overwrite):
            sys.stdout.write(line + "\n")
    sys.stdout.write(_commands_text(generated, exports))
    return 0


def _generate(args: argparse.Namespace) -> tuple[Generated, list[str]]:
    from ftdash.engine.configs import ConfigError, Rendezvous, TrainArgs, generate
    from ftdash.engine.configs.debug_switches import environment
    from ftdash.engine.configs.script import model_source
    from ftdash.engine.model.load import ModelError, resolve
    from ftdash.engine.plan import PlanError

    if args.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {args.device}: one of auto, cpu, cuda")
    plan, recipe = plan_from(args), recipe_of(args)
    data = args.data or (recipe.data if recipe else None)
    rendezvous = None
    if args.main_address or args.main_port:
        port = _whole("main-port", args.main_port or "29400", 1, 65535)
        rendezvous = Rendezvous(address=args.main_address or "NODE0", port=port)
    try:
        shape = resolve(plan)
        train = TrainArgs(
            model=model_source(plan, shape),
            output_dir=args.output_dir,
            data=data,
            steps=_whole("steps", args.steps, 1, 1_000_000_000),
            device=args.device,
        )
        generated = generate(
            plan, shape=shape, train_args=train, config_dir=args.out or ".", rendezvous=rendezvous
        )
        exports = environment(args.debug_switches.split(",") if args.debug_switches else [])
    except (ConfigError, ModelError, PlanError) as error:
        raise UserError(str(error)) from None
    return generated, exports


def _whole(flag: str, text: str, least: int, most: int) -> int:
    if not text.isdigit() or not least <= int(text) <= most:
        raise UserError(f"--{flag} {text}: must be a whole number from {least} to {most}")
    return int(text)


def _write(folder: Path, files: dict[str, str], overwrite: bool) -> list[str]:
    """Write all files or none; a file of other content is shown as a diff and kept."""
    import difflib

    different = []
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text() != text:
            different.append(name)
    if different and not overwrite:
        name = different[0]
        lines = difflib.unified_diff(
            (folder / name).read_text().splitlines(),
            files[name].splitlines(),
            f"{name} (there)",
            f"{name} (new)",
            lineterm="",
        )
        sys.stdout.write("\n".join(lines) + "\n")
        raise UserError(f"--out {folder}: {', '.join(different)} would change; --overwrite replaces them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror or error}") from None
    return [f"wrote {folder / name}" for name in files]


def _commands_text(generated: Generated, exports: list[str]) -> str:
    lines = []
    for command in generated.commands:
        lines.append(f"\n# with {command.launcher}")
        for rank, argv in enumerate(command.nodes):
            if len(command.nodes) > 1:
                lines.append(f"# on node {rank}")
            lines.append(" ".join([*exports, shlex.join(argv)]))
    lines += [f"# {note}" for note in generated.notes]
    lines += [f"# not rehearsed: {name}" for name in generated.not_rehearsed]
    return "\n".join(lines) + "\n"


def _print_json(generated: Generated) -> None:
    value = {
        "files": generated.files,
        "commands": [
            {"launcher": str(command.launcher), "nodes": [list(argv) for argv in command.nodes]}
            for command in generated.commands
        ],
        "notes": list(generated.notes),
        "not_rehearsed": list(generated.not_rehearsed),
    }
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")


def _convert(args: argparse.Namespace) -> int:
    from ftdash.engine.configs.fsdp1 import convert_fsdp1_file
    from ftdash.engine.configs.types import ConfigError

    try:
        converted = convert_fsdp1_file(Path(args.convert))
    except ConfigError as error:
        raise UserError(str(error)) from None
    if args.json:
        value = {"text": converted.text, "dropped": converted.dropped, "changed": converted.changed}
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        return 0
    if args.out:
        for line in _write(
            Path(args.out), {f"{Path(args.convert).stem}.fsdp2.yaml": converted.text}, args.overwrite
        ):
            sys.stdout.write(line + "\n")
    else:
        sys.stdout.write(converted.text)
    for line in (*converted.changed, *converted.dropped):
        sys.stdout.write(f"# {line}\n")
    return 0


def _list_switches() -> int:
    from ftdash.engine.configs.debug_switches import SWITCHES

    for switch in SWITCHES:
        sys.stdout.write(f"{switch.name:<22} {switch.assignment}\n")
        sys.stdout.write(f"{'':<22} {switch.what}\n{'':<22} price: {switch.price}\n")
    return 0
