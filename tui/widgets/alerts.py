"""The alerts of a run: worst and newest first, each acknowledged by a key."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

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


class AlertList(Grid):
    """Open alerts; `a` acknowledges one, `A` shows the acknowledged again."""

    HELP = "✗ error, ▲ warning, · note. a acknowledges the alert under the cursor, A shows all again."
    HINTS = "↑↓ alert  a acknowledge  A show all"
    HEADER = False

    BINDINGS: ClassVar = [
        Binding("a", "acknowledge", "Acknowledge", show=False),
        Binding("A", "show_all", "Show all", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.alerts: tuple[Alert, ...] = ()
        self.notices: tuple[str, ...] = ()
        self.acknowledged: set[Hashable] = set()
        self.border_title = "Alerts"

    def show(self, alerts: Sequence[Alert], notices: Sequence[str] = ()) -> None:
        """Alerts of the run, then what the reader skipped, as notes."""
        self.alerts, self.notices = tuple(alerts), tuple(notices)
        everything = [*self.alerts, *(Alert("notice", "note", text) for text in self.notices)]
        open_alerts = [alert for alert in everything if self.identity(alert) not in self.acknowledged]
        open_alerts.sort(key=lambda alert: (LOOK.get(alert.severity, LOOK["note"])[0], -alert.t))
        title = f"Alerts {len(open_alerts)}" if open_alerts else f"Alerts {theme.GLYPHS.fits} none"
        if hidden := len(everything) - len(open_alerts):
            title += f" · {hidden} acknowledged"
        if title != self.border_title:
            self.border_title = title
        self.set_items(open_alerts)

    def columns(self) -> Sequence[Column]:
        return [
            Column("mark", "", 1),
            Column("text", "", 10, grow=True),
            Column("time", "", 5, right=True, drop=1),
        ]

    def identity(self, item: Alert) -> Hashable:
        return (item.code, item.ranks, item.text if not item.t else item.t)

    def cells(self, item: Alert, columns: Sequence[Column]) -> Line:
        _, symbol, style = LOOK.get(item.severity, LOOK["note"])
        clock = time.strftime("%H:%M", time.localtime(item.t)) if item.t else ""
        cells = {"mark": (symbol, style), "text": (fmt.clean(item.text), style), "time": (clock, theme.DIM)}
        return tuple(cells[column.key] for column in columns)

    def action_acknowledge(self) -> None:
        if self.selected is not None:
            self.acknowledged.add(self.identity(self.selected))
            self.show(self.alerts, self.notices)

    def action_show_all(self) -> None:
        self.acknowledged.clear()
        self.show(self.alerts, self.notices)
