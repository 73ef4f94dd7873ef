"""Who is where: ranks folded by equal stack, the odd ones first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ftdash.monitor.diagnosis.model import Culprit, Group
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

GroupRow = tuple[Group, bool]  # the group, and whether a culprit is in it


def short_frame(frame: str) -> str:
    """The function's name of a frame written as `name (file:line)`."""
    return frame.split(" (", 1)[0].rsplit(".", 1)[-1]


def frame_path(group: Group, most: int = 4) -> str:
    """The innermost calls, innermost first."""
    arrow = " < " if theme.GLYPHS.ascii else " ‹ "
    return fmt.clean(arrow.join(short_frame(frame) for frame in group.frames[:most]))


class GroupTable(Grid):
    """One line a group; the stack of the group under the cursor stands beside it."""

    HELP = (
        "Ranks with the same stack share a line; ✗ marks the group of a culprit. enter shows its next rank."
    )
    HINTS = "↑↓ group  enter next rank"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "Who is where"

    def show(self, groups: Sequence[Group], culprits: Sequence[Culprit]) -> None:
        guilty = {culprit.rank for culprit in culprits}
        rows = [(group, bool(guilty & set(group.ranks))) for group in groups]
        rows.sort(key=lambda row: (not row[1], len(row[0].ranks)))
        self.border_title = f"Who is where  {fmt.plural(len(rows), 'group')}"
        self.set_items(rows)
        self.invalidate()

    def columns(self) -> Sequence[Column]:
        widest = max((len(fmt.ranks(group.ranks)) for group, _ in self.items), default=6)
        doing = max((len(fmt.clean(group.collective or group.phase)) for group, _ in self.items), default=8)
        return [
            Column("mark", "", 1),
            Column("ranks", "ranks", max(6, min(18, widest))),
            Column("count", "n", 5, right=True),
            Column("doing", "in", max(8, min(20, doing)), drop=1),
            Column(
                "frames", "innermost call ‹ its callers" if not theme.GLYPHS.ascii else "calls", 20, grow=True
            ),
        ]

    def identity(self, item: GroupRow) -> Hashable:
        return item[0].ranks

    def cells(self, item: GroupRow, columns: Sequence[Column]) -> Line:
        group, guilty = item
        style = theme.BAD if guilty else theme.TEXT
        cells = {
            "mark": (theme.GLYPHS.no if guilty else theme.GLYPHS.dot, style if guilty else theme.DIM),
            "ranks": (fmt.ranks(group.ranks), style),
            "count": (f"{len(group.ranks):,}", theme.DIM),
            "doing": (fmt.clean(group.collective or group.phase), theme.ACCENT),
            "frames": (frame_path(group), theme.TEXT),
        }
        return tuple(cells[column.key] for column in columns)
