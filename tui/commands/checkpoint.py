"""`ftdash checkpoint`: list, convert and verify checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from ftdash.tui.cli import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|convert|verify")
    listing = actions.add_parser("ls", help="every checkpoint below a folder, and whether it is whole")
    listing.add_argument("path", metavar="DIR")
    listing.add_argument("--json", action="store_true")
    conversion = actions.add_parser(
        "convert", help="into safetensors, an adapter folder or a universal checkpoint"
    )
    conversion.add_argument("path", metavar="CHECKPOINT")
    conversion.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    conversion.add_argument(
        "--to", metavar="full|adapter|merged|universal", help="default: full, or adapter for LoRA"
    )
    conversion.add_argument(
        "--base", metavar="DIR", help="folder with config, tokenizer, adapter_config or base model"
    )
    conversion.add_argument(
        "--force", action="store_true", help="start even when host memory looks too small"
    )
    conversion.add_argument("--json", action="store_true")
    verification = actions.add_parser("verify", help="load it, or compare it with another, tensor by tensor")
    verification.add_argument("path", metavar="CHECKPOINT")
    verification.add_argument("--against", metavar="CHECKPOINT", help="compare every tensor with this one")
    verification.add_argument("--base", metavar="DIR", help="base model of an adapter")
    verification.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    from ftdash.engine.checkpoint.convert import ConvertError

    try:
        return {"ls": _list, "convert": _convert, "verify": _verify}[args.action](args)
    except ConvertError as error:
        raise UserError(str(error)) from None


def _open(text: str, flag: str = "") -> Any:
    from ftdash.engine.checkpoint.recognise import inspect

    path = Path(text)
    if not path.exists():
        raise UserError(f"{flag}{text}: no such folder")
    found = inspect(path)
    if found is None:
        raise UserError(
            f"{flag}{text}: no checkpoint (DCP, DeepSpeed, universal, FSDP files, safetensors or adapter)"
        )
    return found


def _list(args: argparse.Namespace) -> int:
    from ftdash.engine.checkpoint.recognise import find, last_whole

    root = Path(args.path)
    if not root.is_dir():
        raise UserError(f"{args.path}: no such folder")
    found, last = find(root), last_whole(root)
    rows = [
        {
            "path": str(checkpoint.path),
            "kind": str(checkpoint.kind),
            "step": checkpoint.step,
            "ranks": checkpoint.ranks or None,
            "model_ranks": checkpoint.model_ranks,
            "bytes": checkpoint.bytes,
            "whole": checkpoint.whole,
            "optimizer_missing": checkpoint.no_optimizer,
            "problem": checkpoint.problem,
        }
        for checkpoint in found
    ]
    if args.json:
        _print({"checkpoints": rows, "last_whole": str(last.path) if last else None})
        return 0
    for checkpoint, row in zip(found, rows, strict=True):
        size = f"{checkpoint.bytes / 2**20:.1f} MiB"
        split = f"x{checkpoint.model_ranks}" if checkpoint.model_ranks > 1 else ""
        ranks = f"{row['ranks']}{split} ranks" if row["ranks"] else ""
        whole = "whole, but without the optimizer's state" if checkpoint.no_optimizer else "whole"
        state = whole if row["whole"] else f"half written: {row['problem']}"
        sys.stdout.write(f"{row['kind']:<10} {size:>12}  {ranks:<9} {row['path']}  {state}\n")
    if not rows:
        sys.stdout.write(f"no checkpoint below {root}\n")
    elif last and any(not row["whole"] for row in rows):
        sys.stdout.write(f"last whole one: {last.path}\n")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from ftdash.engine.checkpoint.convert import Target, convert, default_target, gather_bytes

    checkpoint = _open(args.path)
    if args.to is not None and args.to not in list(Target):
        raise UserError(f"--to {args.to}: one of {', '.join(Target)}")
    target = Target(args.to) if args.to else default_target(checkpoint)
    needed = gather_bytes(checkpoint, target)
    if not args.json:
        sys.stdout.write(
            f"{checkpoint.kind} to {target}: needs about {needed / 2**30:.2f} GiB of host memory\n"
        )
        sys.stdout.flush()
    done = convert(
        checkpoint,
        Path(args.out),
        target,
        base=Path(args.base) if args.base else None,
        available_bytes=None if args.force else _available_bytes(),
    )
    if args.json:
        _print(
            {
                "path": str(done.path),
                "target": str(done.target),
                "gather_bytes": needed,
                "notes": list(done.notes),
            }
        )
    else:
        sys.stdout.write("".join(f"{line}\n" for line in (f"wrote {done.path}", *done.notes)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ftdash.engine.checkpoint import verify

    checkpoint = _open(args.path)
    if args.against is None:
        said = verify.loads(checkpoint.path, Path(args.base) if args.base else None)
        if args.json:
            _print({"loads": True, "evidence": said})
        else:
            sys.stdout.write("".join(f"{line}\n" for line in said))
        return 0
    result = verify.compare(checkpoint, _open(args.against, "--against "))
    if args.json:
        _print({"same": result.same, **msgspec.to_builtins(result)})
        return int(not result.same)
    sys.stdout.write(f"{result.equal} tensors equal, {len(result.different)} different\n")
    for name in result.different[:10]:
        sys.stdout.write(f"  differs: {name}\n")
    for side, names in (("first", result.only_left), ("second", result.only_right)):
        if names:
            sys.stdout.write(f"  only in the {side}: {len(names)}, such as {names[0]}\n")
    if result.different:
        sys.stdout.write(
            f"  largest difference {result.largest_difference:.3g}; dtypes "
            f"{' against '.join(result.dtypes)}\n"
        )
    return int(not result.same)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _print(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
