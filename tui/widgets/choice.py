"""Choices: a few options side by side, or one of many from a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding

from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.messages import Changed
from ftdash.tui.widgets.control import Control
from ftdash.tui.widgets.lines import Line, Part
from ftdash.tui.widgets.slider import LABEL_WIDTH


class Choice(Control):
    """A few options on one line; the chosen one stands in brackets."""

    HELP = "←→  choose; Home and End the first and the last\nmouse  click"
    HINTS = "←→ choose"

    BINDINGS: ClassVar = [
        Binding("left", "step(-1)", "Previous", show=False),
        Binding("right,space", "step(1)", "Next", show=False),
        Binding("home", "edge(0)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
    ]

    def __init__(self, name: str, label: str, options: Sequence[tuple[str, str]], value: str) -> None:
        """`options` are (key, shown text)."""
        super().__init__(name=name, id=f"in-{name.replace('_', '-')}", classes="control")
        self.label = label
        self.options = tuple(options)
        self.value = value
        self._spans: list[tuple[int, int, int]] = []  # (left, right, option) of what is drawn

    @property
    def index(self) -> int:
        return next((i for i, (key, _) in enumerate(self.options) if key == self.value), 0)

    def set_value(self, value: str, *, tell: bool = True) -> None:
        if value == self.value or value not in {key for key, _ in self.options}:
            return
        self.value = value
        self.redraw()
        if tell:
            self.post_message(Changed(self, self.name or "", value))

    def draw(self, width: int, height: int) -> list[Line]:
        label_width = min(LABEL_WIDTH, max(6, width * 2 // 5))
        focus = self.has_focus
        pointer = theme.GLYPHS.pointer if focus else " "
        parts: list[Part] = [(fmt.fit(pointer + self.label, label_width), theme.BOLD if focus else theme.DIM)]
        x = label_width
        self._spans = []
        for index, text in self._words(width - label_width):
            chosen = index == self.index
            parts.append((text, (theme.ACCENT_BOLD if focus else theme.BOLD) if chosen else theme.DIM))
            self._spans.append((x, x + len(text), index))
            x += len(text)
        if self._spans and self._spans[-1][2] < len(self.options) - 1 and x < width:
            parts.append((theme.GLYPHS.ellipsis, theme.DIM))
        return [tuple(parts)]

    def _words(self, room: int) -> list[tuple[int, str]]:
        """(option, text) from left to right: all of them where they fit, closer together if they must be;
        else as many as there is room for, the chosen one among them."""
        texts = [
            f"[{text}]" if index == self.index else f" {text} "
            for index, (_, text) in enumerate(self.options)
        ]
        if sum(map(len, texts)) > room:
            texts = [" " * (index > 0) + text.strip() for index, text in enumerate(texts)]
        first, used = 0, sum(map(len, texts[: self.index + 1]))
        while first < self.index and used > room:
            used -= len(texts[first])
            first += 1
        last = self.index
        while last + 1 < len(texts) and used + len(texts[last + 1]) <= room:
            last += 1
            used += len(texts[last])
        return [(index, texts[index]) for index in range(first, last + 1)]

    def action_step(self, by: int) -> None:
        self.set_value(self.options[max(0, min(len(self.options) - 1, self.index + by))][0])

    def action_edge(self, end: int) -> None:
        self.set_value(self.options[-1 if end else 0][0])

    def on_click(self, event: events.Click) -> None:
        for left, right, index in self._spans:
            if left <= event.x < right:
                self.set_value(self.options[index][0])


class Picker(Control):
    """One of many: arrows step through them, enter opens a list with a filter."""

    HELP = "←→  step through the options\nenter  opens the list, where typing filters"
    HINTS = "←→ next  enter list"

    BINDINGS: ClassVar = [
        Binding("left", "step(-1)", "Previous", show=False),
        Binding("right", "step(1)", "Next", show=False),
        Binding("enter,space", "open", "List", show=False),
    ]

    def __init__(self, name: str, label: str, options: Sequence[str], value: str) -> None:
        super().__init__(name=name, id=f"in-{name.replace('_', '-')}", classes="control")
        self.label = label
        self.options = tuple(options)
        self.value = value

    def set_value(self, value: str, *, tell: bool = True) -> None:
        if value == self.value:
            return
        self.value = value
        self.redraw()
        if tell:
            self.post_message(Changed(self, self.name or "", value))

    def draw(self, width: int, height: int) -> list[Line]:
        label_width = min(LABEL_WIDTH, max(6, width * 2 // 5))
        focus = self.has_focus
        pointer = theme.GLYPHS.pointer if focus else " "
        return [
            (
                (fmt.fit(pointer + self.label, label_width), theme.BOLD if focus else theme.DIM),
                (
                    fmt.fit(fmt.clean(self.value), max(1, width - label_width - 2)),
                    theme.ACCENT_BOLD if focus else theme.BOLD,
                ),
                (f" {theme.GLYPHS.open}", theme.ACCENT if focus else theme.DIM),
            )
        ]

    def action_step(self, by: int) -> None:
        index = self.options.index(self.value) if self.value in self.options else -by
        self.set_value(self.options[(index + by) % len(self.options)])

    def action_open(self) -> None:
        from ftdash.tui.panes.pick import PickScreen

        def chosen(value: str | None) -> None:
            if value is not None:
                self.set_value(value)

        self.app.push_screen(PickScreen(self.label, self.options, self.value), chosen)

    def on_click(self) -> None:
        self.action_open()
