"""Widgets that are drawn line by line: only lines that really changed are painted again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

Part = tuple[str, Style]
Line = tuple[Part, ...]


def to_strip(line: Sequence[Part], width: int, base: Style) -> Strip:
    """A line as exactly `width` cells on the widget's own background.

    `base` is the widget's `visual_style.rich_style`, which is remembered until a style changes: `rich_style`
    alone asks every ancestor again, for each line.
    """
    strip = Strip([Segment(text, style) for text, style in line if text])
    return strip.adjust_cell_length(width).apply_style(base)


def plain(lines: Sequence[Sequence[Part]]) -> str:
    """The text of drawn lines, without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


class PlainTitles:
    """Mixed into a widget whose border titles may hold foreign text: they are never read as markup."""

    def render_str(self, text_content: str | Content) -> Content:
        return text_content if isinstance(text_content, Content) else Content(text_content)


class LineWidget(PlainTitles, Widget):
    """Draws `draw(width, height)`; after a change call `redraw`, which repaints changed lines only.

    `HELP` is what the help screen says of the widget, `HINTS` its part of the footer.
    """

    HELP = ""
    HINTS = ""

    def __init__(self, *, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._lines: list[Line] = []
        self._drawn_for: tuple[int, int] | None = None

    def draw(self, width: int, height: int) -> list[Line]:
        """The lines to show in a content area of `width` by `height` cells."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw again and repaint what differs; nothing while the widget has no place on the screen."""
        if not self.is_mounted or not self.size.width or not self.size.height:
            self._drawn_for = None  # it may come back in its old size
            return
        old, size = self._lines, self._drawn_for
        self._compute()
        if size != self._drawn_for:
            self.refresh()
            return
        for y in range(max(len(old), len(self._lines))):
            if (old[y] if y < len(old) else ()) != (self._lines[y] if y < len(self._lines) else ()):
                self.refresh(Region(0, y, self.size.width, 1))

    def _compute(self) -> None:
        width, height = self.size
        self._lines = self.draw(width, height)[:height] if width and height else []
        self._drawn_for = (width, height)

    def render_line(self, y: int) -> Strip:
        if self._drawn_for != (self.size.width, self.size.height):
            self._compute()
        line = self._lines[y] if y < len(self._lines) else ()
        return to_strip(line, self.size.width, self.visual_style.rich_style)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn_for = None
