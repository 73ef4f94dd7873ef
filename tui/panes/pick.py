"""A list to pick one option from; typing filters it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen

from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line


class OptionList(Grid):
    """The options that match."""

    HEADER = False
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
    ]

    def columns(self) -> Sequence[Column]:
        return [Column("option", "", 10, grow=True)]

    def identity(self, item: str) -> Hashable:
        return item

    def cells(self, item: str, columns: Sequence[Column]) -> Line:
        return ((" " + fmt.clean(item), theme.TEXT),)


class PickScreen(ModalScreen[str | None]):
    """Every printable key narrows the list."""

    ALWAYS = "esc back"
    HELP = "Type to filter; backspace widens.\nenter  picks"
    BINDINGS: ClassVar = [Binding("escape", "close", "Back", show=False, priority=True)]

    def __init__(self, title: str, options: Sequence[str], value: str) -> None:
        super().__init__()
        self._title, self._options, self._value = title, tuple(options), value
        self._needle = ""

    def compose(self) -> ComposeResult:
        with Vertical(id="pick-box") as box:
            box.border_subtitle = "type to filter  enter pick  esc back"
            yield OptionList(id="options")

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.focus()
        self._filter()
        if self._value in self._options:
            self.call_after_refresh(setattr, options, "cursor", self._options.index(self._value))

    def _filter(self) -> None:
        wanted = self._needle.lower().split()
        found = [option for option in self._options if all(part in option.lower() for part in wanted)]
        self.query_one(OptionList).set_items(found)
        shown = f"  {self._needle}{theme.GLYPHS.cursor}" if self._needle else ""
        self.query_one("#pick-box").border_title = Content(f"{self._title} {len(found)}{shown}")

    def on_key(self, event: events.Key) -> None:
        char = event.character or ""
        if event.key == "backspace":
            self._needle = self._needle[:-1]
        elif char.isprintable() and char and event.key not in ("enter", "tab"):
            self._needle += char
        else:
            return
        event.stop()
        event.prevent_default()
        self._filter()

    @on(Grid.Selected)
    def _picked(self, event: Grid.Selected) -> None:
        event.stop()
        self.dismiss(event.item)

    def action_close(self) -> None:
        self.dismiss(None)
