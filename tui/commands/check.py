"""`ftdash check`: find traps in configs, scripts, plans and checkpoints before they cost days."""

from __future__ import annotations

import argparse
import sys

import msgspec

from ftdash.tui.cli import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="accelerate YAML, DeepSpeed JSON, Axolotl, TRL or LLaMA-Factory YAML, training or batch script, "
        "run.json, plan, requirements.txt, checkpoint folder; several are checked together",
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when there is an error among the findings."""
    from ftdash.engine.check.documents import DocumentError
    from ftdash.engine.check.findings import Severity
    from ftdash.engine.check.registry import check_files

    try:
        findings = check_files(args.files)
    except DocumentError as error:
        raise UserError(str(error)) from None
    if args.json:
        sys.stdout.buffer.write(
            msgspec.json.encode({"findings": [found.to_dict() for found in findings]}) + b"\n"
        )
    else:
        for found in findings:
            sys.stdout.write(f"{found.severity:<7} {found.where}  {found.code}\n        {found.text}\n")
            sys.stdout.write(f"        fix: {found.fix}\n")
        counts = [f"{sum(f.severity is kind for f in findings)} {kind}s" for kind in Severity]
        sys.stdout.write(", ".join(counts) + "\n")
    return int(any(found.severity is Severity.ERROR for found in findings))
