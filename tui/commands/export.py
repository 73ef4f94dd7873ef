"""`ftdash export`: a run as CSV or OpenMetrics text."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO

from ftdash.monitor.export import openmetrics, write_csv
from ftdash.monitor.rundir import find_run
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import read_once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help="id, part of it, or folder (last)"
    )
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one row a step and rank")
    form.add_argument("--openmetrics", action="store_true", help="the newest figures, for Prometheus")
    parser.add_argument("--out", metavar="FILE", help="write there, replacing it whole (standard output)")


def run(args: argparse.Namespace) -> int:
    if not args.csv and not args.openmetrics:
        raise UserError("export needs --csv or --openmetrics")
    found = find_run(args.run, args.runs)
    found.check_owner()
    if args.openmetrics:
        text = openmetrics(read_once(found))
        with _output(args.out) as out:
            out.write(text)
        return 0
    with _output(args.out) as out:
        done = write_csv(found, out)
    if done.skipped:
        sys.stderr.write(f"ftdash: {done.skipped} lines were no records and were left out\n")
    return 0


def _output(path: str | None) -> AbstractContextManager[IO[str]]:
    return _replacing(Path(path)) if path else nullcontext(sys.stdout)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    """Write beside `path` and rename, so that a collector never reads half a file. Raises UserError."""
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as handle:
                yield handle
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror or error}") from error
