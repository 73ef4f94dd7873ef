"""Widgets that are drawn line by line: only lines that really changed are painted again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Self

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.containers import Container
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

# Textual takes a class's default style from its first base that is a widget: what is mixed in is none.
if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object

Part = tuple[str, Style]
Line = tuple[Part, ...]


def to_strip(line: Sequence[Part], width: int, base: Style) -> Strip:
    """A line as exactly `width` cells on the widget's own background, its segments made only once.

    `base` is the widget's `visual_style.rich_style`, which is remembered until a style changes: `rich_style`
    alone asks every ancestor again, for each line.
    """
    segments = [Segment(text, base + style) for text, style in line if text]
    cells = sum([cell_len(text) for text, _ in line])
    if cells > width:
        return Strip(segments, cells).adjust_cell_length(width)
    if cells < width:
        segments.append(Segment(" " * (width - cells), base))
    return Strip(segments, width)


def plain(lines: Sequence[Sequence[Part]]) -> str:
    """The text of drawn lines, without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


class KeptLines(_Widget):
    """Mixed into a widget: while nothing in it changed, its lines serve again as they were painted last.

    When one line of the screen changes, Textual asks every widget on it for all of its lines, and makes
    borders, padding and filters ready for them: with a dozen widgets that is 3 ms of processor time.
    """

    _kept: tuple[Region, Size, list[Strip]] | None = None

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        self._kept = None
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def notify_style_update(self) -> None:
        self._kept = None
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        if self._kept is None or self._kept[:2] != (crop, self.outer_size):
            self._kept = (crop, self.outer_size, super().render_lines(crop))
        return self._kept[2]


class Box(KeptLines, Container):
    """A container that is not drawn again for every line that changes in it."""


class FramedLines(KeptLines):
    """Mixed into a widget with a border: its title may hold foreign text, and changes by itself."""

    _title = ""
    _only_title = False

    def render_str(self, text_content: str | Content) -> Content:
        """Titles are never read as markup."""
        return text_content if isinstance(text_content, Content) else Content(text_content)

    def retitle(self, title: str) -> None:
        """Set the border's title and paint its line alone: Textual paints the whole widget again."""
        if title != self._title:
            self._title, self._only_title = title, True
            try:
                self.border_title = title
            finally:
                self._only_title = False

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        if self._only_title:  # regions count from where the content begins
            regions = (Region(0, 0, self.outer_size.width, 1).translate(-self.content_offset),)
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class LineWidget(FramedLines, Widget):
    """Draws `draw(width, height)`; after a change call `redraw`, which repaints changed lines only.

    `HELP` is what the help screen says of the widget, `HINTS` its part of the footer.
    """

    HELP = ""
    HINTS = ""

    def __init__(self, *, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._lines: list[Line] = []
        self._drawn_for: Size | None = None

    def draw(self, width: int, height: int) -> list[Line]:
        """The lines to show in a content area of `width` by `height` cells."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw again and repaint what differs; nothing while the widget has no place on the screen."""
        room = self.size if self.is_mounted else Size()
        if not room:
            self._drawn_for = self._kept = None  # it may come back in its old size
            return
        old, drawn_for = self._lines, self._drawn_for
        self._compute(room)
        if drawn_for != room:
            self.refresh()
            return
        changed = [
            Region(0, y, room.width, 1)
            for y, (before, after) in enumerate(zip_longest(old, self._lines, fillvalue=()))
            if before != after
        ]
        if changed:
            self.refresh(*changed)

    def _compute(self, room: Size) -> None:
        self._lines = self.draw(*room)[: room.height] if room else []
        self._drawn_for = room

    def render_line(self, y: int) -> Strip:
        room = self.size
        if self._drawn_for != room:
            self._compute(room)
        line = self._lines[y] if y < len(self._lines) else ()
        return to_strip(line, room.width, self.visual_style.rich_style)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn_for = None
