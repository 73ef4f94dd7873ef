"""`ftdash watch`: follow a run as lines until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from ftdash.engine.launch.again import NewAgents
from ftdash.engine.launch.reading import reader_for
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, find_run
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import print_json, progress_line, status_json

LINE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="id, part of it, or folder (last)"
    )
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--interval", default="2", metavar="SECONDS", help="between lines (2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, as status prints it")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when the run finished or was stopped, 1 when it failed."""
    try:
        interval_s = float(args.interval)
    except ValueError:
        interval_s = 0.0
    if not 0.1 <= interval_s <= 3600:
        raise UserError(f"--interval {args.interval}: seconds from 0.1 to 3600")
    found = find_run(args.run, args.runs)
    found.check_owner()
    state = None
    told: set[str] = set()
    for state in follow(found, interval_s):
        if args.json:
            print_json(status_json(state))
        else:
            print(progress_line(state), flush=True)
            tell_notices(state, told)
    assert state is not None
    if not args.json and state.manifest.reason:
        print(f"{state.state}: {state.manifest.reason}")
    return 1 if state.state is RunPhase.FAILED else 0


def follow(run: RunDir, interval_s: float = LINE_S, reader: RunReader | None = None) -> Iterator[RunState]:
    """The run's state at its start, at most once an interval while something moves, and at its end."""
    reader = reader or reader_for(run)
    agents = NewAgents(run)
    shown: tuple[object, ...] = ()
    shown_at = 0.0
    while True:
        state = agents.look(reader.poll())
        key = (state.state, state.step, agents.told)
        ended = state.state in FINAL and not reader.behind
        due = key != shown and time.monotonic() - shown_at >= interval_s
        if ended or due or not shown:
            shown, shown_at = key, time.monotonic()
            yield state
        if ended:
            return
        time.sleep(min(0.5, interval_s))


def tell_notices(state: RunState, told: set[str]) -> None:
    """Say on stderr what was not said before."""
    for notice in state.notices:
        if notice not in told:
            told.add(notice)
            sys.stderr.write(f"ftdash: {notice}\n")
