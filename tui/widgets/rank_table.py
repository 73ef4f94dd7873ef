"""The rank table: one row a rank, equal ranks folded into one, so that only what differs is loud."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

from ftdash.monitor.state import Alert, RankPhase, RankState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.rank_rows import FoldedRow, GroupRow, RankRow, Row, Sort, Standing, arrange

LATE_S = 15.0  # a heartbeat older than this is worth a word
LEAST_FOLDED = 4  # fewer ranks are always shown one by one
_OWN_RANK = re.compile(r"^rank \d+( on \S+)?( is)? ")  # which rank and where, the row says already


STATE_LOOK: dict[RankPhase, tuple[str, Style]] = {
    RankPhase.STARTING: (theme.GLYPHS.waiting, theme.DIM),
    RankPhase.COMPUTE: (theme.GLYPHS.live, theme.OK),
    RankPhase.COMMUNICATION: (theme.GLYPHS.live, theme.ACCENT),
    RankPhase.DATA: (theme.GLYPHS.waiting, theme.WARN),
    RankPhase.SAVING: (theme.GLYPHS.live, theme.VIOLET),
    RankPhase.EVALUATING: (theme.GLYPHS.live, theme.VIOLET),
    RankPhase.STALLED: (theme.GLYPHS.stalled, theme.BAD),
    RankPhase.DEAD: (theme.GLYPHS.no, theme.BAD),
    RankPhase.FINISHED: (theme.GLYPHS.done, theme.DIM),
}


class RankTable(Grid):
    """Every rank of the run: memory, speed, what it does now."""

    HELP = (
        "One line a rank. ▼ marks a rank 1.3 times slower than the median of its peers, ? a GPU of which "
        "it is not sure that the rank runs on it: enter says why.\n"
        "s  sorts by the next column, S turns the order\n"
        "f  folds ranks that do the same into one line\n"
        "o  groups by node or state\n"
        "/  filters by rank, host, state or note\n"
        "enter  opens the rank, d dumps its stacks"
    )
    empty = "no rank has reported yet"
    HINTS = "↑↓ rank  enter open  d dump stacks  s sort  f fold  o group  / filter"

    BINDINGS: ClassVar = [
        Binding("s", "sort", "Sort", show=False),
        Binding("S", "reverse", "Reverse", show=False),
        Binding("f", "fold", "Fold", show=False),
        Binding("o", "group", "Group", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.ranks: tuple[RankState, ...] = ()
        self.alerts: tuple[Alert, ...] = ()
        self.standing = Standing.of(())
        self.mfu_s: float | None = None
        self.sort = Sort.RANK
        self.descending = False
        self.fold: bool | None = None  # None: fold when the ranks do not fit
        self.group = ""
        self.needle = ""
        self.border_title = "Ranks"

    def show(
        self,
        ranks: tuple[RankState, ...],
        alerts: tuple[Alert, ...] = (),
        standing: Standing | None = None,
        mfu_s: float | None = None,
    ) -> None:
        """`mfu_s`: over a rank's step time, its model FLOP utilisation; None where nobody planned it."""
        self.ranks, self.alerts, self.mfu_s = ranks, alerts, mfu_s
        self.standing = standing or Standing.of(ranks)
        self._arrange()

    def show_figures(self, ranks: tuple[RankState, ...]) -> None:
        """Newer figures of the ranks on the screen; who differs, and the order, are as `show` found them."""
        self.ranks = ranks
        renewed: dict[int, Row] = {}
        for index in self._visible():
            row = self.items[index] if index < len(self.items) else None
            if isinstance(row, RankRow):
                state = ranks[bisect_left(ranks, row.state.rank, key=attrgetter("rank"))]
                renewed[index] = replace(row, state=state)
        self.renew(renewed)

    @property
    def folding(self) -> bool:
        if self.fold is not None:
            return self.fold
        return len(self.ranks) > max(LEAST_FOLDED, self.size.height - self.HEADER)

    def selected_rank(self) -> RankState | None:
        match self.selected:
            case RankRow(state=state):
                return state
            case FoldedRow(ranks=ranks):
                return ranks[0]
        return None

    def visible_ranks(self) -> set[int]:
        """The ranks that have a line of their own on the screen, and the selected one."""
        rows = [self.items[index] for index in self._visible() if index < len(self.items)]
        ranks = {row.state.rank for row in rows if isinstance(row, RankRow)}
        chosen = self.selected_rank()
        return ranks if chosen is None else ranks | {chosen.rank}

    def _arrange(self) -> None:
        rows = arrange(
            self.ranks,
            self.alerts,
            sort=self.sort,
            descending=self.descending,
            needle=self.needle,
            fold=self.folding,
            group=self.group,
            standing=self.standing,
        )
        words = [f"Ranks {len(self.ranks):,}"]
        if self.needle:
            shown = sum(1 for row in rows if isinstance(row, RankRow))
            words.append(f"{shown} match {fmt.clean(self.needle)!r}")
        if self.sort is not Sort.RANK or self.descending:
            words.append(f"by {self.sort.value}{' descending' if self.descending else ''}")
        if self.folding:
            words.append("equal ranks folded")
        self.retitle(" · ".join(words))
        self.say_empty(f"no rank matches {fmt.clean(self.needle)!r}" if self.needle else RankTable.empty)
        self.set_items(rows)

    def columns(self) -> Sequence[Column]:
        hosts = {rank.host for rank in self.ranks}
        on_gpu = any(rank.gpu is not None for rank in self.ranks)
        columns = [Column("rank", "rank", 5, right=True)]
        if len(hosts) > 1 or self.size.width > 110:
            columns.append(Column("host", "host", min(16, max([4, *map(len, hosts)])), drop=5))
        columns += [Column("bar", "memory", 8, drop=6), Column("memory", "GB", 10, drop=2)]
        if on_gpu:
            columns += [
                Column("util", "util", 5, right=True, drop=7),
                Column("power", "power", 5, right=True, drop=8),
            ]
        else:
            columns.append(Column("cpu", "cpu", 5, right=True, drop=7))
        columns += [
            Column("speed", "tok/s", 7, right=True),
            Column("step", "step", 6, right=True),
            Column("step_s", "step s", 6, right=True, drop=3),
            *([Column("mfu", "MFU", 4, right=True, drop=11)] if self.mfu_s else []),
            Column("wait", "wait", 6, right=True, drop=9),
            Column("loss", "loss", 6, right=True, drop=10),
            Column("state", "state", 14, grow=True),
        ]
        return columns

    def header_style(self, column: Column) -> Style:
        keys = {Sort.RANK: "rank", Sort.STEP: "step", Sort.SPEED: "speed", Sort.STEP_TIME: "step_s"}
        keys |= {Sort.MEMORY: "memory", Sort.STATE: "state"}
        return theme.ACCENT if keys[self.sort] == column.key else theme.DIM

    def identity(self, item: Row) -> Hashable:
        match item:
            case RankRow(state=state):
                return state.rank
            case GroupRow(title=title):
                return title
        return "folded"

    def cells(self, item: Row, columns: Sequence[Column]) -> Line:
        match item:
            case RankRow():
                return tuple(self._rank_cell(item, column.key) for column in columns)
            case GroupRow():
                title = fmt.clean(item.title) or "?"
                text = f"{title}: {fmt.plural(item.count, 'rank')}, {item.differing} differ"
                return ((text, theme.ACCENT_BOLD),)
            case FoldedRow():
                return self._folded_cells(item, columns)
        raise TypeError(item)

    def _folded_cells(self, row: FoldedRow, columns: Sequence[Column]) -> Line:
        example = row.ranks[0]
        names = fmt.ranks(rank.rank for rank in row.ranks)
        text = f"{fmt.plural(len(row.ranks), 'rank')} as the median: {names}"
        cells = []
        for column in columns:
            match column.key:
                case "rank":
                    cells.append((f"{len(row.ranks)}{theme.GLYPHS.times}", theme.DIM))
                case "state":
                    cells.append((text, theme.DIM))
                case "speed":
                    cells.append((fmt.rate(row.medians.tokens_per_s), theme.DIM))
                case "step_s":
                    cells.append((_step_time(row.medians.step_s), theme.DIM))
                case "step":
                    cells.append((fmt.number(row.medians.step), theme.DIM))
                case "host":
                    hosts = {rank.host for rank in row.ranks}
                    cells.append((example.host if len(hosts) == 1 else f"{len(hosts)} hosts", theme.DIM))
                case key:
                    cells.append((self._rank_cell(RankRow(example), key)[0], theme.DIM))
        return tuple(cells)

    def _rank_cell(self, row: RankRow, key: str) -> tuple[str, Style]:
        rank, gpu = row.state, row.state.gpu
        match key:
            case "rank":
                return str(rank.rank), theme.BOLD
            case "host":
                return fmt.clean(rank.host), theme.DIM
            case "bar":
                if not rank.memory_used or not rank.memory_total:
                    return "", theme.DIM
                share = rank.memory_used / rank.memory_total
                style = theme.fullness(share)
                return fmt.bar(share, 8, theme.GLYPHS.blocks), style
            case "memory":
                total = f"/{fmt.gb(rank.memory_total)}" if rank.memory_used and rank.memory_total else ""
                return f"{fmt.gb(rank.memory_used)}{total}", theme.TEXT
            case "cpu":
                return fmt.UNKNOWN if rank.cpu is None else f"{rank.cpu:.0f}%", theme.TEXT
            case "util":
                unsure = "?" if rank.gpu_unsure else ""
                if gpu is None or gpu.util is None:
                    return fmt.UNKNOWN + unsure, theme.TEXT
                return f"{gpu.util}%{unsure}", theme.WARN if unsure else theme.TEXT
            case "power":
                return (
                    fmt.UNKNOWN if gpu is None or gpu.power_w is None else f"{gpu.power_w:.0f} W",
                    theme.TEXT,
                )
            case "speed":
                mark = theme.GLYPHS.slow if row.slow else ""
                return f"{fmt.rate(rank.tokens_per_s)}{mark}", theme.WARN if row.slow else theme.TEXT
            case "step":
                return fmt.number(rank.step), theme.TEXT
            case "step_s":
                return _step_time(rank.step_s), theme.TEXT
            case "mfu":
                useful = self.mfu_s / rank.step_s if self.mfu_s and rank.step_s else None
                return fmt.percent(useful), theme.DIM
            case "wait":
                return fmt.seconds(rank.data_s) if rank.data_s else fmt.UNKNOWN, theme.DIM
            case "loss":
                return fmt.loss(rank.loss), theme.TEXT
        return self._state_cell(row)

    def _state_cell(self, row: RankRow) -> tuple[str, Style]:
        rank, gpu = row.state, row.state.gpu
        symbol, style = STATE_LOOK.get(rank.state, (theme.GLYPHS.waiting, theme.DIM))
        words = rank.state.value
        if rank.state is RankPhase.COMPUTE and rank.phase:
            words = fmt.clean(rank.phase)
        if gpu is not None and gpu.state != "ok":
            symbol, style, words = theme.GLYPHS.no, theme.BAD, f"GPU {gpu.state}: {fmt.clean(gpu.error)}"
        elif row.slow or row.note:
            cause = _OWN_RANK.sub("", row.note) or (
                ", ".join(gpu.throttle) if gpu is not None and gpu.throttle else ""
            )
            words = (
                f"slow: {cause}" if row.slow and cause and "slow" not in cause else cause or f"slow, {words}"
            )
            if rank.state not in (RankPhase.DEAD, RankPhase.STALLED):
                symbol, style = theme.GLYPHS.tight, theme.WARN
        age = rank.heartbeat_age_s
        if age is not None and age > LATE_S and rank.state not in (RankPhase.FINISHED, RankPhase.DEAD):
            words += f", silent {fmt.duration(age)}"
        return f"{symbol} {words}", style

    def action_sort(self) -> None:
        order = list(Sort)
        self.sort = order[(order.index(self.sort) + 1) % len(order)]
        self._arrange()
        self.invalidate()

    def action_reverse(self) -> None:
        self.descending = not self.descending
        self._arrange()
        self.invalidate()

    def action_fold(self) -> None:
        self.fold = not self.folding
        self._arrange()

    def action_group(self) -> None:
        self.group = {"": "node", "node": "state", "state": ""}[self.group]
        self._arrange()

    def set_needle(self, needle: str) -> None:
        self.needle = needle
        self._arrange()

    def header_clicked(self, column: Column) -> None:
        keys: dict[str, Sort] = {"rank": Sort.RANK, "step": Sort.STEP, "speed": Sort.SPEED}
        keys |= {"step_s": Sort.STEP_TIME, "memory": Sort.MEMORY, "bar": Sort.MEMORY, "state": Sort.STATE}
        if (sort := keys.get(column.key)) is not None:
            self.descending = self.sort is sort and not self.descending
            self.sort = sort
            self._arrange()
            self.invalidate()

    def on_resize(self) -> None:
        super().on_resize()
        if self.ranks:
            self._arrange()


def _step_time(step_s: float | None) -> str:
    return fmt.UNKNOWN if not step_s else f"{step_s:.2f}" if step_s < 100 else f"{step_s:.0f}"
