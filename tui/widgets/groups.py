"""Who is where: ranks folded by phase and collective, and below that by equal stack, the odd ones first."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis.model import Group
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

ROOMY = 90  # columns from which the phase stands beside the collective
OPEN_STACKS = 4  # a fold of up to so many different stacks is open to begin with

Stacks = Mapping[int, tuple[str, ...]]  # the calls of each rank, innermost first


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Ranks in the same phase and collective (`stacks`: how many different ones), or with one stack."""

    group: Group
    guilty: bool
    stacks: int = 1
    below: bool = False  # one stack of the fold above
    open: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.group.phase, self.group.collective


def short_frame(frame: str) -> str:
    """The function's name of a frame written as `name (file:line)`."""
    return frame.split(" (", 1)[0].rsplit(".", 1)[-1]


def frame_path(calls: Sequence[str], most: int = 6) -> str:
    """The innermost calls, innermost first."""
    arrow = " < " if theme.GLYPHS.ascii else " ‹ "
    return fmt.clean(arrow.join(short_frame(frame) for frame in calls[:most]))


def fold(
    groups: Iterable[Group],
    stacks: Stacks,
    guilty: Collection[int],
    toggled: Collection[tuple[str, str]] = (),
) -> list[GroupRow]:
    """The lines of the table. `toggled` are folds that somebody has opened or closed by hand."""
    folds: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        folds.setdefault((group.phase, group.collective), []).append(group)
    rows: list[tuple[GroupRow, list[GroupRow]]] = []
    for (phase, collective), members in folds.items():
        exact: dict[tuple[str, ...], list[int]] = {}
        for group in members:
            for rank in group.ranks:
                exact.setdefault(stacks.get(rank) or group.frames, []).append(rank)
        parts = [
            GroupRow(
                Group(tuple(sorted(ranks)), phase, collective, calls),
                not set(ranks).isdisjoint(guilty),
                below=True,
            )
            for calls, ranks in exact.items()
        ]
        parts.sort(key=_odd_first)
        ranks = tuple(sorted(rank for part in parts for rank in part.group.ranks))
        common = max(parts, key=lambda part: len(part.group.ranks)).group.frames
        is_open = len(parts) > 1 and (len(parts) <= OPEN_STACKS) != ((phase, collective) in toggled)
        head = Group(ranks, phase, collective, common)
        row = GroupRow(head, any(part.guilty for part in parts), stacks=len(parts), open=is_open)
        rows.append((row, parts if is_open else []))
    rows.sort(key=lambda item: _odd_first(item[0]))
    return [row for head, parts in rows for row in (head, *parts)]


def _odd_first(row: GroupRow) -> tuple[bool, int, tuple[int, ...]]:
    return not row.guilty, len(row.group.ranks), row.group.ranks


class GroupTable(Grid):
    """One line a fold, with its stacks below; the stack of the line under the cursor stands beside it."""

    HELP = (
        "Ranks in the same phase and collective share a line, below it those with the very same stack; "
        "✗ marks a culprit.\n"
        "enter  opens or closes a fold, and on a single stack goes to its next rank"
    )
    HINTS = "↑↓ group  enter next rank"
    empty = "no stacks yet: d takes them"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "Who is where"
        self._groups: Sequence[Group] = ()
        self._stacks: Stacks = {}
        self._guilty: Collection[int] = ()
        self._toggled: set[tuple[str, str]] = set()

    def show(self, groups: Sequence[Group], stacks: Stacks, guilty: Collection[int]) -> None:
        self._groups, self._stacks, self._guilty = groups, stacks, frozenset(guilty)
        self._fold()

    def toggle(self, row: GroupRow) -> None:
        """Open or close a fold of several stacks."""
        self._toggled ^= {row.key}
        self._fold()

    def _fold(self) -> None:
        rows = fold(self._groups, self._stacks, self._guilty, self._toggled)
        heads = [row for row in rows if not row.below]
        stacks = sum(row.stacks for row in heads)
        self.border_title = "Who is where"
        if heads:
            self.border_title += f" {theme.GLYPHS.dot} {fmt.plural(len(heads), 'group')}"
        if stacks > len(heads):
            self.border_title += f", {stacks:,} stacks"
        self.set_items(rows)
        self.invalidate()

    def columns(self) -> Sequence[Column]:
        widest = max((len(fmt.ranks(row.group.ranks)) for row in self.items), default=6)
        doing = max((len(self._doing(row.group)) for row in self.items), default=8)
        return [
            Column("mark", "", 1),
            Column("ranks", "ranks", max(6, min(18, widest + 2))),
            Column("count", "n", 5, right=True),
            Column("doing", "in", max(8, min(26, doing))),
            Column(
                "frames", "innermost call ‹ its callers" if not theme.GLYPHS.ascii else "calls", 20, grow=True
            ),
        ]

    def identity(self, item: GroupRow) -> Hashable:
        return item.group.ranks, item.below

    def cells(self, item: GroupRow, columns: Sequence[Column]) -> Line:
        group, glyphs = item.group, theme.GLYPHS
        style = theme.BAD if item.guilty else theme.TEXT
        fold_mark = "" if item.stacks == 1 else f"{glyphs.open if item.open else glyphs.closed} "
        calls = frame_path(group.frames)
        if item.stacks > 1:
            calls = f"{item.stacks:,} different stacks"
        cells = {
            "mark": (glyphs.no if item.guilty else glyphs.dot, style if item.guilty else theme.DIM),
            "ranks": ("  " * item.below + fold_mark + fmt.ranks(group.ranks), style),
            "count": (f"{len(group.ranks):,}", theme.DIM),
            "doing": ("" if item.below else self._doing(group), theme.ACCENT),
            "frames": (calls, theme.DIM if item.stacks > 1 else theme.TEXT),
        }
        return tuple(cells[column.key] for column in columns)

    def _doing(self, group: Group) -> str:
        """The phase and the collective; where there is little room, the collective alone."""
        parts = [part for part in (group.phase, group.collective) if part]
        if self.size.width < ROOMY or group.phase == group.collective:
            parts = parts[-1:]
        return fmt.clean(f" {theme.GLYPHS.dot} ".join(parts)) or "no stack"
