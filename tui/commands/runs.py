"""`ftdash runs`: what ran and what runs, newest first."""

from __future__ import annotations

import argparse
import sys
import time

from ftdash.engine.launch.reading import reader_for
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.rundir import Manifest, RunDir, RunError, list_runs
from ftdash.monitor.state import RunPhase
from ftdash.monitor.wording import plural
from ftdash.tui.commands.launch import whole_number
from ftdash.tui.commands.run_json import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--limit", default="50", metavar="N", help="show the newest N (50)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    limit = whole_number("--limit", args.limit) or 50
    rows = []
    for found in reversed(list_runs(args.runs)[-limit:]):
        try:
            found.check_owner()
            manifest = found.read_manifest()
            rows.append((found, manifest, state_of(found, manifest)))
        except (RunError, ValueError) as error:
            sys.stderr.write(f"ftdash: {error}\n")
    if args.json:
        print_json(
            [
                {
                    "run": manifest.run,
                    "dir": str(found.path),
                    "state": str(state),
                    "created": manifest.created,
                    "world_size": manifest.world_size,
                    "backend": manifest.backend,
                    "name": manifest.name,
                }
                for found, manifest, state in rows
            ]
        )
        return 0
    if not rows:
        print("no runs yet: ftdash demo starts one")
    for _, manifest, state in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.created))
        print(f"{state:<9} {when}  {plural(manifest.world_size, 'rank'):>10}  {manifest.run}")
    return 0


def state_of(run: RunDir, manifest: Manifest) -> RunPhase:
    """The run's state; only one that has not ended needs a closer look."""
    if (stored := RunPhase(manifest.state)) in FINAL:
        return stored
    reader = reader_for(run)
    try:
        return reader.poll().state
    finally:
        reader.close()
