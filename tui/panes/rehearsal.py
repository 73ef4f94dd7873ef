"""The rehearsal above the Launch pane: what it does now, then what it proved and what it could not."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widgets import Static

from ftdash.engine.plan import Plan
from ftdash.monitor.home import home
from ftdash.monitor.rundir import new_run_id
from ftdash.tui import format as fmt
from ftdash.tui import rehearsing, theme
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.rehearsing import Outcome

LOOK_EVERY_S = 0.5


class RehearsalScreen(Overlay[None]):
    """Leaving it ends the rehearsal and its processes; what it wrote stays."""

    HELP = (
        "The same plan on this CPU with a small model: trained, saved, converted, loaded, resumed. Takes a "
        "minute or some.\n"
        "esc  ends it and goes back"
    )
    BINDINGS: ClassVar = [Binding("escape,q", "close", "Back", show=False)]

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._work: Path = home() / "rehearsals" / new_run_id(f"rehearsal-{plan.model or 'model'}")
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="config-box") as box:
            box.border_title = "Rehearsing…"
            box.border_subtitle = "esc ends it"
            yield Static(id="rehearsal-text")

    def on_mount(self) -> None:
        try:
            self._process = rehearsing.start(self._plan, self._work)
        except OSError as error:
            self._end(Outcome(failure=f"cannot rehearse in {self._work}: {error.strerror or error}"))
            return
        self._timer = self.set_interval(LOOK_EVERY_S, self._look)
        self._look()

    def _look(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            self._end(rehearsing.outcome(self._work, code))
            return
        name, line = rehearsing.stage(self._work)
        seconds = time.monotonic() - self._started
        text = Text()
        text.append(f"{theme.GLYPHS.waiting} {name or 'shrinking the model'}  ", theme.WARN)
        text.append(f"{seconds:.0f} s\n\n", theme.BOLD)
        text.append(fmt.clean(line) + "\n\n", theme.DIM)
        text.append(f"kept in {fmt.clean(str(self._work))}", theme.DIM)
        self.query_one("#rehearsal-text", Static).update(text)

    def _end(self, found: Outcome) -> None:
        if self._timer is not None:
            self._timer.stop()
        box = self.query_one("#config-box")
        box.border_title, box.border_subtitle = "Rehearsal", "esc back"
        self.query_one("#rehearsal-text", Static).update(outcome_text(found, self._work))

    def on_unmount(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def action_close(self) -> None:
        self.dismiss(None)


def outcome_text(found: Outcome, work: Path) -> Text:
    """The verdict first, then every sentence with its sign."""
    text = Text()
    if found.failure:
        text.append(f"{theme.GLYPHS.no} does not hold: {fmt.clean(found.failure)}\n\n", theme.BAD)
    else:
        words = f"proved {fmt.plural(len(found.proved), 'thing')} on this CPU in {found.seconds:.0f} s"
        text.append(f"{theme.GLYPHS.fits} {words}\n\n", theme.OK)
    for line in found.proved:
        text.append(f"{theme.GLYPHS.fits} ", theme.OK)
        text.append(fmt.clean(line) + "\n", theme.TEXT)
    if found.not_proved:
        text.append("\nnot proved\n", theme.WARN)
        for line in found.not_proved:
            text.append(f"{theme.GLYPHS.dot} {fmt.clean(line)}\n", theme.DIM)
    text.append(f"\nkept in {fmt.clean(str(work))}", theme.DIM)
    return text
