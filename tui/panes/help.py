"""The help screen: what the focused widget, its pane and the whole program answer to."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from ftdash.tui import theme
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.overlay import Overlay

EVERYWHERE = (
    "1 2 3 4 (or F1 to F4 while typing) change the pane, tab moves to the next part,\n"
    "/ filters or searches, R chooses a run, ctrl+p opens the command palette,\n"
    "? shows this, esc goes back, q leaves. Runs go on when the screen is closed."
)


def widget_help(widget: Widget | None) -> str:
    """The help text beside the focused widget's code, "" where it has none."""
    for candidate in [widget, *widget.ancestors] if widget is not None else []:
        if isinstance(candidate, Pane | Screen):
            return ""
        text = getattr(candidate, "HELP", "")
        if isinstance(text, str) and text:
            return text
    return ""


class HelpScreen(Overlay[None]):
    """Any key closes it."""

    BINDINGS: ClassVar = [Binding("escape,q,question_mark,enter,space", "dismiss", "Back", show=False)]

    def __init__(self, focused: Widget | None, pane: Pane | None, below: Screen) -> None:
        super().__init__()
        self._sections: list[tuple[str, str]] = []
        if here := widget_help(focused):
            title = str(focused.border_title or type(focused).__name__) if focused is not None else ""
            self._sections.append((f"Here: {title.split('  ')[0]}", here))
        if isinstance(below, ModalScreen):
            self._sections.append(("This window", getattr(below, "HELP", "") or ""))
        elif pane is not None and pane.HELP:
            self._sections.append((f"The {pane.TITLE} pane", pane.HELP))
        self._sections.append(("Everywhere", EVERYWHERE))

    def compose(self) -> ComposeResult:
        text = Text()
        for title, body in self._sections:
            text.append(f"\n{title}\n", theme.ACCENT_BOLD)
            text.append(body.strip() + "\n", theme.TEXT)
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            yield Static(text)
