"""The alerts of a run: worst and newest first, each acknowledged by a key."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

from ftdash.monitor.alerts import AlertBook
from ftdash.monitor.records import HANG_CODE
from ftdash.monitor.state import Alert
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

LOOK: dict[str, tuple[int, str, Style]] = {
    "error": (0, theme.GLYPHS.no, theme.BAD),
    "warning": (1, theme.GLYPHS.tight, theme.WARN),
    "note": (2, theme.GLYPHS.dot, theme.DIM),
}

CLOCK = 5  # cells of "14:01"
ROOM_FOR_CLOCK = 30  # columns

MOST_LINES = 5  # of one alert in the list; its window has the rest
AlertRow = tuple[Alert, int, str]  # the alert, which of its lines, and that line


@lru_cache(maxsize=512)
def listed(text: str, width: int, first: int, most: int) -> tuple[tuple[str, ...], int]:
    """An alert as at most so many lines of `width` cells, `first` in the first, and how many are evidence.

    What is found comes first; what to do about it, after the first semicolon, has a line where there are two.
    """
    found, _, advice = text.partition("; ")
    evidence = textwrap.wrap(" " * (width - first) + found, width, drop_whitespace=False)
    evidence = [line.strip() for line in evidence if line.strip()] or [""]
    rest = textwrap.wrap(advice, width)
    shown = _cut(evidence, max(1, most - bool(rest)), width)
    return (*shown, *_cut(rest, most - len(shown), width)), len(shown)


def _cut(lines: list[str], most: int, width: int) -> list[str]:
    if len(lines) <= most or most < 1:
        return lines[:most]
    return [*lines[: most - 1], fmt.fit(f"{lines[most - 1]} {lines[most]}", width).rstrip()]


class AlertList(Grid):
    """Open alerts; `a` acknowledges one, `A` shows the acknowledged again."""

    HELP = (
        "✗ error, ▲ warning, · note.\nenter  shows the alert under the cursor whole\n"
        "a  acknowledges it\nA  shows all again"
    )
    HINTS = "↑↓ alert  enter whole  a acknowledge  A show all"
    HEADER = False

    BINDINGS: ClassVar = [
        Binding("a", "acknowledge", "Acknowledge", show=False),
        Binding("A", "show_all", "Show all", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.book = AlertBook()
        self.alerts: tuple[Alert, ...] = ()  # as shown, from the top
        self.border_title = "Alerts"

    def forget(self) -> None:
        """Another run is watched: what was acknowledged was of the last one."""
        self.book = AlertBook()

    def show(self, alerts: Sequence[Alert], notices: Sequence[str] = (), now: float | None = None) -> None:
        """Alerts of the run, then what the reader skipped, as notes. `now`: UTC seconds, of the state."""
        told = [Alert(_code_of(text), "note", text) for text in notices]
        self.book.update([*alerts, *told], time.time() if now is None else now)
        self._list()

    def _list(self) -> None:
        holding = [entry for entry in self.book.entries() if entry.until is None]
        open_alerts = [replace(entry.alert, t=entry.since) for entry in holding if not entry.acknowledged]
        # What names a culprit says more than that the run stands still.
        open_alerts.sort(
            key=lambda alert: (LOOK.get(alert.severity, LOOK["note"])[0], alert.code != HANG_CODE, -alert.t)
        )
        title = f"Alerts {len(open_alerts)}" if open_alerts else f"Alerts {theme.GLYPHS.fits} none"
        if hidden := len(holding) - len(open_alerts):
            title += f" · {hidden} acknowledged"
        self.retitle(title)
        self.alerts = tuple(open_alerts)
        self._wrap()

    def _wrap(self) -> None:
        """An alert takes as many lines as its text asks for, and as leave room for the others."""
        rows: list[AlertRow] = []
        for alert in self.alerts:
            lines, _ = self._listed(alert)
            rows += [(alert, number, line) for number, line in enumerate(lines)]
        if rows != self.items:
            self.set_items(rows)

    def _listed(self, alert: Alert) -> tuple[tuple[str, ...], int]:
        width, height = self.size
        room = max(10, width - 3)
        most = min(MOST_LINES, max(1, height // max(1, len(self.alerts))))
        return listed(fmt.clean(alert.text), room, room - (CLOCK + 1 if self._with_clock() else 0), most)

    def _with_clock(self) -> bool:
        return self.size.width >= ROOM_FOR_CLOCK

    def on_resize(self) -> None:
        super().on_resize()
        self._wrap()

    def columns(self) -> Sequence[Column]:
        clock = [Column("time", "", CLOCK, right=True)] if self._with_clock() else []
        return [Column("mark", "", 1), Column("text", "", 10, grow=True), *clock]

    def identity(self, item: AlertRow) -> Hashable:
        alert, number, _ = item
        return (alert.code, alert.ranks, alert.t, number)

    def cells(self, item: AlertRow, columns: Sequence[Column]) -> Line:
        alert, number, text = item
        _, symbol, style = LOOK.get(alert.severity, LOOK["note"])
        if number:
            evidence = self._listed(alert)[1]
            return ((f"  {text}", style if number < evidence else theme.TEXT),)
        clock = time.strftime("%H:%M", time.localtime(alert.t)) if alert.t else ""
        cells = {
            "mark": (symbol, style),
            "text": (text, style),
            "time": (clock, theme.DIM),
        }
        return tuple(cells[column.key] for column in columns)

    def action_acknowledge(self) -> None:
        if self.selected is None:
            return
        chosen: Alert = self.selected[0]
        for entry in self.book.open():
            if (entry.alert.code, entry.alert.ranks, entry.since) == (chosen.code, chosen.ranks, chosen.t):
                entry.acknowledged = True
        self._list()

    def action_show_all(self) -> None:
        for entry in self.book.entries():
            entry.acknowledged = False
        self._list()


def _code_of(notice: str) -> str:
    """What stays equal in a notice whose figures change."""
    return re.sub(r"\d+", "#", notice)
