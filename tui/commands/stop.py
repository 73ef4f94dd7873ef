"""`ftdash stop`: end a run and every process of it, with or without its agent."""

from __future__ import annotations

import argparse

from ftdash.engine.launch.stop import stop
from ftdash.monitor.rundir import find_run
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import exit_codes, print_json, read_once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="id, part of it, or folder (last)"
    )
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--save", action="store_true", help="write a checkpoint first")
    parser.add_argument("--grace", default="20", metavar="SECONDS", help="between SIGTERM and SIGKILL (20)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Returns when every process of the run is gone; exit status 1 when some would not go."""
    try:
        grace_s = float(args.grace)
    except ValueError:
        grace_s = -1.0
    if not 0 <= grace_s <= 3600:
        raise UserError(f"--grace {args.grace}: seconds from 0 to 3600")
    found = find_run(args.run, args.runs)
    found.check_owner()
    left = stop(found, save=args.save, grace_s=grace_s)
    state = read_once(found)
    if args.json:
        print_json({"run": state.run, "state": str(state.state), "exit_codes": exit_codes(state)})
    else:
        print(f"{state.run}: {state.state}" + (f", {state.manifest.reason}" if state.manifest.reason else ""))
    if left:
        raise UserError(f"processes that would not end: {', '.join(map(str, sorted(left)))}")
    return 0
