"""Opens the cockpit: reads its few flags, paints the plain first frame, then loads Textual."""

from __future__ import annotations

import argparse
import gc
import sys
from typing import TYPE_CHECKING

from ftdash.tui import splash

if TYPE_CHECKING:
    from ftdash.monitor.rundir import RunDir

PANE_NAMES = tuple(name.lower() for name in splash.PANES)


def _arguments(argv: list[str]) -> argparse.Namespace:
    from ftdash.tui.cli import UserError

    parser = argparse.ArgumentParser(prog="ftdash", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--pane", choices=PANE_NAMES)
    parser.add_argument("--run")
    parser.add_argument("--runs")
    parser.add_argument("--debug", action="store_true")
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        raise UserError(
            f"--pane takes one of {', '.join(PANE_NAMES)}; --run a run, --runs a folder"
        ) from None
    if unknown:
        raise UserError(f"unknown flag {unknown[0]!r}: the app takes --pane, --run, --runs, --debug")
    return arguments


def open_app(argv: list[str], run: RunDir | None = None, pane: str | None = None) -> int:
    """Open the screen, on `run` and `pane` where given, and return its exit status.

    Raises UserError for bad flags and RunError for a run that cannot be found, before the first frame.
    """
    arguments = _arguments(argv)
    if sys.stdout.isatty() and not sys.stderr.isatty():
        # The screen is drawn into stderr and would stay empty; a person looks at the terminal at stdout.
        print("ftdash: stderr is no terminal, but the screen is drawn there: start it without 2> or 2>&1")
        return 2
    if arguments.run is not None and run is None:
        from ftdash.monitor.rundir import find_run

        run = find_run(arguments.run, arguments.runs)
    pane = pane or arguments.pane or ("monitor" if run is not None else "plan")
    painted = splash.paint(run.run_id if run is not None else "")
    # Collecting garbage while modules are loaded costs a fifth of the start; the cockpit turns it on again.
    gc.disable()
    try:
        from ftdash.tui.cockpit import Cockpit

        cockpit = Cockpit(run=run, pane=pane, runs_root=arguments.runs)
    except BaseException:
        if painted:
            splash.withdraw()
        raise
    cockpit.run()
    if line := cockpit.parting_words():
        print(line)
    return cockpit.return_code or 0
