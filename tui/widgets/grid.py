"""A table for a thousand rows: it formats only what is visible and repaints only lines that changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ftdash.tui import theme
from ftdash.tui.format import fit
from ftdash.tui.widgets.lines import FramedLines, Line, to_strip


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `drop` orders which columns give way when the table is narrow (0: never)."""

    key: str
    title: str
    width: int
    right: bool = False
    drop: int = 0
    grow: bool = False  # takes the width that is left over


def fit_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width` cells, with the growing one widened to fill it."""
    chosen = list(columns)
    while sum(column.width + 1 for column in chosen) > width:
        candidates = [column for column in chosen if column.drop]
        if not candidates:
            break
        chosen.remove(max(candidates, key=lambda column: column.drop))
    spare = width - sum(column.width + 1 for column in chosen)
    if spare <= 0:
        return chosen
    return [Column(c.key, c.title, c.width + spare, c.right, c.drop, c.grow) if c.grow else c for c in chosen]


class Grid(FramedLines, ScrollView, can_focus=True):
    """Rows of cells under a fixed header. Subclasses say the columns and the cells of an item."""

    DEFAULT_CSS = "Grid { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    HELP = "↑↓  move; PgUp and PgDn by a page, Home and End to the ends\nenter  opens the line"
    HINTS = "↑↓ move  enter open"
    HEADER = True
    empty = ""  # said in the place of the header while there is no row

    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "edge(0)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("enter", "select", "Open", show=False),
    ]

    cursor: reactive[int] = reactive(0, init=False)

    class Selected(Message):
        """Enter or a second click on a row."""

        def __init__(self, grid: Grid, item: Any) -> None:
            super().__init__()
            self.grid = grid
            self.item = item

        @property
        def control(self) -> Grid:
            return self.grid

    class Moved(Message):
        """The cursor stands on another row."""

        def __init__(self, grid: Grid, item: Any) -> None:
            super().__init__()
            self.grid = grid
            self.item = item

        @property
        def control(self) -> Grid:
            return self.grid

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.items: list[Any] = []
        self._shown: dict[int, Line] = {}  # what each visible row looked like when it was last drawn
        self._ready: dict[int, Line] = {}  # lines of the items as they are
        self._fitted: tuple[int, list[Column]] = (-1, [])

    def columns(self) -> Sequence[Column]:
        raise NotImplementedError

    def cells(self, item: Any, columns: Sequence[Column]) -> Line:
        """One (text, style) for each column, unpadded; a single one spans the row."""
        raise NotImplementedError

    def identity(self, item: Any) -> Hashable:
        """What stays equal when a row changes its values, so that the cursor stays on it."""
        return item

    def header_style(self, column: Column) -> Style:
        return theme.DIM

    @property
    def selected(self) -> Any | None:
        return self.items[self.cursor] if 0 <= self.cursor < len(self.items) else None

    def set_items(self, items: Sequence[Any]) -> None:
        """Show these rows; the cursor stays on its row, and only visible lines that differ are painted."""
        current = self.selected
        columns_before = self._fitted[1]
        if bool(self.items) != bool(items):
            self.refresh()  # the header comes or goes
        self.items = list(items)
        self._ready.clear()
        if current is not None:
            wanted = self.identity(current)
            if not (self.cursor < len(self.items) and self.identity(self.items[self.cursor]) == wanted):
                for index, item in enumerate(self.items):
                    if self.identity(item) == wanted:
                        self.cursor = index
                        break
        self.cursor = max(0, min(self.cursor, len(self.items) - 1))
        size = Size(self.size.width, len(self.items) + self.HEADER)
        if size != self.virtual_size:
            self._take_size(size)
        self._fitted = (-1, [])
        if self._columns() != columns_before:
            self._shown.clear()
            self.refresh()
            return
        for index in self._visible():
            before = self._shown.get(index)
            after = self._line(index) if index < len(self.items) else ()
            if before != after:
                self._repaint(index)

    def renew(self, items: Mapping[int, Any]) -> None:
        """Other values of some rows, which stay where they are."""
        visible = self._visible()
        for index, item in items.items():
            self.items[index] = item
            self._ready.pop(index, None)
            if index in visible and self._shown.get(index) != self._line(index):
                self._repaint(index)

    def say_empty(self, words: str) -> None:
        """Say this in the place of the header while there is no row."""
        if words != self.empty:
            self.empty = words
            self.refresh()

    def _take_size(self, size: Size) -> None:
        """As many rows as `size` is high: a new layout of the screen only where a scrollbar comes or goes."""
        height = self.styles.height
        fixed = height is not None and not height.is_auto and size.width == self.virtual_size.width
        shown = self.container_size.height
        if not fixed or not shown < min(size.height, self.virtual_size.height):
            self.virtual_size = size
            return
        self.set_reactive(Grid.virtual_size, size)
        self.vertical_scrollbar.window_virtual_size = size.height
        if self.scroll_offset.y > self.max_scroll_y:
            self.scroll_to(y=self.max_scroll_y, animate=False)

    def invalidate(self) -> None:
        """Draw everything again, as after a change of sorting or columns."""
        self._fitted = (-1, [])
        self._shown.clear()
        self._ready.clear()
        self.refresh()

    def _visible(self) -> range:
        top = round(self.scroll_y)
        return range(top, top + max(0, self.size.height - self.HEADER))

    def _repaint(self, index: int) -> None:
        y = index - round(self.scroll_y) + self.HEADER
        self.refresh(Region(0, y, self.size.width, 1))

    def _columns(self) -> list[Column]:
        width = self.size.width
        if self._fitted[0] != width:
            self._fitted = (width, fit_columns(self.columns(), width))
        return self._fitted[1]

    def _line(self, index: int) -> Line:
        line = self._ready.get(index)
        if line is None:
            line = self._ready[index] = self._formatted(index)
        return line

    def _formatted(self, index: int) -> Line:
        columns = self._columns()
        cells = self.cells(self.items[index], columns)
        if len(cells) == 1:
            return ((fit(cells[0][0], self.size.width), cells[0][1]),)
        parts: list[tuple[str, Style]] = []
        for column, (text, style) in zip(columns, cells, strict=True):
            parts.append((fit(text, column.width, right=column.right) + " ", style))
        return tuple(parts)

    def render_line(self, y: int) -> Strip:
        width, base = self.size.width, self.visual_style.rich_style
        if self.empty and not self.items:
            return to_strip(((f" {self.empty}" if y == 0 else "", theme.DIM),), width, base)
        if self.HEADER and y == 0:
            header = [
                (fit(column.title, column.width, right=column.right) + " ", self.header_style(column))
                for column in self._columns()
            ]
            return to_strip(header, width, base)
        index = y - self.HEADER + round(self.scroll_y)
        if not 0 <= index < len(self.items):
            self._shown[index] = ()
            return to_strip((), width, base)
        line = self._shown[index] = self._line(index)
        if index == self.cursor:
            base = base + (theme.CURSOR if self.has_focus else theme.CURSOR_BLURRED)
        return to_strip(line, width, base)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self.items) + self.HEADER)
        self.invalidate()

    def on_focus(self) -> None:
        self._repaint(self.cursor)

    def on_blur(self) -> None:
        self._repaint(self.cursor)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._shown.clear()

    def watch_cursor(self, old: int, new: int) -> None:
        self._repaint(old)
        self._repaint(new)
        room = self.size.height - self.HEADER
        if new < self.scroll_y:
            self.scroll_to(y=new, animate=False)
        elif room > 0 and new >= self.scroll_y + room:
            self.scroll_to(y=new - room + 1, animate=False)
        if (item := self.selected) is not None:
            self.post_message(self.Moved(self, item))

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(self.cursor + by, len(self.items) - 1))

    def action_page(self, direction: int) -> None:
        self.action_move(direction * max(1, self.size.height - self.HEADER - 1))

    def action_edge(self, end: int) -> None:
        self.cursor = max(0, len(self.items) - 1) if end else 0

    def action_select(self) -> None:
        if (item := self.selected) is not None:
            self.post_message(self.Selected(self, item))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if self.HEADER and offset.y == 0:
            left = 0
            for column in self._columns():
                if left <= offset.x <= left + column.width:
                    self.header_clicked(column)
                    return
                left += column.width + 1
            return
        index = offset.y - self.HEADER + round(self.scroll_y)
        if 0 <= index < len(self.items):
            if index == self.cursor and event.chain > 1:
                self.action_select()
            self.cursor = index

    def header_clicked(self, column: Column) -> None:
        """A click on a column's title."""
