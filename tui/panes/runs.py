"""The list of runs: newest first, one to watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message

from ftdash.monitor.rundir import Manifest, RunDir, RunError, list_runs
from ftdash.monitor.state import RunPhase
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.messages import RunChosen
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.overview import PHASE_LOOK

MOST_RUNS = 500  # manifests read for the list; older runs are found by `ftdash --run ID`

RunRow = tuple[RunDir, Manifest | None]


def newest_runs(root: str | None, limit: int = MOST_RUNS) -> list[RunRow]:
    """Runs and their manifests, newest first; None for a manifest that cannot be read. Raises RunError."""
    rows: list[RunRow] = []
    for run in reversed(list_runs(root, newest=limit)):
        try:
            rows.append((run, run.read_manifest()))
        except RunError:
            rows.append((run, None))
    return rows


class RunTable(Grid):
    """Runs with state, size, age and outcome."""

    HELP = "Newest first.\nenter  takes the run under the cursor"
    HINTS = "↑↓ run  enter watch"
    empty = "looking for runs…"

    def columns(self) -> Sequence[Column]:
        return [
            Column("state", "state", 11),
            Column("name", "run", 30, grow=True),
            Column("ranks", "ranks", 5, right=True, drop=2),
            Column("backend", "backend", 7, drop=3),
            Column("age", "started", 14, right=True, drop=1),
            Column("reason", "outcome", 24, drop=4),
        ]

    def identity(self, item: RunRow) -> Hashable:
        return item[0].run_id

    def cells(self, item: RunRow, columns: Sequence[Column]) -> Line:
        run, manifest = item
        if manifest is None:
            return ((f"{theme.GLYPHS.no} {fmt.clean(run.run_id)}: run.json cannot be read", theme.BAD),)
        phase = RunPhase(manifest.state) if manifest.state in set(RunPhase) else RunPhase.STARTING
        symbol, style = PHASE_LOOK[phase]
        cells = {
            "state": (f"{symbol} {fmt.clean(manifest.state)}", style),
            "name": (fmt.clean(run.run_id), theme.TEXT),
            "ranks": (str(manifest.world_size), theme.TEXT),
            "backend": (fmt.clean(manifest.backend), theme.DIM),
            "age": (f"{fmt.duration(time.time() - manifest.created)} ago", theme.DIM),
            "reason": (fmt.clean(manifest.reason), theme.DIM),
        }
        return tuple(cells[column.key] for column in columns)


class RunsScreen(Overlay[None]):
    """Choose a run; the folder is read in a thread."""

    HELP = "Older runs than these are found by name: ftdash --run NAME."

    BINDINGS: ClassVar = [Binding("escape,q", "close", "Back", show=False)]

    class Listed(Message):
        """The runs were read, or could not be."""

        def __init__(self, rows: list[RunRow], trouble: str) -> None:
            super().__init__()
            self.rows, self.trouble = rows, trouble

    def __init__(self, root: str | None, take: Callable[[RunDir], object] | None = None) -> None:
        """`take` gets the chosen run; without it the run is watched from then on."""
        super().__init__()
        self._root = root
        self._take = take

    def compose(self) -> ComposeResult:
        with Vertical(id="runs-box") as box:
            box.border_title = "Runs"
            box.border_subtitle = f"enter {'lay over' if self._take else 'watch'}  esc back"
            yield RunTable(id="runs")

    def on_mount(self) -> None:
        self.query_one(RunTable).focus()
        threading.Thread(target=self._read, name="run-list", daemon=True).start()

    def _read(self) -> None:
        try:
            rows, trouble = newest_runs(self._root), ""
        except RunError as error:
            rows, trouble = [], str(error)
        self.post_message(self.Listed(rows, trouble))

    def on_runs_screen_listed(self, event: Listed) -> None:
        box = self.query_one("#runs-box")
        box.border_title = Content(fmt.clean(event.trouble) or f"Runs {len(event.rows)}")
        table = self.query_one(RunTable)
        table.say_empty("" if event.trouble else "no runs yet: 2 Launch starts one, and so does ftdash demo")
        table.set_items(event.rows)
        table.invalidate()

    @on(Grid.Selected)
    def _chosen(self, event: Grid.Selected) -> None:
        event.stop()
        run: RunDir = event.item[0]
        if self._take is not None:
            self._take(run)
        else:
            self.app.post_message(RunChosen(run, "monitor"))
        self.dismiss(None)

    def action_close(self) -> None:
        self.dismiss(None)
