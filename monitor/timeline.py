"""The run over its steps in bounded memory: each of the newest steps by itself, older ones merged."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftdash.monitor.records import Number, Step, to_float
from ftdash.monitor.state import Point

MOST_WAITING = 4096


class OldStep(Protocol):
    """What history keeps of a step record."""

    step: int
    t: float
    loss: Number | None
    tokens: int
    step_s: float


def aligned(points: Sequence[Point], other: Sequence[Point]) -> list[Point | None]:
    """For each point of a run, the point of another run after as many tokens; None beyond that one's end.

    Where one of them counted no tokens, after as many steps.
    """
    counted = bool(points and other and points[-1].tokens and other[-1].tokens)
    places = [point.tokens if counted else point.step for point in other]
    found: list[Point | None] = []
    for point in points:
        index = bisect_left(places, point.tokens if counted else point.step)
        found.append(other[index] if index < len(other) else None)
    return found


@dataclass(slots=True)
class Bucket:
    """Sums over the step records of one step, or of several neighbouring ones, of all ranks."""

    t: float = 0.0
    records: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    grad_norm: float | None = None
    memory: int = 0  # torch's, of the largest rank
    rss: int = 0  # of the largest process, where there is no GPU

    def add(self, other: Bucket) -> None:
        self.t = max(self.t, other.t)
        self.records += other.records
        self.losses += other.losses
        self.loss_sum += other.loss_sum
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.grad_norm = other.grad_norm if other.grad_norm is not None else self.grad_norm
        self.memory = max(self.memory, other.memory)
        self.rss = max(self.rss, other.rss)

    def add_old(self, records: Sequence[OldStep]) -> int:
        """Records as written, the newest last. Column by column: a long history has millions of them.
        Returns their tokens."""
        self.t = max(self.t, records[-1].t)
        self.records += len(records)
        tokens = sum([record.tokens for record in records])
        self.tokens += tokens
        self.seconds += sum([record.step_s for record in records])
        losses = [loss for record in records if (loss := record.loss) is not None]
        try:
            self.loss_sum += sum(losses)  # type: ignore[arg-type]
        except TypeError:  # "nan", "inf" or text that is no number
            losses = [loss for stored in losses if (loss := to_float(stored)) is not None]
            self.loss_sum += sum(losses)  # type: ignore[arg-type]
        self.losses += len(losses)
        return tokens

    def add_steps(self, records: Sequence[Step]) -> None:
        """Full records, of any ranks."""
        self.add_old(records)
        self.t = max(self.t, max([record.t for record in records]))
        self.memory = max(self.memory, max([record.peak_reserved or record.reserved for record in records]))
        norms = (record.grad_norm for record in reversed(records) if record.grad_norm is not None)
        if (norm := next(norms, None)) is not None:
            self.grad_norm = to_float(norm)

    def point(self, step: int, ranks: int, tokens_before: int) -> Point:
        """The bucket as a point. Throughput: the mean rank's tokens per second times the number of ranks."""
        return Point(
            step=step,
            t=self.t,
            loss=self.loss_sum / self.losses if self.losses else None,
            tokens_per_s=ranks * self.tokens / self.seconds if self.seconds > 0 else None,
            memory_used=self.memory or self.rss or None,
            grad_norm=self.grad_norm,
            tokens=tokens_before + self.tokens,
        )


class Series:
    """At most `2 * limit` buckets of `stride` steps each: when there are more, neighbours are merged."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stride = 1
        self.buckets: dict[int, Bucket] = {}

    def bucket(self, step: int) -> Bucket:
        key = step // self.stride
        found = self.buckets.get(key)
        if found is None:
            if len(self.buckets) >= 2 * self.limit:
                self._merge()
                key = step // self.stride
                found = self.buckets.get(key)
            if found is None:
                found = self.buckets[key] = Bucket()
        return found

    def _merge(self) -> None:
        while len(self.buckets) > self.limit:
            self.stride *= 2
            old, self.buckets = self.buckets, {}
            for key, bucket in old.items():
                merged = self.buckets.get(key // 2)
                if merged is None:
                    self.buckets[key // 2] = bucket
                else:
                    merged.add(bucket)


class Timeline:
    """A bucket for each of the newest steps, `limit` to `2 * limit` of them, and a series of those before."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.newest: dict[int, Bucket] = {}
        self.old = Series(limit)
        self._newest_from = -math.inf  # what is before belongs to the series
        self._points: list[Point] = []
        self._points_for = (0, 1)  # ranks, stride
        self._changed_from = math.inf  # the first step that changed since the points were made
        self._waiting: dict[int, list[Step]] = {}  # not yet added up
        self._waiting_records = 0

    def add(self, record: Step) -> None:
        """A full record of any rank. Those of one step are added up together, which is far cheaper."""
        waiting = self._waiting.get(record.step)
        if waiting is None:
            waiting = self._waiting[record.step] = []
        waiting.append(record)
        self._waiting_records += 1
        if self._waiting_records >= MOST_WAITING:
            self._add_up()

    def add_all(self, records: Sequence[Step]) -> None:
        """Full records of any ranks; most often all are of one step."""
        steps = {record.step for record in records}
        if len(steps) > 1:
            for record in records:
                self.add(record)
        elif steps:
            self._waiting.setdefault(steps.pop(), []).extend(records)
            self._waiting_records += len(records)
            if self._waiting_records >= MOST_WAITING:
                self._add_up()

    def note_rss(self, step: int, rss: int) -> None:
        """Resident bytes of a rank's process in a step, whose records may not have been read yet."""
        bucket = self._bucket(step)
        bucket.rss = max(bucket.rss, rss)

    def _add_up(self) -> None:
        for step, records in self._waiting.items():
            self._bucket(step).add_steps(records)
        self._waiting.clear()
        self._waiting_records = 0

    def _bucket(self, step: int) -> Bucket:
        """The bucket that a record of this step is to be added to."""
        if step < self._changed_from:
            self._changed_from = step
        found = self.newest.get(step)
        if found is not None:
            return found
        if step >= self._newest_from:
            found = self.newest[step] = Bucket()
            if len(self.newest) <= 2 * self.limit:
                return found
            self._retire()
            if step >= self._newest_from:
                return found
        return self.old.bucket(step)

    def add_old(self, records: Sequence[OldStep]) -> int:
        """Records of one rank, older than those that came one by one; returns their tokens."""
        self._add_up()
        tokens = 0
        steps = [record.step for record in records]
        in_order = steps == sorted(steps)
        start = 0
        while start < len(records):
            step = steps[start]
            bucket = self._bucket(step)
            end = start + 1
            if in_order:
                end = bisect_left(steps, self._bucket_end(step), end)
            tokens += bucket.add_old(records[start:end])
            start = end
        return tokens

    def _bucket_end(self, step: int) -> float:
        """The first step after those that share a bucket with this one."""
        if step >= self._newest_from:
            return step + 1
        return min((step // self.old.stride + 1) * self.old.stride, self._newest_from)

    def points(self, ranks: int) -> tuple[Point, ...]:
        """The whole run, coarse where it is old and step by step where it is new; cumulative tokens."""
        self._add_up()
        points = self._points
        if self._points_for != (ranks, self.old.stride):
            self._points_for = (ranks, self.old.stride)
            points.clear()
        while points and points[-1].step >= self._changed_from:
            points.pop()
        self._changed_from = math.inf
        shown = points[-1].step if points else -math.inf
        stride = self.old.stride
        for key in sorted(self.old.buckets) if shown < self._newest_from - 1 else ():
            step = min(key * stride + stride - 1, int(self._newest_from) - 1)
            if step > shown and self.old.buckets[key].records:
                points.append(self.old.buckets[key].point(step, ranks, points[-1].tokens if points else 0))
        for step in sorted(step for step, bucket in self.newest.items() if step > shown and bucket.records):
            points.append(self.newest[step].point(step, ranks, points[-1].tokens if points else 0))
        return tuple(points)

    def tokens_per_step(self, ranks: int, steps: int = 20) -> float | None:
        """Mean of the label tokens of all ranks over the newest steps that `ranks` ranks have reported."""
        self._add_up()
        newest = sorted(self.newest)[-4 * steps :]
        whole = [bucket for step in newest if (bucket := self.newest[step]).records >= ranks][-steps:]
        return sum(bucket.tokens for bucket in whole) / len(whole) if whole else None

    def _retire(self) -> None:
        """Hand the older half of the newest steps to the series."""
        for step in sorted(self.newest)[: -self.limit]:
            self._changed_from = min(self._changed_from, step - step % self.old.stride)
            self.old.bucket(step).add(self.newest.pop(step))
            self._newest_from = step + 1
