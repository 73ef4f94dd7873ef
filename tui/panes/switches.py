"""The debug switches of NCCL and torch.distributed above the Launch pane, each with its price."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.geometry import Size

from ftdash.engine.configs.debug_switches import SWITCHES, Switch, environment
from ftdash.engine.configs.types import ConfigError
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line, LineWidget


class SwitchList(Grid):
    """One line a switch: whether it is on, what it does."""

    HELP = "Each is a change from the library's own default.\nenter  turns it on or off; so does space"
    HINTS = "↑↓ switch  enter on or off"
    HEADER = False

    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__(id="switches")
        self.chosen = set(chosen)

    def on_mount(self) -> None:
        self.set_items(SWITCHES)

    def columns(self) -> Sequence[Column]:
        return [Column("on", "", 3), Column("name", "", 18), Column("what", "", 20, grow=True)]

    def identity(self, item: Switch) -> Hashable:
        return item.name

    def cells(self, item: Switch, columns: Sequence[Column]) -> Line:
        on = item.name in self.chosen
        style = theme.WARN if on else theme.TEXT
        return (("[x]" if on else "[ ]", style), (item.name, style), (item.what, theme.DIM))

    def toggle(self) -> None:
        """Turn the switch under the cursor on or off. Raises ConfigError for two that contradict."""
        if self.selected is None:
            return
        wanted = self.chosen ^ {self.selected.name}
        environment(sorted(wanted))
        self.chosen = wanted
        self.invalidate()


class SwitchFacts(LineWidget):
    """What the switch under the cursor does, its variables, default and price."""

    def __init__(self) -> None:
        super().__init__(id="switch-facts")
        self.switch: Switch | None = None

    def show(self, switch: Switch | None) -> None:
        self.switch = switch
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return fact_lines(self.switch, width) if self.switch is not None else []

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The same for all switches, so that the list above stands still."""
        return max(len(fact_lines(switch, width)) for switch in SWITCHES)


def fact_lines(switch: Switch, width: int) -> list[Line]:
    """The four facts of a switch, wrapped."""
    facts = [
        ("does", switch.what, theme.TEXT),
        ("sets", switch.assignment, theme.TEXT),
        ("default", switch.default, theme.TEXT),
        ("price", switch.price, theme.WARN),
    ]
    return [
        ((f" {'' if index else name:<9}", theme.DIM), (line, style))
        for name, text, style in facts
        for index, line in enumerate(textwrap.wrap(text, max(20, width - 11)) or [""])
    ]


class SwitchesScreen(Overlay[tuple[str, ...]]):
    """Answers with the names of the switches that are on."""

    HELP = "What is on when you go back is set for the next start."
    BINDINGS: ClassVar = [
        Binding("escape,q,w", "close", "Back", show=False),
        Binding("space", "switch", "On or off", show=False),
    ]

    def __init__(self, chosen: tuple[str, ...]) -> None:
        super().__init__()
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Container(id="runs-box") as box:
            box.border_title = "Debug switches"
            box.border_subtitle = "enter on or off  esc back"
            yield SwitchList(self._chosen)
            yield SwitchFacts()

    def on_mount(self) -> None:
        self.query_one(SwitchList).focus()
        self.call_after_refresh(self._follow)

    @on(Grid.Moved)
    def _follow(self) -> None:
        self.query_one(SwitchFacts).show(self.query_one(SwitchList).selected)

    @on(Grid.Selected, "#switches")
    def action_switch(self) -> None:
        try:
            self.query_one(SwitchList).toggle()
        except ConfigError as error:
            self.app.notify(fmt.clean(str(error)), severity="warning", markup=False)

    def action_close(self) -> None:
        on_now = self.query_one(SwitchList).chosen
        self.dismiss(tuple(switch.name for switch in SWITCHES if switch.name in on_now))
