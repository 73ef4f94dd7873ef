"""A text input on one line: enter asks for it at the bottom of the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual.binding import Binding

from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.messages import Changed
from ftdash.tui.widgets.control import Control
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.slider import LABEL_WIDTH

if TYPE_CHECKING:
    from ftdash.tui.cockpit import Cockpit


class TextField(Control):
    """Label and value; an empty value shows what happens without one."""

    HELP = "enter  types a new value; an empty one goes back to the default"
    HINTS = "enter type"

    BINDINGS: ClassVar = [
        Binding("enter,space", "edit", "Edit", show=False),
    ]

    def __init__(self, name: str, label: str, value: str = "", *, empty: str = "") -> None:
        super().__init__(name=name, id=f"in-{name.replace('_', '-')}", classes="control")
        self.label, self.value, self.empty = label, value, empty

    def set_value(self, value: str, *, tell: bool = True) -> None:
        if value == self.value:
            return
        self.value = value
        self.redraw()
        if tell:
            self.post_message(Changed(self, self.name or "", value))

    def draw(self, width: int, height: int) -> list[Line]:
        focus = self.has_focus
        pointer = theme.GLYPHS.pointer if focus else " "
        shown = fmt.clean(self.value) or self.empty
        style = theme.BOLD if self.value else theme.DIM
        return [
            (
                (fmt.fit(pointer + self.label, LABEL_WIDTH), theme.BOLD if focus else theme.DIM),
                (
                    fmt.fit(shown, max(1, width - LABEL_WIDTH)),
                    theme.ACCENT_BOLD if focus and self.value else style,
                ),
            )
        ]

    def action_edit(self) -> None:
        cast("Cockpit", self.app).ask(self.label, self.value, lambda text: self.set_value(text.strip()))

    def on_click(self) -> None:
        self.action_edit()
