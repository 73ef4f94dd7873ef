"""`ftdash compare`: two runs side by side, and whether training changed between them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ftdash.engine.compare import RunComparison, RunFigures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("left", metavar="RUN", help="a run's id, part of it, or its directory")
    parser.add_argument("right", metavar="RUN")
    parser.add_argument("--runs", metavar="DIR", help="where the runs are (default: $FTDASH_HOME/runs)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    from ftdash.engine.compare import compare_runs
    from ftdash.monitor.rundir import find_run

    result = compare_runs(find_run(args.left, args.runs), find_run(args.right, args.runs))
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        return 0
    for name, left, right in _rows(result):
        sys.stdout.write(f"{name:<20} {left:<32} {right}\n")
    for point in result.loss[:: max(1, len(result.loss) // 8)]:
        sys.stdout.write(f"{f'loss at {point.tokens:,}':<20} {point.left:<32.4f} {point.right:.4f}\n")
    sys.stdout.write("".join(f"differs: {line}\n" for line in result.changed))
    sys.stdout.write(result.verdict + "\n")
    return 0


def _rows(result: RunComparison) -> list[tuple[str, str, str]]:
    def row(name: str, text: object) -> tuple[str, str, str]:
        show = text if callable(text) else str
        return name, show(result.left), show(result.right)

    return [
        row("run", lambda run: run.run),
        row("strategy", _strategy),
        row("steps, tokens", lambda run: f"{run.steps}, {run.tokens:,}"),
        row("tokens/s", lambda run: f"{run.tokens_per_s:,.0f}"),
        row("step", lambda run: f"{run.step_s:.3f} s"),
        row("peak by rank", _peaks),
        row("checkpoints", lambda run: ", ".join(run.checkpoints) or "none"),
        row("conversion", lambda run: run.conversion),
        row("loads as it is", lambda run: run.loads),
    ]


def _strategy(run: RunFigures) -> str:
    """As it was told; a command of one's own tells neither strategy nor method."""
    told = f"{run.strategy} {run.variant}".strip()
    return f"{told or 'own command'} on {run.world_size}"


def _peaks(run: RunFigures) -> str:
    if not any(run.peak_bytes):
        return "not measured"
    shown = ", ".join(f"{peak / 2**30:.2f}" for peak in run.peak_bytes[:4])
    return f"{shown}{' …' if len(run.peak_bytes) > 4 else ''} GiB {run.peak_kind}"
