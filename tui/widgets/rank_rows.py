"""How ranks become the rows of a table: who differs, who is slow, what folds into one line."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ftdash.monitor.reader import spread_s
from ftdash.monitor.state import Alert, RankPhase, RankState
from ftdash.tui import format as fmt

SLOW_FACTOR = 1.3  # a rank this much slower than the median of its peers is marked
EQUAL_SHARE = 0.1  # figures within this share of the median count as equal


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
    shown = Counter([rank.gpu.throttle for rank in ranks if rank.gpu is not None])
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
