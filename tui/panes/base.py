"""What every pane is: a part of the body that is shown or hidden, and knows its help and hints."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from ftdash.tui.widgets.lines import Box

if TYPE_CHECKING:
    from textual.widget import Widget

    from ftdash.monitor.state import RunState
    from ftdash.tui.cockpit import Cockpit

NARROW = 100  # columns below which a pane stacks its parts
SLIM = 70  # columns below which it does not put two inputs beside each other
SHORT = 32  # rows below which a pane leaves its less important parts out


class Pane(Box):
    """A pane gets the run's state only while it is on the screen."""

    TITLE: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    HINTS: ClassVar[str] = ""

    @property
    def cockpit(self) -> Cockpit:
        return cast("Cockpit", self.app)

    def lay_out_for(self, width: int, height: int) -> None:
        """Choose the layout for a place of `width` by `height` cells: before the first paint, too."""
        self.set_class(width < NARROW, "-narrow")
        self.set_class(width < SLIM, "-slim")
        self.set_class(height < SHORT, "-short")

    def on_resize(self) -> None:
        self.lay_out_for(*self.size)
        self.fitted()

    def fitted(self) -> None:
        """Called after the pane's size classes were set."""

    def show_run(self, state: RunState | None, trouble: str) -> None:
        """The watched run has a newer state; `trouble` is one line when its directory cannot be read."""

    def first_focus(self) -> Widget | None:
        """What takes the focus when the pane is entered by its key."""
        return None

    def needle_target(self) -> Widget | None:
        """The widget that `/` filters or searches: one with `set_needle(text)`."""
        return None
