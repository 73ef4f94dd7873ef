"""`ftdash demo`: train a tiny mixture of experts on two CPU ranks, and watch it or prove it."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from ftdash.engine.launch.spec import LaunchError
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunState
from ftdash.monitor.stop import stop_run
from ftdash.tui.cli import UserError
from ftdash.tui.commands.launch import whole_number
from ftdash.tui.commands.run_json import print_json, progress_line, run_summary
from ftdash.tui.commands.watch import follow, tell_notices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="N", help="optimizer steps (about three minutes of them)")
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--detach", action="store_true", help="start it and return")
    parser.add_argument("--json", action="store_true", help="no screen; JSON on stdout, progress on stderr")


def run(args: argparse.Namespace) -> int:
    """With a terminal the app on Monitor; without one exit status 0 only when it really trained."""
    from ftdash.engine.launch.demo import STEPS, demo_spec
    from ftdash.engine.launch.local import launch

    steps = whole_number("--steps", args.steps) or STEPS
    try:
        started = launch(demo_spec(steps, Path(args.runs) if args.runs else None))
    except LaunchError as error:
        raise UserError(str(error)) from None
    if args.detach:
        if args.json:
            print_json(run_summary(started))
        else:
            print(f"{started.run_id} started; ftdash watch {started.run_id}  ·  ftdash stop {started.run_id}")
        return 0
    if not args.json and sys.stdout.isatty() and sys.stdin.isatty():
        from ftdash.tui.app import open_app

        return open_app([], run=started, pane="monitor")
    return _headless(started, steps, args.json)


def _headless(run: RunDir, steps: int, as_json: bool) -> int:
    from ftdash.engine.launch.demo import doubts

    lines = sys.stderr if as_json else sys.stdout
    lines.write(f"{run.run_id}\n{run.path}\n")
    reader = RunReader(run)
    told: set[str] = set()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for state in follow(run, reader=reader):
            lines.write(progress_line(state) + "\n")
            lines.flush()
            tell_notices(state, told)
    except KeyboardInterrupt:
        lines.write("interrupted: stopping the run\n")
        stop_run(run)
        return 130
    finally:
        reader.close()
    reasons = doubts(state, reader.summary.ranks, steps)
    if as_json:
        print_json(
            {
                **run_summary(run),
                "step": state.step,
                "loss": state.loss,
                "trained": not reasons,
                "doubts": reasons,
            }
        )
    else:
        _tell_summary(state, reasons)
    for reason in reasons:
        sys.stderr.write(f"ftdash: {reason}\n")
    return 1 if reasons else 0


def _tell_summary(state: RunState, reasons: list[str]) -> None:
    points = [point.loss for point in state.points if point.loss is not None]
    if points:
        print(f"loss {points[0]:.4f} -> {points[-1]:.4f} in {state.step} steps, {len(state.ranks)} ranks")
    if state.experts:
        worst = max(state.experts, key=lambda layer: layer.imbalance)
        print(
            f"experts: {len(state.experts)} MoE layers; most uneven is layer {worst.layer},"
            f" its busiest expert at {worst.imbalance:.2f} times an even share"
        )
    print("trained as asked" if not reasons else "did NOT train as asked")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
