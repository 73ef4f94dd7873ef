"""All threads of one rank with their local variables, in memory only, above the Diagnose pane."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.message import Message

from ftdash.monitor.diagnosis.collect import pyspy_path, pyspy_version, run_pyspy
from ftdash.monitor.diagnosis.permission import explain
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import RunError
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.launching import in_thread
from ftdash.tui.panes.diagnose_acting import Post, Target
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.stack import short_path

if TYPE_CHECKING:
    from ftdash.tui.cockpit import Cockpit

TRIES = 4  # a process that moves cannot always be read at the first try
TIMEOUT_S = 10.0
WARNING = "locals can hold training data, prompts and keys: in memory only, gone when you leave"


class _Local(msgspec.Struct):
    name: str = ""
    repr: str | None = None
    arg: bool = False


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0
    locals: list[_Local] | None = None


class _Thread(msgspec.Struct):
    thread_name: str | None = None
    os_thread_id: int | None = None
    frames: list[_Frame] = []


@dataclass(frozen=True, slots=True)
class LocalsRow:
    """A thread's heading, a frame, or one local variable. `depth` is 0, 1 or 2."""

    number: int
    depth: int
    name: str
    text: str


class LocalsRead(Message):
    """What was read, or why not in one line."""

    def __init__(self, target: Target, rows: tuple[LocalsRow, ...], trouble: str = "") -> None:
        super().__init__()
        self.target, self.rows, self.trouble = target, rows, trouble


def read(target: Target, post: Post) -> None:
    """Read the locals in a thread; answers with LocalsRead."""

    def reading() -> None:
        try:
            post(LocalsRead(target, take_locals(target)))
        except (RunError, OSError) as error:
            post(LocalsRead(target, (), " ".join(str(error).split())))

    in_thread(reading)


def take_locals(target: Target) -> tuple[LocalsRow, ...]:
    """All threads, MainThread first. Raises RunError: another node would have to write them to disk."""
    if target.host != node_name():
        raise RunError(
            f"{target.words}: locals are read on the node itself: "
            f"ssh {target.host} py-spy dump --locals --nonblocking --pid {target.pid}"
        )
    tool, message = pyspy_path(), ""
    for _ in range(TRIES if tool is not None else 0):
        out, message, late = run_pyspy(target.pid, ["--locals", "--nonblocking"], TIMEOUT_S)
        if late:
            raise RunError(f"{target.words}: py-spy did not end in {TIMEOUT_S:.0f} s")
        try:
            return tuple(_rows(msgspec.json.decode(out, type=list[_Thread])))
        except msgspec.DecodeError:
            continue
    why = explain(target.pid, message, pyspy_version()) if tool is not None else None
    raise RunError(f"{target.words}: {why.text}; {why.remedy}" if why else "py-spy is not installed here")


def _rows(threads: Sequence[_Thread]) -> list[LocalsRow]:
    rows: list[LocalsRow] = []

    def add(depth: int, name: str, text: str) -> None:
        rows.append(LocalsRow(len(rows), depth, fmt.clean(name), fmt.clean(text)))

    for thread in sorted(threads, key=lambda thread: thread.thread_name != "MainThread"):
        add(0, f"thread {thread.thread_name or thread.os_thread_id or ''}", "")
        for frame in thread.frames:
            add(1, frame.name, f"{short_path(frame.filename)}:{frame.line}")
            for local in frame.locals or []:
                add(2, local.name, local.repr if local.repr is not None else "?")
    return rows


class LocalsTable(Grid):
    """Frames, innermost first, each with its variables below it."""

    HELP = "Frames innermost first, with their variables.\nw  writes them to a file that you name"
    HINTS = "↑↓ line  w write to a file…  esc forget"
    HEADER = False

    def columns(self) -> Sequence[Column]:
        names = max((2 * row.depth + len(row.name) for row in self.items), default=20)
        return [Column("name", "", max(12, min(34, names))), Column("text", "", 20, grow=True)]

    def identity(self, item: LocalsRow) -> Hashable:
        return item.number

    def cells(self, item: LocalsRow, columns: Sequence[Column]) -> Line:
        if item.depth == 0:
            return ((item.name, theme.ACCENT_BOLD),)
        name_style, text_style = (theme.BOLD, theme.DIM) if item.depth == 1 else (theme.DIM, theme.TEXT)
        return (("  " * item.depth + item.name, name_style), (item.text, text_style))


class LocalsScreen(Overlay[None]):
    """Closing it forgets what it shows."""

    HELP = f"{WARNING}. A file that w writes can be read by you only."
    BINDINGS: ClassVar = [
        Binding("escape,q", "close", "Back", show=False),
        Binding("w", "write", "Write", show=False),
    ]

    def __init__(self, target: Target, rows: Sequence[LocalsRow]) -> None:
        super().__init__()
        self._target, self._rows = target, rows

    def compose(self) -> ComposeResult:
        with Container(id="locals-box", classes="framed") as box:
            box.border_title = f"Locals of rank {self._target.rank}  ·  {WARNING}"
            box.border_subtitle = "w write to a file…  esc forget"
            yield LocalsTable(id="locals")

    def on_mount(self) -> None:
        table = self.query_one(LocalsTable)
        table.set_items(self._rows)
        table.focus()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_write(self) -> None:
        cast("Cockpit", self.app).ask("write the locals, data and all, to", "", self._write)

    def _write(self, name: str) -> None:
        cockpit = cast("Cockpit", self.app)
        if not name.strip():
            return
        path = Path(name.strip()).expanduser()
        text = "".join(f"{'  ' * row.depth}{row.name}  {row.text}".rstrip() + "\n" for row in self._rows)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                handle.write(text)
            cockpit.notice(f"written to {path}, readable for you alone")
        except OSError as error:
            cockpit.notice(f"cannot write {path}: {error.strerror or error}", severity="error")
