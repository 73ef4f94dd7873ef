"""The stacks of all ranks as one tree: shared calls are one line, and it branches where ranks part."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftdash import monitor
from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.frames import Origin
from ftdash.monitor.diagnosis.model import Frame, RankEvidence
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.stack import fit_end, short_path

NOT_READ = Frame("no stack")


@dataclass(slots=True)
class Node:
    """A call and the ranks that are in it. Only used while the tree is built."""

    frame: Frame
    ranks: list[int] = field(default_factory=list)
    calls: dict[Frame, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Branch:
    """One line: calls, outermost first, that exactly these ranks share; `path` is its place in the tree."""

    path: tuple[int, ...]
    frames: tuple[Frame, ...]
    ranks: tuple[int, ...]
    leaf: bool

    @property
    def own(self) -> Frame | None:
        """The innermost call of the user's own code, if any."""
        return next((frame for frame in reversed(self.frames) if frames.origin(frame) is Origin.OWN), None)


# ftdash's own hook, which calls on what it listens to: installed, or where it runs from.
_HERE = re.escape(str(Path(monitor.__file__).parent))
_LISTENS = re.compile(rf"(?:/ftdash/monitor|{_HERE})/(?:hook|inject)/")


def python_frames(evidence: RankEvidence) -> tuple[Frame, ...]:
    """The main thread's Python frames, innermost first, without ftdash's own; () without a stack."""
    main = frames.main_thread(evidence.threads)
    if main is None:
        return ()
    return tuple(
        frame
        for frame in main.frames
        if frames.origin(frame) is not Origin.NATIVE and not _LISTENS.search(frame.file)
    )


def fold(evidence: Iterable[RankEvidence]) -> list[Branch]:
    """The tree as lines, top down; smaller branches first, since the odd ones are looked for."""
    root = Node(NOT_READ)
    for one in evidence:
        node = root
        for frame in reversed(python_frames(one) or (NOT_READ,)):
            node = node.calls.setdefault(frame, Node(frame))
            node.ranks.append(one.rank)
    lines: list[Branch] = []
    # Deep recursion in a stack must not become one here: branches wait in a list of their own.
    waiting = _below((), root)
    while waiting:
        path, node = waiting.pop()
        chain = [node.frame]
        while len(below := list(node.calls.values())) == 1 and len(below[0].ranks) == len(node.ranks):
            node = below[0]
            chain.append(node.frame)
        lines.append(Branch(path, tuple(chain), tuple(sorted(node.ranks)), not node.calls))
        waiting += _below(path, node)
    return lines


def _below(path: tuple[int, ...], node: Node) -> list[tuple[tuple[int, ...], Node]]:
    """The branches of a node with their places, the one to be taken first at the end."""
    by_size = sorted(node.calls.values(), key=lambda child: (len(child.ranks), min(child.ranks)))
    return [((*path, index), child) for index, child in enumerate(by_size)][::-1]


class StackTree(Grid):
    """Every line is a run of calls with the ranks that are in it."""

    HELP = (
        "Calls that the same ranks share stand on one line, outermost first. The tree branches where ranks "
        "part, the fewest ranks first; ✗ marks a branch of culprits.\n"
        "v  goes back to the groups"
    )
    HINTS = "↑↓ branch  v groups"
    empty = "no stacks yet: d takes them"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.guilty: frozenset[int] = frozenset()
        self.border_title = "Stack tree"

    def show(self, evidence: Iterable[RankEvidence], guilty: Collection[int]) -> None:
        self.guilty = frozenset(guilty)
        lines = fold(evidence)
        leaves = sum(line.leaf for line in lines)
        self.border_title = "Stack tree"
        if leaves:
            self.border_title += f" {theme.GLYPHS.dot} {fmt.plural(leaves, 'different stack')}"
        self.set_items(lines)
        self.invalidate()

    def columns(self) -> Sequence[Column]:
        widest = max((len(fmt.ranks(line.ranks)) for line in self.items), default=5)
        return [
            Column("mark", "", 1),
            Column("ranks", "ranks", max(5, min(14, widest))),
            Column("count", "n", 5, right=True, drop=1),
            Column("calls", "calls, outermost first", 32, grow=True),
            Column("where", "own line", 22, drop=2),
        ]

    def identity(self, item: Branch) -> Hashable:
        return item.path

    def cells(self, item: Branch, columns: Sequence[Column]) -> Line:
        guilty = bool(self.guilty.intersection(item.ranks))
        only_guilty = guilty and self.guilty.issuperset(item.ranks)
        style = theme.BAD if only_guilty else theme.TEXT
        room = next(column.width for column in columns if column.key == "calls")
        indent = "  " * (len(item.path) - 1)
        arrow = " > " if theme.GLYPHS.ascii else " › "
        calls = fmt.clean(arrow.join(frame.short for frame in item.frames))
        own = item.own
        where = f"{short_path(own.file)}:{own.line}" if own is not None else ""
        cells = {
            "mark": (theme.GLYPHS.no if only_guilty else " ", style),
            "ranks": (fmt.ranks(item.ranks), style),
            "count": (f"{len(item.ranks):,}", theme.DIM),
            "calls": (indent + fit_end(calls, room - len(indent)), theme.BOLD if item.leaf else theme.TEXT),
            "where": (fit_end(fmt.clean(where), 22), theme.WARN if only_guilty else theme.DIM),
        }
        return tuple(cells[column.key] for column in columns)
