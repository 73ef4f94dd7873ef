"""The log: any size, read line by line as it is looked at; follows, filters by text or rank."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ftdash.monitor.logs.demux import Demultiplexer
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.log_index import LogFilter, LogIndex
from ftdash.tui.widgets.lines import FramedLines, Line, Part, to_strip

LOOK_EVERY_S = 0.5
LOUD = ("error", "traceback", "exception", "failed", "killed", "out of memory")
WARNED = ("warning", "warn ", "deprecat")
RANK_STYLES = (theme.ACCENT, theme.VIOLET, theme.PINK, theme.SLATE)  # not those that judge


class LogView(FramedLines, ScrollView, can_focus=True):
    """One file at a time. A thread keeps the index; only visible lines are read."""

    DEFAULT_CSS = "LogView { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    HELP = (
        "↑↓  scroll; PgUp and PgDn by a page, Home and End to the ends\n"
        "F  follows the end, as End does\n"
        "/  shows only lines with a text\n"
        "r  shows only the lines of the next rank\n"
        "[ ]  change the file"
    )
    HINTS = "/ search  r rank  F follow  [ ] file"

    BINDINGS: ClassVar = [
        Binding("up", "by(-1)", "Up", show=False),
        Binding("down", "by(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home", "edge(0)", "Begin", show=False),
        Binding("end,F", "edge(1)", "Follow", show=False),
        Binding("left", "shift(-20)", "Left", show=False),
        Binding("right", "shift(20)", "Right", show=False),
        Binding("r", "rank", "Next rank", show=False),
        Binding("left_square_bracket", "file(-1)", "Previous file", show=False),
        Binding("right_square_bracket", "file(1)", "Next file", show=False),
    ]

    class Grew(Message):
        """The index or the filter has more lines."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.files: list[Path] = []
        self.index: LogIndex | None = None
        self.filter = LogFilter()
        self.following = True
        self.needle = ""
        self.shifted = 0
        self.ranks = 0
        self.border_title = "Log"
        self._stop = threading.Event()
        self._pending = False
        self._text = lru_cache(maxsize=512)(self._read)

    def open(self, files: list[Path], ranks: int = 0) -> None:
        """Show the first of `files`; the same files again change nothing."""
        self.ranks = ranks
        if files == self.files:
            return
        current = self.index.path if self.index is not None else None
        self.files = list(files)
        if current is None or current not in files:
            self._open_file(files[0] if files else None)
        self._retitle()

    def _open_file(self, path: Path | None) -> None:
        self._stop.set()
        self._stop = threading.Event()
        self.index = LogIndex(path) if path is not None else None
        self.filter = LogFilter(self.needle, self.filter.rank)
        self.following = True
        self._text.cache_clear()
        if self.index is not None and self.is_mounted:
            arguments = (self.index, self._stop)
            threading.Thread(target=self._follow, args=arguments, name="log-index", daemon=True).start()
        self._refit()

    def on_unmount(self) -> None:
        self._stop.set()

    def _follow(self, index: LogIndex, stop: threading.Event) -> None:
        while not stop.is_set():
            visible = self.is_looked_at
            more = False
            if visible:
                grew = index.poll()
                current = self.filter
                before = len(current.lines)
                more = not current.passes_all and current.extend(index)
                if (grew or len(current.lines) != before) and not self._pending and not stop.is_set():
                    self._pending = True
                    self.post_message(self.Grew())
            stop.wait(0.02 if more else LOOK_EVERY_S)

    @property
    def is_looked_at(self) -> bool:
        """Read from the thread: shown, and every pane around it too."""
        return self.is_attached and all(node.styles.display != "none" for node in self.ancestors_with_self)

    def on_log_view_grew(self) -> None:
        self._pending = False
        self._text.cache_clear()
        self._refit()

    def line_count(self) -> int:
        if self.index is None:
            return 0
        return self.index.count if self.filter.passes_all else len(self.filter.lines)

    def _refit(self) -> None:
        self.virtual_size = Size(self.size.width, self.line_count())
        if self.following:
            self.scroll_to(y=max(0, self.line_count() - self.size.height), animate=False, force=True)
        self._retitle()
        self.refresh()

    def _retitle(self) -> None:
        if self.index is None:
            title = "Log"
        else:
            words = [f"Log {fmt.clean(self.index.path.name)}", f"{self.line_count():,} lines"]
            if self.needle:
                words.append(f"with {self.needle!r}")
            if self.filter.rank is not None:
                words.append(f"rank {self.filter.rank} only")
            if self.index.full:
                words.append("the rest of this file is left out")
            if len(self.files) > 1 and self.index.path in self.files:
                words.append(f"file {self.files.index(self.index.path) + 1} of {len(self.files)}")
            words.append("following" if self.following else "paused")
            title = " · ".join(words)
            if self.index.trouble:
                title = fmt.clean(self.index.trouble)
        if title != self.border_title:
            self.border_title = title

    def _read(self, line: int) -> str:
        return self.index.text(line) if self.index is not None else ""

    def render_line(self, y: int) -> Strip:
        row = y + round(self.scroll_y)
        if not 0 <= row < self.line_count():
            empty = ((" nothing written yet", theme.DIM),) if y == 0 and not self.line_count() else ()
            return to_strip(empty, self.size.width, self.visual_style.rich_style)
        number = row if self.filter.passes_all else self.filter.lines[row]
        return to_strip(self._line(self._text(number)), self.size.width, self.visual_style.rich_style)

    def _line(self, text: str) -> Line:
        origin, rest = Demultiplexer().origin(text)
        rank = origin.rank if origin.rank is not None else origin.local_rank
        parts: list[Part] = []
        if rank is not None:
            parts.append((f"{rank:>3} ", RANK_STYLES[rank % len(RANK_STYLES)]))
        lowered = rest[:400].lower()
        style = theme.TEXT
        if any(word in lowered for word in LOUD):
            style = theme.BAD
        elif any(word in lowered for word in WARNED):
            style = theme.WARN
        rest = rest[self.shifted : self.shifted + self.size.width]
        at = rest.lower().find(self.needle.lower()) if self.needle else -1
        if at < 0:
            return (*parts, (rest, style))
        end = at + len(self.needle)
        marked: Style = theme.MATCH
        return (*parts, (rest[:at], style), (rest[at:end], marked), (rest[end:], style))

    def set_needle(self, needle: str) -> None:
        """Show only the lines with this text; an empty one shows all."""
        self.needle = needle
        self.filter = LogFilter(needle, self.filter.rank)
        self._refit()

    def action_rank(self) -> None:
        order = [None, *range(self.ranks)]
        at = order.index(self.filter.rank) if self.filter.rank in order else 0
        self.filter = LogFilter(self.needle, order[(at + 1) % len(order)] if order else None)
        self._refit()

    def action_file(self, by: int) -> None:
        if self.files and self.index is not None:
            at = self.files.index(self.index.path) if self.index.path in self.files else 0
            self._open_file(self.files[(at + by) % len(self.files)])

    def action_by(self, lines: int) -> None:
        bottom = max(0, self.line_count() - self.size.height)
        target = max(0, min(bottom, round(self.scroll_y) + lines))
        self.following = target >= bottom and lines > 0
        self.scroll_to(y=target, animate=False)
        self._retitle()

    def action_page(self, direction: int) -> None:
        self.action_by(direction * max(1, self.size.height - 1))

    def action_edge(self, end: int) -> None:
        self.following = bool(end)
        self.scroll_to(y=max(0, self.line_count() - self.size.height) if end else 0, animate=False)
        self._retitle()

    def action_shift(self, by: int) -> None:
        self.shifted = max(0, self.shifted + by)
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        event.prevent_default()
        self.action_by(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        event.prevent_default()
        self.action_by(3)

    def on_resize(self) -> None:
        self._refit()
