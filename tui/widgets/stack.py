"""The stack of one rank: function, file and line, innermost first; the first own line stands out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import Binding

from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.frames import Origin
from ftdash.monitor.diagnosis.model import RankEvidence, Thread
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line


@dataclass(frozen=True, slots=True)
class StackRow:
    """A line of the view: a heading, a sentence, or a frame. `number` keeps rows apart."""

    number: int
    name: str
    where: str = ""
    heading: bool = False
    own: bool = False


def stack_rows(evidence: RankEvidence, *, all_threads: bool = False) -> list[StackRow]:
    """The rows for one rank: process state, then MainThread, or every thread and child."""
    rows: list[StackRow] = []

    def add(name: str, where: str = "", *, heading: bool = False, own: bool = False) -> None:
        rows.append(StackRow(len(rows), fmt.clean(name), fmt.clean(where), heading, own))

    process = evidence.process
    if process is None:
        add("no process seen for this rank", heading=True)
        return rows
    words = f"pid {process.pid}"
    if process.proc.state:
        words += f" · state {process.proc.state}"
    if process.proc.wchan and process.proc.wchan != "0":
        words += f" · sleeps in {process.proc.wchan}"
    add(f"{words} · {process.source or 'no stack'}", heading=True)
    if process.failure is not None:
        add(process.failure_text or str(process.failure))
        if process.remedy:
            add(f"remedy: {process.remedy}")
    main = frames.main_thread(process.threads)
    shown = sorted(process.threads, key=lambda thread: thread is not main) if all_threads else [main]
    for thread in filter(None, shown):
        _thread_rows(thread, add, titled=all_threads)
    if all_threads:
        for child in process.children:
            add(f"child {child.pid} {' '.join(child.command)[:60]}", heading=True)
            for thread in child.threads:
                _thread_rows(thread, add, titled=True)
    elif len(process.threads) > 1:
        add(f"{fmt.plural(len(process.threads) - 1, 'more thread')}: t shows all", heading=True)
    return rows


def fit_end(text: str, width: int) -> str:
    """At most `width` cells, cut at the start: the end holds the file's name and the line."""
    while cell_len(text) > max(1, width):
        text = "…" + text[2:]
    return text


def _thread_rows(thread: Thread, add: Callable[..., None], *, titled: bool) -> None:
    if titled:
        add(f"thread {thread.name or thread.os_tid}{' (runs)' if thread.active else ''}", heading=True)
    own_seen = False
    for frame in thread.frames:
        own = not own_seen and frames.origin(frame) is Origin.OWN
        own_seen = own_seen or own
        add(
            frame.name,
            f"{short_path(frame.file)}:{frame.line}" if frame.line else short_path(frame.file),
            own=own,
        )


def short_path(path: str) -> str:
    """A source path without what stands before the package."""
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.rsplit(marker, 1)[1]
    parts = path.rsplit("/", 2)
    return "/".join(parts[-2:]) if len(parts) > 2 else path


class StackView(Grid):
    """Frames of the chosen rank, innermost first."""

    HELP = (
        "Innermost call first; ← marks the first line of your own code.\n"
        "t  shows all threads, or the main one"
    )
    HINTS = "↑↓ frame  t all threads"
    HEADER = False
    empty = "here stands the stack of the rank under the cursor"

    BINDINGS: ClassVar = [Binding("t", "threads", "All threads", show=False)]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.evidence: RankEvidence | None = None
        self.all_threads = False

    def say(self, sentence: str) -> None:
        """Show one sentence instead of a stack, or none."""
        self.evidence = None
        self.set_items([StackRow(0, fmt.clean(sentence), heading=True)] if sentence else [])
        self.invalidate()

    def show(self, evidence: RankEvidence) -> None:
        self.evidence = evidence
        self.set_items(stack_rows(evidence, all_threads=self.all_threads))
        self.invalidate()
        # Native frames and those of libraries may fill the window: the own line is what is looked for.
        self.cursor = next((index for index, row in enumerate(self.items) if row.own), 0)

    def show_frames(self, title: str, calls: Sequence[str]) -> None:
        """Frames that are known only as text, innermost first."""
        self.evidence = None
        rows = [StackRow(0, fmt.clean(title), heading=True)]
        rows += [StackRow(index, fmt.clean(frame)) for index, frame in enumerate(calls, 1)]
        self.set_items(rows)
        self.invalidate()

    def action_threads(self) -> None:
        self.all_threads = not self.all_threads
        if self.evidence is not None:
            self.show(self.evidence)

    def columns(self) -> Sequence[Column]:
        width = max(20, self.size.width)
        name = min(
            max((len(row.name) for row in self.items if not row.heading and row.where), default=20),
            width // 2,
        )
        return [Column("name", "", max(8, name)), Column("where", "", 10, grow=True)]

    def identity(self, item: StackRow) -> Hashable:
        return item.number

    def cells(self, item: StackRow, columns: Sequence[Column]) -> Line:
        if item.heading or not item.where:
            return ((item.name, theme.DIM if item.heading else theme.TEXT),)
        room = columns[-1].width
        mark = "" if not item.own else " <- first own line" if theme.GLYPHS.ascii else " ← first own line"
        if len(item.where) + len(mark) > room:
            mark = mark[:3]
        where = fit_end(item.where, room - len(mark)) + mark
        return (
            (item.name, theme.BOLD if item.own else theme.TEXT),
            (where, theme.ACCENT if item.own else theme.DIM),
        )
