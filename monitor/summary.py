"""What is kept of a run's telemetry: the last word of each rank and node, and series of bounded length."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ftdash.monitor.clockskew import SkewMeter
from ftdash.monitor.records import (
    Event,
    Exit,
    Experts,
    GpuSample,
    Meta,
    Node,
    RankSample,
    Record,
    Step,
    to_float,
)
from ftdash.monitor.state import Point

RECENT_STEPS = 64  # full step records kept per rank
RECENT_EVENTS = 64


class LeanRecord(msgspec.Struct, tag_field="kind", gc=False):
    """Base of the records as history needs them: what is not named here is not decoded."""


class LeanStep(LeanRecord, tag="step"):
    step: int
    t: float
    loss: float | str | None = None
    tokens: int = 0
    step_s: float = 0.0


class LeanExperts(LeanRecord, tag="experts"):
    step: int
    layer: int
    counts: msgspec.Raw


class LeanMeta(LeanRecord, tag="meta"):
    """Only its place in the file matters: it is decoded in full from there."""


class LeanEvent(LeanRecord, tag="event"):
    t: float
    severity: str
    code: str
    text: str
    rank: int | None = None


lean_decoder = msgspec.json.Decoder(LeanStep | LeanExperts | LeanMeta | LeanEvent)
_counts_decoder = msgspec.json.Decoder(list[int])


@dataclass(slots=True)
class Bucket:
    """Sums over the step records of `stride` neighbouring steps, all ranks."""

    t: float = 0.0
    records: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    grad_norm: float | None = None
    memory: int = 0

    def add(self, other: Bucket) -> None:
        self.t = max(self.t, other.t)
        self.records += other.records
        self.losses += other.losses
        self.loss_sum += other.loss_sum
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.grad_norm = other.grad_norm if other.grad_norm is not None else self.grad_norm
        self.memory = max(self.memory, other.memory)

    def point(self, step: int, ranks: int, tokens_before: int) -> Point:
        """The bucket as a point. Throughput: the mean rank's tokens per second times the number of ranks."""
        return Point(
            step=step,
            t=self.t,
            loss=self.loss_sum / self.losses if self.losses else None,
            tokens_per_s=ranks * self.tokens / self.seconds if self.seconds > 0 else None,
            memory_used=self.memory or None,
            grad_norm=self.grad_norm,
            tokens=tokens_before + self.tokens,
        )


class Series:
    """The run over its steps in at most `2 * limit` buckets: when there are more, neighbours are merged."""

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


class Window:
    """The run over its newest steps, one bucket a step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.buckets: dict[int, Bucket] = {}

    def bucket(self, step: int) -> Bucket:
        found = self.buckets.get(step)
        if found is None:
            found = self.buckets[step] = Bucket()
            if len(self.buckets) > 2 * self.steps:
                for old in sorted(self.buckets)[: -self.steps]:
                    del self.buckets[old]
        return found


@dataclass(slots=True)
class RankSummary:
    """The last word of one rank, its newest steps, and what its agent saw of its process."""

    rank: int
    meta: Meta | None = None
    last: Step | None = None
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    tokens: int = 0
    sample: RankSample | None = None
    sample_host: str = ""
    exit: Exit | None = None
    experts: dict[int, Experts] = field(default_factory=dict)
    _paced_at: Step | None = None
    _pace: tuple[float | None, float | None] = (None, None)

    def median_step_s(self) -> float | None:
        """The median time of the newest 25 steps, seconds."""
        return self._paces()[0]

    def tokens_per_s(self) -> float | None:
        """Label tokens per second over the newest 10 steps."""
        return self._paces()[1]

    def _paces(self) -> tuple[float | None, float | None]:
        """Median step time and throughput, computed once for each new step."""
        if self._paced_at is not self.last:
            newest = list(itertools.islice(reversed(self.recent), 25))
            times = sorted([record.step_s for record in newest])
            seconds = sum([record.step_s for record in newest[:10]])
            tokens = sum([record.tokens for record in newest[:10]])
            self._pace = (times[len(times) // 2] or None, tokens / seconds if seconds > 0 else None)
            self._paced_at = self.last
        return self._pace


@dataclass(slots=True)
class NodeSummary:
    """The last word of one node's agent."""

    host: str
    last_t: float = 0.0
    node: Node | None = None
    gpus: dict[tuple[int, int], GpuSample] = field(default_factory=dict)  # by GPU and MIG instance, or -1
    skew: SkewMeter = field(default_factory=SkewMeter)

    @property
    def heard_t(self) -> float:
        """When its agent last wrote, by our clock; 0 when it never did."""
        return self.last_t + self.skew.skew_s if self.last_t else 0.0


class Summary:
    """Everything kept of a run. Feed it decoded records; its size does not depend on the run's length."""

    def __init__(self, points: int = 600) -> None:
        self.ranks: dict[int, RankSummary] = {}
        self.nodes: dict[str, NodeSummary] = {}
        self.events: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self.launcher_exits: dict[str, Exit] = {}
        self.series = Series(points // 2)
        self.window = Window(points // 2)

    def rank(self, rank: int) -> RankSummary:
        found = self.ranks.get(rank)
        if found is None:
            found = self.ranks[rank] = RankSummary(rank)
        return found

    def feed_rank(self, rank: int, records: Iterable[msgspec.Struct]) -> None:
        """Full records of one rank's file, in order."""
        summary = self.rank(rank)
        for record in records:
            if isinstance(record, Step):
                summary.last = record
                summary.recent.append(record)
                summary.tokens += record.tokens
                loss = record.loss
                if loss is not None and type(loss) is not float:
                    loss = to_float(loss)
                for bucket in (self.series.bucket(record.step), self.window.bucket(record.step)):
                    bucket.records += 1
                    if record.t > bucket.t:
                        bucket.t = record.t
                    bucket.tokens += record.tokens
                    bucket.seconds += record.step_s
                    memory = record.peak_reserved or record.reserved
                    if memory > bucket.memory:
                        bucket.memory = memory
                    if loss is not None:
                        bucket.losses += 1
                        bucket.loss_sum += loss
                    if record.grad_norm is not None:
                        bucket.grad_norm = to_float(record.grad_norm)
            elif isinstance(record, Experts):
                summary.experts[record.layer] = record
            elif isinstance(record, Meta):
                summary.meta = record
            elif isinstance(record, Event):
                self.events.append(record)

    def feed_rank_history(self, rank: int, records: Iterable[LeanRecord]) -> None:
        """Lean records of one rank's file, older than those fed in full; meta records are passed over."""
        summary = self.rank(rank)
        series = self.series
        newest_experts: dict[int, LeanExperts] = {}
        key, bucket = -1, Bucket()
        for record in records:
            if type(record) is LeanStep:
                if record.step // series.stride != key:
                    bucket = series.bucket(record.step)
                    key = record.step // series.stride
                bucket.t = record.t
                bucket.records += 1
                bucket.tokens += record.tokens
                bucket.seconds += record.step_s
                summary.tokens += record.tokens
                loss = record.loss
                if loss is not None:
                    if type(loss) is str:
                        loss = to_float(loss)
                        if loss is None:
                            continue
                    bucket.losses += 1
                    bucket.loss_sum += loss  # type: ignore[operator]
            elif type(record) is LeanExperts:
                newest_experts[record.layer] = record
            elif type(record) is LeanEvent:
                self.events.append(
                    Event(
                        t=record.t,
                        severity=record.severity,
                        code=record.code,
                        text=record.text,
                        rank=record.rank,
                    )
                )
        for layer, found in newest_experts.items():
            known = summary.experts.get(layer)
            if known is None or known.step < found.step:
                counts = _counts_decoder.decode(found.counts)
                summary.experts[layer] = Experts(t=0.0, step=found.step, layer=layer, counts=counts)

    def feed_node(self, host: str, records: Iterable[Record]) -> None:
        """Records of one node's agent, in order."""
        node = self.nodes.get(host)
        if node is None:
            node = self.nodes[host] = NodeSummary(host)
        for record in records:
            if isinstance(record, RankSample):
                summary = self.rank(record.rank)
                summary.sample = record
                summary.sample_host = host
                self.launcher_exits.pop(host, None)  # a requeued job has started again
                if summary.exit is not None and summary.exit.pid != record.pid:
                    summary.exit = None  # the launcher has started it again
            elif isinstance(record, GpuSample):
                node.gpus[record.index, -1 if record.mig_index is None else record.mig_index] = record
            elif isinstance(record, Node):
                node.node = record
            elif isinstance(record, Exit):
                if record.rank is None:
                    self.launcher_exits[host] = record
                else:
                    self.rank(record.rank).exit = record
            elif isinstance(record, Event):
                self.events.append(record)
            node.last_t = record.t

    def tokens_per_step(self, steps: int = 20) -> float | None:
        """Mean of the label tokens of all ranks over the newest steps that every rank has reported."""
        ranks = sum(rank.last is not None for rank in self.ranks.values())
        newest = sorted(self.window.buckets)[-4 * steps :]
        whole = [b for key in newest if (b := self.window.buckets[key]).records >= ranks][-steps:]
        return sum(bucket.tokens for bucket in whole) / len(whole) if whole else None

    def points(self) -> tuple[Point, ...]:
        """The whole run, coarse where it is old and step by step where it is new; cumulative tokens."""
        ranks = max(1, len(self.ranks))
        stride = self.series.stride
        newest = self.series.buckets if stride == 1 else self.window.buckets
        start = min(newest, default=None)
        found: list[Point] = []
        tokens = 0
        if start is not None and stride > 1:
            for key in sorted(self.series.buckets):
                last_step = key * stride + stride - 1
                if last_step >= start:
                    break
                found.append(self.series.buckets[key].point(last_step, ranks, tokens))
                tokens = found[-1].tokens
            tokens = sum(rank.tokens for rank in self.ranks.values()) - sum(b.tokens for b in newest.values())
        for step in sorted(newest):
            found.append(newest[step].point(step, ranks, tokens))
            tokens = found[-1].tokens
        return tuple(found)
