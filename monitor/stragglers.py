"""Which rank is slow, in which phase of the step, and by how much.

Ranks of a synchronous run wait for one another, so step times are equal and say nothing, and the phase
that waits is long on the innocent ranks. A straggler is therefore a rank that in some phase takes longer
than the median of its peers *and* comes out of that phase later than they do. A rank that merely waited
comes out together with the others. A step begins late on a rank whose optimizer was slow in the step before,
and the others wait for it in the backward: lateness counts from the end of the last backward. After the
optimizer itself nobody waits within the step, and the clock says who was late.

The score is robust: per step the logarithm of the rank's time over the median of its peers, the median of
these over a window, in units of the noise that the run itself shows from step to step (median absolute
successive difference, which neither a constant offset nor a single spike moves).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from ftdash.monitor.records import Step

PHASES = ("data", "forward", "backward", "optimizer")
WINDOWS = (8, 32, 64)  # steps: the short window finds 1.3 within ten steps, the long ones what is noisier
STEADY = 0.1  # noise up to which a short window is enough; ranks that share processors are less steady
DOUBTED = 16  # steps that it takes otherwise, where it costs less than
HEAVY = 0.25  # of the step's time
OFTEN = 0.3  # of 32 steps: a rank that is held up again and again, and else is like the others
OFTEN_SLOWDOWN = math.log(1.3)  # in each of them
LASTING = 0.1  # of the step's time: what only the longest window finds has to cost so much
SLOWDOWN = 1.15  # smaller differences between ranks are not worth a word
SIGMAS = 5.0
NOISE_FLOOR = 0.02  # of a phase's time: nobody's steps are steadier than this for long
MATERIAL = 0.02  # of the step's time: a phase may be twice as slow and still cost nothing
KEPT_STEPS = 64
MANY_RANKS = 64
PENDING_STEPS = KEPT_STEPS  # steps that some ranks have not yet reported


class Timed(Protocol):
    """The parts of one step of one rank, as a step record has them."""

    @property
    def data_s(self) -> float: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def optimizer_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def t(self) -> float: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank. `slowdown` is its time over its peers' in `phase`, `excess_s` what it costs a step."""

    rank: int
    phase: str
    slowdown: float
    excess_s: float
    since_step: int
    step: int
    cause: str = ""
    host: str = ""
    or_earlier: bool = False  # slow from the first step that was compared


class _Row:
    """One phase of one step, all ranks: time spent in it, and when it ended."""

    __slots__ = ("_before", "_ended", "_usual_ends", "asked", "small", "spent", "usual")

    def __init__(self, spent: Sequence[float], before: Sequence[Sequence[float]], small: float) -> None:
        """`before`: the times of the phases before it, from the one in which ranks last met."""
        if min(spent) < 0:  # times from a log, whose clock was set back
            spent = [max(0.0, own) for own in spent]
        self.spent = spent
        self.small = small
        self._before = before
        self._ended: Sequence[float] = ()
        self.usual = _medians_of_others(spent)
        # Of many ranks some, evenly spread, tell how steady all are.
        self.asked = [self.ratio(i) for i in range(0, len(spent), max(1, len(spent) // MANY_RANKS))]
        self._usual_ends: list[float] = []

    def ratio(self, i: int) -> float:
        """Logarithm of the time of rank number `i` over its peers' median."""
        return math.log((self.spent[i] + self.small) / (self.usual[i] + self.small))

    def excess(self, i: int) -> float:
        """Seconds that rank number `i` spent beyond its peers' median."""
        return self.spent[i] - self.usual[i]

    def late(self, i: int) -> float:
        """Seconds by which it came out of the phase after them. Asked of few ranks, in few steps."""
        if not self._usual_ends:
            self._usual_ends = _medians_of_others(self.ended())
        return self.ended()[i] - self._usual_ends[i]

    def ended(self) -> Sequence[float]:
        """When each rank came out of the phase, in seconds since the phases before it began."""
        if not self._ended:
            self._ended = list(map(sum, zip(*self._before, self.spent, strict=True)))
        return self._ended


class _Phase:
    """One phase over the newest steps."""

    def __init__(self) -> None:
        self.rows: deque[_Row] = deque(maxlen=KEPT_STEPS)
        self.moved: deque[float] = deque(maxlen=KEPT_STEPS)  # median move since the step before

    def add(self, row: _Row) -> None:
        if self.rows:
            moves = map(operator.sub, row.asked, self.rows[-1].asked)
            self.moved.append(median(map(abs, moves)))
        self.rows.append(row)

    def noise(self) -> float:
        """Standard deviation of a log ratio, from moves between successive steps (1.4826 MAD over √2)."""
        if not self.moved:
            return NOISE_FLOOR
        return max(NOISE_FLOOR, 1.4826 * median(self.moved) / math.sqrt(2))

    def newest_sums(self, least: float) -> dict[int, float]:
        """Log ratios over the newest four steps added up, of the ranks with `least` or more of it."""
        newest = list(self.rows)[-4:]
        own = _products([(row.spent, row.small) for row in newest])
        usual: Iterable[float] = itertools.repeat(math.prod([row.usual[0] + row.small for row in newest]))
        if len(newest[0].spent) <= MANY_RANKS:  # else all have the same peers
            usual = _products([(row.usual, row.small) for row in newest])
        over = math.exp(least)
        return {
            i: math.log(product / limit)
            for i, (product, limit) in enumerate(zip(own, usual, strict=False))
            if product >= over * limit
        }

    def clear(self) -> None:
        self.rows.clear()
        self.moved.clear()


class StragglerDetector:
    """Fed with every step of every rank; keeps 64 steps whatever the run's length.

    A step is compared once all expected ranks have reported it; one that stays incomplete while 64
    later ones wait is dropped.
    """

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._members: frozenset[int] = frozenset()
        self._pending: dict[int, dict[int, Timed]] = {}
        self._phases = {phase: _Phase() for phase in PHASES}
        self._steps: deque[int] = deque(maxlen=KEPT_STEPS)
        self._step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._tokens: deque[Sequence[int]] = deque(maxlen=KEPT_STEPS)
        self._times: deque[Sequence[float]] = deque(maxlen=KEPT_STEPS)  # when each rank ended the step
        self._tokens_per_step: dict[int, float] = {}
        self._tokens_step = -1  # the step as of which they are
        self._since: dict[tuple[int, str], int] = {}
        self._seen: dict[tuple[int, str], int] = {}  # the step at which each was found last
        self._first_step = -1
        self._found: tuple[Straggler, ...] = ()
        self._compared_step = -1
        self._judged_step = -1  # of those compared, the newest that was asked about

    @property
    def found(self) -> tuple[Straggler, ...]:
        """The stragglers as of the newest step that all ranks reported."""
        if self._judged_step < self._compared_step and self._steps:
            self._found = tuple(self._stragglers(self._steps[-1]))
        self._judged_step = self._compared_step
        return self._found

    def expect(self, ranks: Iterable[int]) -> None:
        """The ranks that take part. A change of the set starts the comparison anew."""
        wanted = tuple(sorted(ranks))
        if not wanted or wanted == self._ranks:
            return  # when all are gone, what was found last stays true
        self._ranks, self._members = wanted, frozenset(wanted)
        self._forget()
        self._judged_step = self._compared_step
        self._compare_ready()

    def restart(self, rank: int) -> None:
        """A rank takes steps again that it had taken: what it reported is void, all starts anew."""
        for reports in self._pending.values():
            reports.pop(rank, None)
        self._forget()
        self._compared_step = self._judged_step = -1

    def _forget(self) -> None:
        for phase in self._phases.values():
            phase.clear()
        self._steps.clear()
        self._step_s.clear()
        self._tokens.clear()
        self._times.clear()
        self._tokens_step = -1
        self._since.clear()
        self._seen.clear()
        self._first_step = -1
        self._found = ()

    def add(self, rank: int, step: int, times: Timed) -> None:
        """One step of one rank. Repeated and older steps are ignored."""
        self._report(step, ((rank, times),))

    def add_all(self, ranks: Sequence[int], steps: Sequence[Step]) -> None:
        """One step of each of these ranks; most often all are of one step."""
        numbers = {step.step for step in steps}
        if len(numbers) == 1:
            self._report(numbers.pop(), zip(ranks, steps, strict=True))
            return
        for rank, step in zip(ranks, steps, strict=True):
            self.add(rank, step.step, step)

    def _report(self, step: int, times: Iterable[tuple[int, Timed]]) -> None:
        if step <= self._compared_step:
            return
        reports = self._pending.get(step)
        if reports is None:
            reports = self._pending[step] = {}
        reports.update(times)
        if len(reports) >= len(self._ranks) or len(self._pending) > PENDING_STEPS:
            self._compare_ready()

    def tokens_per_step(self) -> dict[int, float]:
        """Mean label tokens a step by rank over the newest 32 steps; empty before there are eight of them."""
        newest = list(self._tokens)[-WINDOWS[1] :]
        if len(newest) < WINDOWS[0]:
            return {}
        if self._tokens_step != self._steps[-1]:
            self._tokens_step = self._steps[-1]
            sums = map(sum, zip(*newest, strict=True))
            self._tokens_per_step = {
                rank: tokens / len(newest) for rank, tokens in zip(self._ranks, sums, strict=True)
            }
        return self._tokens_per_step

    def _compare_ready(self) -> None:
        if not self._ranks:
            if len(self._pending) > PENDING_STEPS:
                del self._pending[min(self._pending)]
            return
        while self._pending:
            step = min(self._pending)
            reports = self._pending[step]
            if reports.keys() >= self._members:
                self._compare(step, [reports[rank] for rank in self._ranks])
            elif len(self._pending) <= PENDING_STEPS:
                break
            del self._pending[step]

    def _compare(self, step: int, times: list[Timed]) -> None:
        """Take one step of all ranks into the windows."""
        self._compared_step = step
        if len(times) < 2:
            return
        step_s = median([entry.step_s for entry in times])
        if step_s <= 0:
            return
        if not self._steps:
            self._first_step = step
        self._steps.append(step)
        self._step_s.append(step_s)
        self._tokens.append([entry.tokens for entry in times])
        self._times.append([entry.t for entry in times])
        small = 0.005 * step_s  # added to both sides: a phase that takes nothing has no ratio
        data = [entry.data_s for entry in times]
        forward = [entry.forward_s for entry in times]
        backward = [entry.backward_s for entry in times]
        optimizer = [entry.optimizer_s for entry in times]
        last = self._phases["optimizer"].rows
        carried = [last[-1].spent] if last and self._steps[-2] == step - 1 else []
        self._phases["data"].add(_Row(data, carried, small))
        self._phases["forward"].add(_Row(forward, [*carried, data], small))
        self._phases["backward"].add(_Row(backward, [*carried, data, forward], small))
        self._phases["optimizer"].add(_Row(optimizer, [data, forward, backward], small))

    def _stragglers(self, step: int) -> Iterable[Straggler]:
        slow: dict[int, Straggler] = {}
        for name, phase in self._phases.items():
            noise = phase.noise()
            # Saves the rest for the many ranks that are not slow at all.
            sums = phase.newest_sums(min(math.log(SLOWDOWN) * 4 / 3, OFTEN_SLOWDOWN))
            for window in WINDOWS:
                if len(phase.rows) < window:
                    continue
                needed = max(math.log(SLOWDOWN), SIGMAS * 1.2533 * noise / math.sqrt(window))
                suspects = [i for i, newest in sums.items() if newest >= needed * 4 / 3]
                for straggler in self._over(name, phase, suspects, needed, noise, window, step):
                    known = slow.get(straggler.rank)
                    if known is None or straggler.excess_s > known.excess_s:
                        slow[straggler.rank] = straggler
            often = [i for i, newest in sums.items() if newest >= OFTEN_SLOWDOWN]
            suspects = [i for i in often if self._ranks[i] not in slow]
            for straggler in self._held_up(name, phase, suspects, step):
                slow.setdefault(straggler.rank, straggler)
        for key in [key for key, seen in self._seen.items() if step - seen > WINDOWS[1]]:
            del self._since[key], self._seen[key]
        return sorted(slow.values(), key=lambda entry: -entry.excess_s)

    def _held_up(self, name: str, phase: _Phase, suspects: Sequence[int], step: int) -> Iterable[Straggler]:
        """Suspects that hold the others up in many of the newest 32 steps, as none of the others does."""
        rows = list(phase.rows)[-WINDOWS[1] :]
        if len(rows) < WINDOWS[1] or not suspects:
            return
        step_s = median(list(self._step_s)[-len(rows) :])

        def hits(i: int) -> list[_Row]:
            slow = [row for row in rows if row.ratio(i) > OFTEN_SLOWDOWN]
            if len(slow) < OFTEN * len(rows) / 8:
                return slow
            return [row for row in slow if row.late(i) > 0.5 * row.excess(i) > 0.5 * LASTING * step_s]

        for i in suspects:
            held = hits(i)
            if len(held) < OFTEN * len(rows):
                continue
            if any(len(hits(other)) > len(held) / 8 for other in range(len(self._ranks)) if other != i):
                continue
            rank = self._ranks[i]
            excess = sum(row.excess(i) for row in held) / len(rows)
            if excess < LASTING * step_s:
                continue
            usual = sum(row.usual[i] for row in rows) / len(rows)
            began = self._steps[rows.index(held[0]) - len(rows)]
            since = self._since.setdefault((rank, name), began)
            self._seen[rank, name] = step
            early = since - self._first_step < WINDOWS[0]
            yield Straggler(rank, name, 1 + excess / usual, excess, since, step, or_earlier=early)

    def _late_at_end(self, i: int, steps: int) -> float:
        """Seconds by which a rank ended the newest steps after its peers, by their clocks."""
        newest = list(self._times)[-steps:]
        return median(times[i] - median([*times[:i], *times[i + 1 :]]) for times in newest)

    def _first_over(self, rows: Sequence[_Row], i: int, began: int, ratio: float) -> int:
        """The step at which it began, `began` from the end at the latest: nobody may have asked for long."""
        first = len(rows) + began
        while first > 0 and self._steps[first - 1] > self._judged_step and rows[first - 1].ratio(i) > ratio:
            first -= 1
        return self._steps[first]

    def _over(
        self,
        name: str,
        phase: _Phase,
        suspects: Sequence[int],
        needed: float,
        noise: float,
        window: int,
        step: int,
    ) -> Iterable[Straggler]:
        """Suspects that are slow over the window: by the median, and in nearly every step of it."""
        if not suspects:
            return
        kept = list(phase.rows)
        rows = kept[-window:]
        step_s = median(list(self._step_s)[-window:])
        for i in suspects:
            rank = self._ranks[i]
            over = [row.ratio(i) for row in rows]
            if not _keeps_over(over, needed):
                continue
            began = next(k for k, ratio in enumerate(over) if ratio > needed / 3)
            excess = median(row.excess(i) for row in rows[began:])
            late = median(row.late(i) for row in rows[began:])
            if name == PHASES[-1]:
                late = max(late, self._late_at_end(i, window - began))
            if excess < MATERIAL * step_s or late < 0.5 * excess:
                continue
            if window > WINDOWS[1] and excess < LASTING * step_s:
                continue
            if window < DOUBTED and noise > STEADY and excess < HEAVY * step_s:
                before = [row.ratio(i) for row in kept[-DOUBTED:]]
                if len(before) < DOUBTED or not _keeps_over(before, needed):
                    continue
            since = self._since.setdefault(
                (rank, name), self._first_over(kept, i, began - window, needed / 3)
            )
            self._seen[rank, name] = step
            slowdown = math.exp(median(over[began:]))
            early = since - self._first_step < WINDOWS[0]
            yield Straggler(rank, name, slowdown, excess, since, step, or_earlier=early)


def _keeps_over(ratios: Sequence[float], needed: float) -> bool:
    """Whether the median is, and nearly every step a little: of many steps fewer, as each has its noise."""
    share = 0.85 if len(ratios) <= WINDOWS[1] else 0.7
    return median(ratios) >= needed and sum(ratio > needed / 3 for ratio in ratios) >= share * len(ratios)


def _products(columns: Sequence[tuple[Sequence[float], float]]) -> Iterable[float]:
    """Of each rank, the product of its times, a little added to each."""
    return map(math.prod, zip(*[[time + small for time in times] for times, small in columns], strict=True))


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all the other ones; of all values where one more makes no difference."""
    ordered = sorted(values)
    if len(ordered) > MANY_RANKS:
        return [ordered[len(ordered) // 2]] * len(ordered)
    place: dict[float, int] = {}
    for i, value in enumerate(ordered):
        place.setdefault(value, i)
    count = len(values) - 1
    low, high = (count - 1) // 2, count // 2

    def at(skip: int, i: int) -> float:
        return ordered[i + 1] if i >= skip else ordered[i]

    return [(at(place[v], low) + at(place[v], high)) / 2 for v in values]
