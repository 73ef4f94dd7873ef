"""The help screen: what the focused widget, its pane and the whole program answer to.

A help text is lines of `keys  words` (two blanks between), set as two columns, and lines of prose. No line
is broken by hand: the window breaks them where it is narrow.
"""

from __future__ import annotations

from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from ftdash.tui import theme
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.overlay import Overlay

EVERYWHERE = (
    "1 2 3 4  change the pane; F1 to F4 do so while you type\n"
    "tab  to the next part, shift+tab to the one before\n"
    "/  filters or searches what has the focus\n"
    "R  chooses the run to watch\n"
    "ctrl+p  opens the command palette\n"
    "?  shows this; F5 does so while you type\n"
    "esc  goes back\n"
    "ctrl+z  to the background; fg brings it back\n"
    "q  leaves; runs go on"
)


def entries(text: str) -> list[tuple[str, str]]:
    """(keys, words) of each line of a help text; keys are empty for prose."""
    parted = [line.partition("  ") for line in text.strip().split("\n")]
    return [(keys, words.strip()) if words else ("", keys) for keys, _, words in parted]


def help_text(sections: list[tuple[str, str]]) -> RenderableType:
    """Titles and their texts; the keys of all sections share one column."""
    keys_width = max((len(keys) for _, text in sections for keys, _ in entries(text)), default=0)
    parts: list[RenderableType] = []
    for title, text in sections:
        if parts:
            parts.append(Text())
        parts.append(Text(title, theme.ACCENT_BOLD))
        for keys, words in entries(text):
            if not keys:
                parts.append(Text(words, theme.TEXT))
                continue
            row = Table.grid(padding=(0, 2))
            row.add_column(width=keys_width, no_wrap=True)
            row.add_column(ratio=1)
            row.add_row(Text(keys, theme.BOLD), Text(words, theme.TEXT))
            parts.append(row)
    return Group(*parts)


def widget_help(widget: Widget | None) -> tuple[str, str]:
    """Name and help text of the focused widget, or of the closest one around it that has a text."""
    for candidate in [widget, *widget.ancestors] if widget is not None else []:
        if isinstance(candidate, Pane | Screen):
            break
        text = getattr(candidate, "HELP", "")
        if isinstance(text, str) and text and isinstance(candidate, Widget):
            name = getattr(candidate, "label", "") or candidate.border_title or type(candidate).__name__
            return str(name).split("  ")[0], text
    return "", ""


class HelpScreen(Overlay[None]):
    """The keys that open and close things close it."""

    ALWAYS = "esc back"
    BINDINGS: ClassVar = [Binding("escape,q,question_mark,enter,space", "dismiss", "Back", show=False)]

    def __init__(self, focused: Widget | None, pane: Pane | None, below: Screen) -> None:
        super().__init__()
        self._sections: list[tuple[str, str]] = []
        name, text = widget_help(focused)
        if text:
            self._sections.append((f"Here: {name}", text))
        if isinstance(below, ModalScreen):
            if window := getattr(below, "HELP", ""):
                self._sections.append(("This window", window))
        elif pane is not None and pane.HELP:
            self._sections.append((f"The {pane.TITLE} pane", pane.HELP))
        self._sections.append(("Everywhere", EVERYWHERE))

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as box:
            box.border_title = "Help"
            box.border_subtitle = Content("↑↓ scroll  esc back")
            yield Static(help_text(self._sections))

    def on_mount(self) -> None:
        self.query_one("#help").focus()
