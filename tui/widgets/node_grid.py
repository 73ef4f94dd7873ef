"""The node grid: a thousand ranks on one screen, one cell a rank, grouped by node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.message import Message

from ftdash.monitor.state import Alert, RankPhase, RankState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part
from ftdash.tui.widgets.rank_rows import Standing

NAME_WIDTH = 10


def look(rank: RankState, noted: Collection[int]) -> Part:
    """The cell of one rank; every condition has a symbol of its own. `noted`: slow, or named by an alert."""
    glyphs = theme.GLYPHS
    if rank.state is RankPhase.DEAD or (rank.gpu is not None and rank.gpu.state != "ok"):
        return glyphs.no, theme.BAD
    if rank.state is RankPhase.STALLED:
        return glyphs.stalled, theme.BAD
    if rank.rank in noted:
        return glyphs.tight, theme.WARN
    return _BY_PHASE.get(rank.state, (glyphs.gpu, theme.OK))


_BY_PHASE: dict[RankPhase, Part] = {
    RankPhase.DATA: (theme.GLYPHS.waiting, theme.WARN),
    RankPhase.SAVING: (theme.GLYPHS.waiting, theme.VIOLET),
    RankPhase.EVALUATING: (theme.GLYPHS.waiting, theme.VIOLET),
    RankPhase.STARTING: (theme.GLYPHS.idle, theme.DIM),
    RankPhase.FINISHED: (theme.GLYPHS.gpu, theme.DIM),
}


class NodeGrid(LineWidget, can_focus=True):
    """One cell a rank; Enter shows the ranks of a node in the table."""

    HELP = (
        "One cell a rank, grouped by node, or one a node, the worst of its ranks, where room is short: ■ "
        "works, ▲ slow or alerted, ✗ dead or GPU lost, ‖ stalled, "
        "◐ waits for data or saves, ○ starts.\n"
        "arrows  choose a node\n"
        "enter  filters the table to it"
    )
    HINTS = "arrows choose a node  enter show its ranks"

    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "Left", show=False),
        Binding("right", "move(1)", "Right", show=False),
        Binding("up", "row(-1)", "Up", show=False),
        Binding("down", "row(1)", "Down", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    class Chosen(Message):
        """A node was picked."""

        def __init__(self, host: str) -> None:
            super().__init__()
            self.host = host

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.nodes: list[tuple[str, list[RankState]]] = []
        self.cells: list[list[Part]] = []  # of each node, in the order of `nodes`
        self._noted: set[int] = set()
        self.cursor = 0
        self.border_title = "Nodes"

    def show(
        self, ranks: Sequence[RankState], alerts: Sequence[Alert] = (), standing: Standing | None = None
    ) -> None:
        before, cells_before, noted_before = self.nodes, self.cells, self._noted
        nodes: dict[str, list[RankState]] = {}
        for rank in ranks:
            nodes.setdefault(rank.host or "?", []).append(rank)
        self.nodes = list(nodes.items())
        noted = {number for alert in alerts if len(alert.ranks) < len(ranks) for number in alert.ranks}
        noted |= (standing or Standing.of(ranks)).slow
        self._noted = noted
        if noted == noted_before and len(before) == len(nodes):
            self.cells = [
                cells if node == old else [look(rank, noted) for rank in node[1]]
                for node, old, cells in zip(self.nodes, before, cells_before, strict=True)
            ]
        else:
            self.cells = [[look(rank, noted) for rank in members] for members in nodes.values()]
        if self.cells == cells_before and [host for host, _ in before] == list(nodes):
            if self._drawn_for != self.size:
                self.redraw()
            return
        self.cursor = min(self.cursor, max(0, len(self.nodes) - 1))
        ill = sum(style is theme.BAD or style is theme.WARN for cells in self.cells for _, style in cells)
        title = f"Nodes {len(self.nodes)} · ranks {len(ranks):,} · {ill} differ"
        if self.size and self.pooled(*self.size):
            title += " · one cell a node"
        self.retitle(title)
        self.redraw()

    def _largest(self, width: int) -> int:
        """Cells of the largest node, as far as they fit beside its name."""
        return min(max((len(ranks) for _, ranks in self.nodes), default=1), max(1, width - NAME_WIDTH - 3))

    def pooled(self, width: int, height: int) -> bool:
        """Whether a node is one cell, the worst of its ranks: where the ranks of all nodes have no room."""
        return len(self.nodes) > height * max(1, (width - NAME_WIDTH - 1) // (self._largest(width) + 1))

    def _most(self, width: int, height: int) -> int:
        return 1 if self.pooled(width, height) else self._largest(width)

    def named(self, width: int, height: int) -> bool:
        """Whether every node has its name beside it; else only the first one of each line has."""
        return len(self.nodes) <= height * max(1, width // (NAME_WIDTH + 3 + self._largest(width)))

    def per_line(self, width: int, height: int) -> int:
        """Nodes beside each other in `width` cells."""
        most = self._most(width, height)
        if self.named(width, height):
            return max(1, width // (NAME_WIDTH + 3 + most))
        return max(1, (width - NAME_WIDTH - 1) // (most + 1))

    def draw(self, width: int, height: int) -> list[Line]:
        if not self.nodes:
            return [(("no ranks yet", theme.DIM),)]
        per_line, most = self.per_line(width, height), self._most(width, height)
        named, pooled = self.named(width, height), self.pooled(width, height)
        first_line = max(0, self.cursor // per_line - height + 1)
        lines: list[Line] = []
        for start in range(first_line * per_line, len(self.nodes), per_line):
            parts: list[Part] = []
            for index in range(start, min(start + per_line, len(self.nodes))):
                host, ranks = self.nodes[index]
                chosen = self.has_focus and index == self.cursor
                mark = Style(reverse=True) if chosen else Style()
                if named or index == start:
                    name = fmt.fit(_tail(fmt.clean(host), NAME_WIDTH), NAME_WIDTH)
                    parts += [(name, theme.DIM + mark), (" ", theme.DIM)]
                cells = [_worst(self.cells[index])] if pooled else _joined(self.cells[index][:most])
                parts += cells if named else [(text, style + mark) for text, style in cells]
                parts.append((" " * (most - min(most, len(ranks)) + (2 if named else 1)), theme.DIM))
            lines.append(tuple(parts))
        return lines

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(self.cursor + by, len(self.nodes) - 1))
        self._name_chosen()
        self.redraw()

    def _name_chosen(self) -> None:
        """The node under the cursor, by name, below the grid."""
        if self.nodes and self.has_focus:
            host, ranks = self.nodes[self.cursor]
            numbers = fmt.ranks(rank.rank for rank in ranks)
            self.border_subtitle = f"{fmt.clean(host)}: ranks {numbers}"
        else:
            self.border_subtitle = ""

    def action_row(self, by: int) -> None:
        self.action_move(by * self.per_line(*self.size))

    def action_choose(self) -> None:
        if self.nodes:
            self.post_message(self.Chosen(self.nodes[self.cursor][0]))

    def on_focus(self) -> None:
        self._name_chosen()
        self.redraw()

    def on_blur(self) -> None:
        self._name_chosen()
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not self.nodes:
            return
        width, height = self.size
        per_line, most = self.per_line(width, height), self._most(width, height)
        named = self.named(width, height)
        column = offset.x // (NAME_WIDTH + 3 + most) if named else (offset.x - NAME_WIDTH - 1) // (most + 1)
        first_line = max(0, self.cursor // per_line - self.size.height + 1)
        index = (first_line + offset.y) * per_line + max(0, min(per_line - 1, column))
        if index < len(self.nodes):
            self.cursor = index
            self.redraw()
            if event.chain > 1:
                self.action_choose()


def _tail(name: str, width: int) -> str:
    """The end of a host name, where the number stands."""
    short = name.split(".")[0]
    return short if len(short) <= width else "…" + short[-(width - 1) :]


def _worst(cells: Iterable[Part]) -> Part:
    """The cell that needs somebody most."""
    return min(cells, key=lambda cell: 0 if cell[1] is theme.BAD else 1 if cell[1] is theme.WARN else 2)


def _joined(cells: Iterable[Part]) -> list[Part]:
    parts: list[Part] = []
    for char, style in cells:
        if parts and parts[-1][1] is style:
            parts[-1] = (parts[-1][0] + char, style)
        else:
            parts.append((char, style))
    return parts
