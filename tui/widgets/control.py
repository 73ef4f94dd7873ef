"""What every input on a line shares: it takes the focus, shows it, and hands it up and down."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding

from ftdash.tui.widgets.lines import LineWidget


class Control(LineWidget, can_focus=True):
    """Up and down go to the inputs beside it; it is drawn again as the focus comes and goes."""

    BINDINGS: ClassVar = [
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
    ]

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()
