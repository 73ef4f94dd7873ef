"""A line chart in braille dots: one or two bounded series and an optional planned level."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rich.style import Style
from textual.timer import Timer

from ftdash.tui import theme
from ftdash.tui.format import fit
from ftdash.tui.widgets.lines import Line, LineWidget

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
LABEL_WIDTH = 8  # at most
FEW = 8  # points by which a curve grows between two looks; more is a leap of a replay
GROWN_EVERY_S = 1.8  # a curve that only grew is drawn again this often: every line of it changes then
LATEST_S = 3.0  # and so much later where nobody shows it anything newer meanwhile


def resample(values: Sequence[float | None], columns: int) -> list[float | None]:
    """`values` as `columns` means of equal stretches; None where a stretch holds no finite value.

    Fewer values than columns are spread over all of them, on straight lines between neighbours, so that a
    young run fills its chart. A value beside a gap keeps its own place.
    """
    if not values or columns <= 0:
        return []
    if len(values) <= columns:
        known = [value if value is not None and math.isfinite(value) else None for value in values]
        return [_between(known, column, columns) for column in range(columns)]
    result: list[float | None] = []
    for column in range(columns):
        stretch = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in stretch if value is not None and math.isfinite(value)]
        result.append(sum(finite) / len(finite) if finite else None)
    return result


def _between(values: Sequence[float | None], column: int, columns: int) -> float | None:
    """What stands at `column` when `values` are spread over `columns`."""
    place = column * (len(values) - 1) / max(1, columns - 1)
    left = min(int(place), len(values) - 1)
    right = min(left + 1, len(values) - 1)
    before, after = values[left], values[right]
    if before is None or after is None:
        return values[round(place)]
    return before + (after - before) * (place - left)


def bounds(series: Iterable[Iterable[float | None]], plan: float | None) -> tuple[float, float] | None:
    """Lowest and highest finite value, the planned level included; None without any."""
    finite = [value for values in series for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    if plan is not None and math.isfinite(plan):
        finite.append(plan)
    low, high = min(finite), max(finite)
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = abs(high) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


class Canvas:
    """Dots in a field of character cells, each cell owned by the last series that touched it."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.dots = [[0] * width for _ in range(height)]
        self.owner = [[-1] * width for _ in range(height)]

    def set(self, x: int, y: int, owner: int) -> None:
        """Set the dot at (x, y), in dots, origin top left."""
        row, column = y >> 2, x >> 1
        self.dots[row][column] |= DOTS[y & 3][x & 1]
        self.owner[row][column] = owner

    def curve(self, values: Sequence[float | None], low: float, high: float, owner: int) -> None:
        """A curve, right-aligned, joined over neighbouring points."""
        rows = self.height * 4 - 1
        shift = self.width * 2 - len(values)
        previous: int | None = None
        for index, value in enumerate(values):
            if value is None:
                previous = None
                continue
            y = rows - round((value - low) / (high - low) * rows)
            start = y if previous is None else previous
            for dot in range(min(start, y), max(start, y) + 1):
                self.set(index + shift, dot, owner)
            previous = y

    def level(self, value: float, low: float, high: float, owner: int) -> None:
        """A dashed horizontal line, under what was drawn before."""
        rows = self.height * 4 - 1
        y = rows - round((value - low) / (high - low) * rows)
        for x in range(0, self.width * 2, 4):
            if self.owner[y >> 2][x >> 1] < 0:
                self.set(x, y, owner)

    def rows(self, styles: Sequence[Style], ascii_only: bool) -> list[Line]:
        """The field as lines; neighbouring cells of one series share a part."""
        lines: list[Line] = []
        for dots, owners in zip(self.dots, self.owner, strict=True):
            parts: list[tuple[str, Style]] = []
            text, current = "", -1
            for bits, owner in zip(dots, owners, strict=True):
                char = (
                    " "
                    if not bits
                    else (("*", "+", "-")[min(owner, 2)] if ascii_only else chr(0x2800 + bits))
                )
                if owner != current and bits and text:
                    parts.append((text, styles[max(current, 0)]))
                    text = ""
                if bits:
                    current = owner
                text += char
            parts.append((text, styles[max(current, 0)]))
            lines.append(tuple(parts))
        return lines


class BrailleChart(LineWidget):
    """The values over the whole width, the newest at the right edge; the planned level dashed."""

    HELP = "The newest value stands at the right; the dashed line is what the plan predicted."

    def __init__(
        self,
        title: str,
        fmt: Callable[[float | None], str],
        *,
        limit: int = 2000,
        style: Style = theme.ACCENT,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.title = title
        self.fmt = fmt
        self.style = style
        self.values: deque[float | None] = deque(maxlen=limit)
        self.other: deque[float | None] = deque(maxlen=limit)
        self.plan: float | None = None
        self._drawn_at = 0.0  # monotonic
        self._growing: Timer | None = None  # until the curve that grew is drawn
        self.border_title = title

    def show(
        self,
        values: Iterable[float | None],
        *,
        other: Iterable[float | None] = (),
        plan: float | None = None,
        caption: str = "",
    ) -> None:
        """Replace what is shown; `caption` stands beside the title.

        The caption is always of now, a curve that only grew may follow a moment later.
        """
        before = (self.values, self.other, self.plan)
        self.values = deque(values, self.values.maxlen)
        self.other = deque(other, self.other.maxlen)
        self.plan = plan
        title = f"{self.title}  {caption}" if caption else self.title
        self.retitle(title)
        waited_s = time.monotonic() - self._drawn_at
        if waited_s >= GROWN_EVERY_S or not self.display or not self._only_grew(*before):
            self.redraw()
        elif self._growing is None and (self.values, self.other) != before[:2]:
            self._growing = self.set_timer(LATEST_S - waited_s, self.redraw)

    def redraw(self) -> None:
        if self._growing is not None:
            self._growing.stop()
            self._growing = None
        self._drawn_at = time.monotonic()
        super().redraw()

    def _only_grew(
        self, values: Sequence[float | None], other: Sequence[float | None], plan: float | None
    ) -> bool:
        """Whether what is shown goes on from what was shown."""
        more = len(self.values) - len(values)
        return plan == self.plan and bool(other) == bool(self.other) and bool(values) and 0 <= more <= FEW

    def _label_width(self) -> int:
        limits = bounds((self.values, self.other), self.plan)
        return min(LABEL_WIDTH, max(len(self.fmt(limit)) for limit in limits)) if limits else LABEL_WIDTH

    def draw(self, width: int, height: int) -> list[Line]:
        label_width = self._label_width()
        field = width - label_width - 1
        if field < 4 or height < 1:
            return [((fit(self.fmt(self.values[-1] if self.values else None), width), theme.TEXT),)]
        first, second = resample(list(self.values), field * 2), resample(list(self.other), field * 2)
        limits = bounds((first, second), self.plan)
        if limits is None:
            return [(("waiting for the first step", theme.DIM),)]
        low, high = limits
        canvas = Canvas(field, height)
        canvas.curve(second, low, high, 1)
        canvas.curve(first, low, high, 0)
        if self.plan is not None and math.isfinite(self.plan):
            canvas.level(self.plan, low, high, 2)
        beside = theme.ACCENT if self.style is theme.VIOLET else theme.VIOLET
        rows = canvas.rows((self.style, beside, theme.DIM), theme.GLYPHS.ascii)
        labels = {0: self.fmt(high), height - 1: self.fmt(low)} if height > 1 else {0: self.fmt(first[-1])}
        return [
            (*row, (" " + fit(labels.get(index, ""), label_width, right=True), theme.DIM))
            for index, row in enumerate(rows)
        ]
