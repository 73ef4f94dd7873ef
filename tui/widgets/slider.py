"""A slider for numbers: keys, mouse wheel, click, drag, or typed digits; linear or logarithmic."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding

from ftdash.tui import theme
from ftdash.tui.format import fit
from ftdash.tui.messages import Changed
from ftdash.tui.widgets.control import Control
from ftdash.tui.widgets.lines import Line

LABEL_WIDTH = 13
VALUE_WIDTH = 9
_AMOUNT = re.compile(r"^([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([kmbtg]?)$")
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_amount(text: str) -> float | None:
    """A typed number: 16, 4,096, 8.2e9, 30.5b, 4k. None when it is none."""
    match = _AMOUNT.match(text.strip().lower().replace(",", "").replace("_", ""))
    return float(match[1]) * _SCALE[match[2]] if match else None


def geometric(low: float, high: float, per_decade: int, figures: int = 3) -> tuple[float, ...]:
    """Rounded values from `low` to `high`, `per_decade` in each factor of ten."""
    count = math.ceil(math.log10(high / low) * per_decade)
    values = {low, high}
    for index in range(count + 1):
        value = low * (high / low) ** (index / count)
        digits = figures - 1 - math.floor(math.log10(value))
        values.add(round(value, digits))
    return tuple(sorted(value for value in values if low <= value <= high))


class Slider(Control):
    """Arrows go from stop to stop; a typed value may lie between them, within the ends."""

    HELP = (
        "←→  to the next stop; with shift faster, PgUp and PgDn a quarter, Home and End to the ends\n"
        "0-9  types a value (8.2e9, 30.5b, 4k): enter sets it, esc forgets it\n"
        "mouse  click, drag, or turn the wheel"
    )
    HINTS = "←→ move  ⇧ faster  0-9 type"

    BINDINGS: ClassVar = [
        Binding("left", "step(-1)", "Less", show=False),
        Binding("right", "step(1)", "More", show=False),
        Binding("shift+left", "step(-5)", "Much less", show=False),
        Binding("shift+right", "step(5)", "Much more", show=False),
        Binding("pagedown", "quarter(-1)", "A quarter less", show=False),
        Binding("pageup", "quarter(1)", "A quarter more", show=False),
        Binding("home", "end(0)", "Least", show=False),
        Binding("end", "end(1)", "Most", show=False),
    ]

    def __init__(
        self,
        name: str,
        label: str,
        stops: Sequence[float],
        value: float,
        *,
        fmt: Callable[[float], str],
        log: bool = False,
        whole: bool = True,
    ) -> None:
        super().__init__(name=name, id=f"in-{name.replace('_', '-')}", classes="control")
        self.label = label
        self.stops = tuple(stops)
        self.fmt = fmt
        self.logarithmic = log
        self.whole = whole
        self.value = value
        self.typed = ""
        self._track = (LABEL_WIDTH, 10)

    @property
    def low(self) -> float:
        return self.stops[0]

    @property
    def high(self) -> float:
        return self.stops[-1]

    def set_value(self, value: float, *, tell: bool = True) -> None:
        """Move to `value`, kept within the ends; `tell` posts Changed when it is another one."""
        if self.whole:
            value = float(round(value))
        value = max(self.low, min(self.high, value))
        if value == self.value:
            return
        self.value = value
        self.redraw()
        if tell:
            self.post_message(Changed(self, self.name or "", value))

    def share(self) -> float:
        """Where the knob stands, 0 to 1."""
        low, high, value = self.low, self.high, max(self.low, min(self.high, self.value))
        if high == low:
            return 0.0
        if self.logarithmic:
            return self._log(value) / self._log(high)
        return (value - low) / (high - low)

    def _log(self, value: float) -> float:
        """Distance from the low end on a logarithmic track, which may begin at 0."""
        return math.log(value / self.low) if self.low else math.log1p(value)

    def at(self, share: float) -> float:
        """The stop nearest to a place on the track."""
        share = max(0.0, min(1.0, share))
        low, high = self.low, self.high
        if self.logarithmic:
            wanted = share * self._log(high)
            return min(self.stops, key=lambda stop: abs(self._log(stop) - wanted))
        wanted = low + (high - low) * share
        return min(self.stops, key=lambda stop: abs(stop - wanted))

    def draw(self, width: int, height: int) -> list[Line]:
        glyphs = theme.GLYPHS
        label_width = min(LABEL_WIDTH, max(6, width * 2 // 5))
        track = max(3, width - label_width - VALUE_WIDTH)
        self._track = (label_width, track)
        knob = round(self.share() * (track - 1))
        focus = self.has_focus
        value = f"{self.typed}{glyphs.cursor}" if self.typed else self.fmt(self.value)
        return [
            (
                (
                    fit(f"{glyphs.pointer if focus else ' '}{self.label}", label_width),
                    theme.BOLD if focus else theme.DIM,
                ),
                (glyphs.track_done * knob, theme.ACCENT if focus else theme.DIM),
                (glyphs.knob, theme.ACCENT_BOLD if focus else theme.TEXT),
                (glyphs.track * (track - 1 - knob), theme.FAINT),
                (fit(value, VALUE_WIDTH, right=True), theme.WARN if self.typed else theme.BOLD),
            )
        ]

    def action_step(self, by: int) -> None:
        if by > 0:
            index = min(len(self.stops) - 1, bisect_right(self.stops, self.value) + by - 1)
        else:
            index = max(0, bisect_left(self.stops, self.value) + by)
        self.set_value(self.stops[index])

    def action_quarter(self, direction: int) -> None:
        moved = self.at(self.share() + direction / 4)
        self.set_value(moved)

    def action_end(self, end: int) -> None:
        self.set_value(self.high if end else self.low)

    def on_key(self, event: events.Key) -> None:
        char = event.character or ""
        if self.typed:
            if event.key == "enter":
                event.stop()
                self._set_typed()
                return
            if event.key == "escape":
                event.stop()
                self.typed = ""
                self.redraw()
                return
            if event.key == "backspace":
                event.stop()
                self.typed = self.typed[:-1]
                self.redraw()
                return
        if char and (char.isdigit() or char == "." or (self.typed and char.lower() in "ekmbtg+-,")):
            event.stop()
            event.prevent_default()
            self.typed = (self.typed + char)[: VALUE_WIDTH - 1]
            self.redraw()

    def _set_typed(self) -> None:
        amount, typed = parse_amount(self.typed), self.typed
        self.typed = ""
        self.redraw()
        if amount is None or not math.isfinite(amount):
            self.app.notify(f"{self.label}: {typed} is no number", severity="warning", markup=False)
        elif not self.low <= amount <= self.high:
            ends = f"{self.fmt(self.low)} to {self.fmt(self.high)}"
            self.app.notify(f"{self.label}: {typed} is outside {ends}", severity="warning", markup=False)
        else:
            self.set_value(amount)

    def on_blur(self) -> None:
        self.typed = ""  # Control draws it after this: Textual calls the handlers of all base classes

    def _to(self, x: int) -> None:
        left, track = self._track
        self.set_value(self.at((x - left) / max(1, track - 1)))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        left, track = self._track
        if left <= event.x < left + track:
            self.capture_mouse()
            self._to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self.app.mouse_captured is self:
            self._to(event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if self.has_focus:
            event.stop()
            self.action_step(1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if self.has_focus:
            event.stop()
            self.action_step(-1)
