"""The rank table: one row a rank, equal ranks folded into one, so that only what differs is loud."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

from ftdash.monitor.reader import spread_s
from ftdash.monitor.state import Alert, RankPhase, RankState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

SLOW_FACTOR = 1.3  # a rank this much slower than the median of its peers is marked
EQUAL_SHARE = 0.1  # figures within this share of the median count as equal
LATE_S = 15.0  # a heartbeat older than this is worth a word


class Sort(StrEnum):
    RANK = "rank"
    STEP = "step"
    SPEED = "tok/s"
    STEP_TIME = "step s"
    MEMORY = "memory"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over the ranks that have the figure; None when none has."""

    tokens_per_s: float | None
    step_s: float | None
    memory: float | None
    step: float | None

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> Medians:
        def median(values: Sequence[float]) -> float | None:
            return float(statistics.median(values)) if values else None

        return cls(
            median([rank.tokens_per_s for rank in ranks if rank.tokens_per_s is not None]),
            median([rank.step_s for rank in ranks if rank.step_s]),
            median([rank.memory_used for rank in ranks if rank.memory_used]),
            median([rank.step for rank in ranks]),
        )


def slow_ranks(ranks: Sequence[RankState], medians: Medians) -> set[int]:
    """Ranks slower than their peers by SLOW_FACTOR; one alone has no peers.

    Peers of one sharded step share step_s, so that throughput counts too.
    """
    if len(ranks) < 2:
        return set()
    longest_s = (medians.step_s or math.inf) * SLOW_FACTOR
    fewest = (medians.tokens_per_s or 0.0) / SLOW_FACTOR
    return {
        rank.rank
        for rank in ranks
        if (rank.step_s is not None and rank.step_s > longest_s)
        or (rank.tokens_per_s is not None and rank.tokens_per_s < fewest)
    }


@dataclass(frozen=True, slots=True)
class Standing:
    """How ranks stand to one another: medians, and who is slower than its peers."""

    medians: Medians
    slow: set[int]

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> Standing:
        medians = Medians.of(ranks)
        return cls(medians, slow_ranks(ranks, medians))


ORDINARY = frozenset((RankPhase.COMPUTE, RankPhase.COMMUNICATION, RankPhase.FINISHED))


def differing_ranks(ranks: Sequence[RankState], medians: Medians) -> set[int]:
    """Ranks of which something differs enough to deserve a line of its own."""
    least_s, most_s = _around(medians.step_s)
    least, most = _around(medians.memory)
    apart = 1 + spread_s(len(ranks)) / (medians.step_s or math.inf)
    first = -math.inf if medians.step is None else medians.step - apart
    last = math.inf if medians.step is None else medians.step + apart
    usual = _usual_throttles(ranks)
    return {
        rank.rank
        for rank in ranks
        if not (
            rank.state in ORDINARY
            and first <= rank.step <= last
            and (rank.step_s is None or least_s <= rank.step_s <= most_s)
            and (rank.memory_used is None or least <= rank.memory_used <= most)
            and (rank.gpu is None or (rank.gpu.state == "ok" and rank.gpu.throttle in usual))
        )
    }


def _usual_throttles(ranks: Sequence[RankState]) -> set[tuple[str, ...]]:
    """Combinations of throttle reasons that each half of the GPUs show, as the power cap often is."""
    shown = Counter(rank.gpu.throttle for rank in ranks if rank.gpu is not None)
    reasons: Counter[str] = Counter()
    for throttle, gpus in shown.items():
        for reason in throttle:
            reasons[reason] += gpus
    half = shown.total() / 2
    return {throttle for throttle in shown if all(reasons[reason] >= half for reason in throttle)}


def _around(median: float | None) -> tuple[float, float]:
    """What counts as equal to a median; everything where there is none."""
    if not median:
        return -math.inf, math.inf
    return median * (1 - EQUAL_SHARE), median * (1 + EQUAL_SHARE)


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, its alerts and how it stands to the median."""

    state: RankState
    slow: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Ranks that do the same at the same pace, with their medians; the run's if it folds nearly all."""

    ranks: tuple[RankState, ...]
    medians: Medians


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A heading: a node or a state, and how many ranks it holds."""

    title: str
    count: int
    differing: int


Row = RankRow | FoldedRow | GroupRow


def arrange(
    ranks: Sequence[RankState],
    alerts: Sequence[Alert] = (),
    *,
    sort: Sort = Sort.RANK,
    descending: bool = False,
    needle: str = "",
    fold: bool = False,
    group: str = "",
    standing: Standing | None = None,
) -> list[Row]:
    """The rows to show. `needle` filters by rank, host, device, state or note; `group`: "", node, state."""
    standing = standing or Standing.of(ranks)
    medians, slow, world = standing.medians, standing.slow, len(ranks)
    notes: dict[int, str] = {}
    for alert in alerts:
        for number in alert.ranks if len(alert.ranks) < max(2, len(ranks)) else ():
            notes.setdefault(number, alert.text)
    loud = slow.union(notes, differing_ranks(ranks, medians))

    def row(rank: RankState) -> RankRow:
        return RankRow(rank, rank.rank in slow, fmt.clean(notes.get(rank.rank, "")))

    if needle:
        wanted = needle.lower().split()
        ranks = [rank for rank in ranks if all(part in _haystack(row(rank)) for part in wanted)]
    if sort is not Sort.RANK or descending:
        ranks = sorted(ranks, key=lambda rank: (_sort_key(rank, sort), rank.rank), reverse=descending)

    def rows(members: Sequence[RankState]) -> list[Row]:
        quiet = [rank for rank in members if rank.rank not in loud] if fold else []
        if len(quiet) < 2:
            return [row(rank) for rank in members]
        shown: list[Row] = [row(rank) for rank in members if rank.rank in loud]
        nearly_all = len(quiet) > 0.9 * world
        return [*shown, FoldedRow(tuple(quiet), medians if nearly_all else Medians.of(quiet))]

    if not group:
        return rows(ranks)
    grouped: dict[str, list[RankState]] = {}
    for rank in ranks:
        grouped.setdefault(rank.host if group == "node" else rank.state.value, []).append(rank)
    result: list[Row] = []
    for title, members in grouped.items():
        result.append(GroupRow(title, len(members), sum(rank.rank in loud for rank in members)))
        result.extend(rows(members))
    return result


def _haystack(row: RankRow) -> str:
    rank = row.state
    host = rank.host or "?"
    slow = "slow" if row.slow else ""
    return f"{rank.rank} {host} {rank.device} {rank.state.value} {rank.phase} {row.note} {slow}".lower()


def _sort_key(rank: RankState, sort: Sort) -> float | str:
    match sort:
        case Sort.STEP:
            return float(rank.step)
        case Sort.SPEED:
            return -1.0 if rank.tokens_per_s is None else rank.tokens_per_s
        case Sort.STEP_TIME:
            return rank.step_s or 0.0
        case Sort.MEMORY:
            return float(rank.memory_used or 0)
        case Sort.STATE:
            return rank.state.value
        case _:
            return float(rank.rank)


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

    @property
    def folding(self) -> bool:
        if self.fold is not None:
            return self.fold
        return len(self.ranks) > max(16, self.size.height - 1)

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
            cause = row.note or (", ".join(gpu.throttle) if gpu is not None and gpu.throttle else "")
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
