"""A one-line question at the bottom of the screen: filter, search, file names, typed confirmations."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input, Static


class Prompt(Horizontal):
    """Enter submits, esc leaves; `on_change` follows every key press."""

    HELP = "enter  takes what you typed\nesc  leaves and changes nothing"
    HINTS = "enter take it  esc leave"
    ALWAYS = "F1-F4 panes  F5 help"  # letters and digits are text here
    BINDINGS: ClassVar = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(
        self,
        label: str,
        value: str,
        on_submit: Callable[[str], None],
        on_change: Callable[[str], None] | None,
        back_to: Widget | None,
    ) -> None:
        super().__init__(classes="prompt")
        self.label, self._before = label, value
        self._on_submit, self._on_change = on_submit, on_change
        self._back_to = back_to

    def compose(self) -> ComposeResult:
        yield Static(Content(self.label + " "), classes="prompt-label")
        yield Input(self._before, select_on_focus=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._on_change is not None and event.value != self._before:
            self._on_change(event.value)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close()
        self._on_submit(event.value)

    def action_leave(self) -> None:
        if self._on_change is not None:
            self._on_change(self._before)
        self._close()

    def _close(self) -> None:
        self.remove()
        if self._back_to is not None and self._back_to.is_mounted:
            self._back_to.focus()
