"""One alert whole: what was found, where and since when, and what to do about it."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ftdash.monitor.state import Alert
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.alerts import LOOK


def alert_text(alert: Alert) -> Text:
    """Evidence and advice in a paragraph each; the text may be anybody's and is never read as markup."""
    _, symbol, style = LOOK.get(alert.severity, LOOK["note"])
    found, *advice = fmt.clean(alert.text).split("; ")
    text = Text(f"{symbol} {found}\n", style)
    for part in advice:
        text.append(f"\n{part}\n", theme.TEXT)
    facts = [alert.code, alert.severity]
    if alert.ranks:
        facts.append(f"rank{'s' if len(alert.ranks) > 1 else ''} {fmt.ranks(alert.ranks)}")
    if alert.t:
        facts.append(f"since {time.strftime('%H:%M:%S', time.localtime(alert.t))}")
    text.append(f"\n{f' {theme.GLYPHS.dot} '.join(facts)}", theme.DIM)
    return text


class AlertScreen(Overlay[None]):
    """Closed by the keys that opened it."""

    HELP = "The whole alert: what was found, what to do, which ranks, since when."
    BINDINGS: ClassVar = [Binding("escape,q,enter,space", "dismiss", "Back", show=False)]

    def __init__(self, alert: Alert) -> None:
        super().__init__()
        self._alert = alert

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as box:
            box.border_title = "Alert"
            box.border_subtitle = Content("esc back")
            yield Static(alert_text(self._alert))

    def on_mount(self) -> None:
        self.query_one("#help").focus()
