"""What is kept of a run's telemetry: the last word of each rank and node, and a bounded timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, cast

import msgspec

from ftdash.monitor.clockskew import SkewMeter
from ftdash.monitor.experts import RoutingTimeline
from ftdash.monitor.records import (
    Event,
    Exit,
    Experts,
    GpuSample,
    LayerNumber,
    Meta,
    Node,
    RankNumber,
    RankSample,
    Record,
    Step,
)
from ftdash.monitor.state import ExpertLayer, Point
from ftdash.monitor.timeline import Timeline

PACE_STEPS = 25  # a rank's step time is the median of so many
RATE_STEPS = 10  # and its throughput that of so many
RECENT_EVENTS = 64
MOST_EVENT_CHARS = 4096  # of an event's text: 64 of four megabytes each are kept by nobody


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
    layer: LayerNumber
    counts: msgspec.Raw


class LeanMeta(LeanRecord, tag="meta"):
    """Only its place in the file matters: it is decoded in full from there."""


class LeanEvent(LeanRecord, tag="event"):
    t: float
    severity: str
    code: str
    text: str
    rank: int | None = None


class LeanSample(LeanRecord, tag="proc"):
    """A sample of a rank's process that a newer one has followed: what its past keeps of it."""

    rank: RankNumber
    state: str = ""
    rss: int = 0
    beat_step: int = 0


class LeanGpu(LeanRecord, tag="gpu"):
    """Nothing is kept of a GPU's sample that a newer one has followed."""


class LeanNode(LeanRecord, tag="node"):
    """Nor of a node's."""


lean_node_decoder = msgspec.json.Decoder(LeanSample | LeanGpu | LeanNode | Event | Exit)
lean_decoder = msgspec.json.Decoder(LeanStep | LeanExperts | LeanMeta | LeanEvent)
_counts_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])


@dataclass(slots=True)
class RankSummary:
    """The last word of one rank, the pace of its newest steps, and what its agent saw of its process."""

    rank: int
    host: str = ""  # as it says itself, else as its agent does
    meta: Meta | None = None
    last: Step | None = None
    tokens: int = 0
    sample: RankSample | None = None
    sample_host: str = ""
    exit: Exit | None = None
    experts: dict[int, Experts] = field(default_factory=dict)
    _newest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))  # s, tokens

    def add_step(self, record: Step) -> None:
        """The newest step. Met a thousand times a second: what it means is worked out when somebody asks."""
        self.last = record
        self.tokens += record.tokens
        self._newest.append((record.step_s, record.tokens))

    def median_step_s(self) -> float | None:
        """The median time of the newest 25 steps, seconds."""
        ordered = sorted([step_s for step_s, _ in self._newest])
        return ordered[len(ordered) // 2] or None if ordered else None

    def tokens_per_s(self) -> float | None:
        """Label tokens per second over the newest 10 steps; None when nobody counts them."""
        newest = list(self._newest)[-RATE_STEPS:]
        seconds = sum([step_s for step_s, _ in newest])
        return sum([tokens for _, tokens in newest]) / seconds if seconds > 0 and self.tokens else None


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
        self.ranks_of_host: dict[str, set[int]] = {}
        self.nodes: dict[str, NodeSummary] = {}
        self.events: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self.launcher_exits: dict[str, Exit] = {}
        self.timeline = Timeline(points // 2)
        self.routing = RoutingTimeline()
        self._routing_rank: int | None = None  # whose tokens stand for all
        self._experts: dict[int, ExpertLayer] = {}
        self._stale_layers: set[int] = set()  # whose sums over ranks have changed
        self._layers: tuple[ExpertLayer, ...] = ()

    def rank(self, rank: int) -> RankSummary:
        found = self.ranks.get(rank)
        if found is None:
            found = self.ranks[rank] = RankSummary(rank)
        return found

    def _place(self, summary: RankSummary, host: str) -> None:
        if summary.host != host:
            self.ranks_of_host.get(summary.host, set()).discard(summary.rank)
            self.ranks_of_host.setdefault(host, set()).add(summary.rank)
            summary.host = host

    def feed_rank(self, rank: int, records: Iterable[msgspec.Struct]) -> None:
        """Full records of one rank's file, in order."""
        summary = self.rank(rank)
        for record in records:
            if isinstance(record, Step):
                summary.add_step(record)
                self.timeline.add(record)
            elif isinstance(record, Experts):
                summary.experts[record.layer] = record
                self._stale_layers.add(record.layer)
                self._note_routing(rank, record.step, record.layer, record.counts)
            elif isinstance(record, Meta):
                summary.meta = record
                self._place(summary, record.host)
            elif isinstance(record, Event):
                self._note_event(record)

    def feed_steps(self, ranks: Sequence[int], steps: Sequence[Step]) -> None:
        """One new full record of each of these ranks: what a thousand ranks write in a second."""
        for rank, record in zip(ranks, steps, strict=True):
            self.rank(rank).add_step(record)
        self.timeline.add_all(steps)

    def feed_rank_history(self, rank: int, records: Sequence[LeanRecord]) -> bool:
        """Lean records of one rank's file, older than those fed in full. True: there are meta records,
        which are passed over."""
        summary = self.rank(rank)
        kinds = set(map(type, records))
        only_steps = kinds == {LeanStep}
        steps = records if only_steps else [record for record in records if type(record) is LeanStep]
        summary.tokens += self.timeline.add_old(cast(Sequence[LeanStep], steps))
        if only_steps:
            return False
        newest_experts: dict[int, LeanExperts] = {}
        for record in records:
            if type(record) is LeanExperts:
                newest_experts[record.layer] = record
            elif type(record) is LeanEvent:
                self._note_event(
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
            newer = known is None or known.step < found.step
            if newer or rank == self._routing_rank:
                try:
                    counts = _counts_decoder.decode(found.counts)
                except (msgspec.MsgspecError, ValueError):
                    continue
                self._note_routing(rank, found.step, layer, counts)
            if newer:
                summary.experts[layer] = Experts(t=0.0, step=found.step, layer=layer, counts=counts)
                self._stale_layers.add(layer)
        return LeanMeta in kinds

    def _note_event(self, event: Event) -> None:
        if len(event.text) > MOST_EVENT_CHARS:
            event = msgspec.structs.replace(event, text=event.text[:MOST_EVENT_CHARS] + "…")
        self.events.append(event)

    def _note_routing(self, rank: int, step: int, layer: int, counts: Sequence[int]) -> None:
        if self._routing_rank is None:
            self._routing_rank = rank
        if rank == self._routing_rank:
            self.routing.add(step, layer, counts)

    def feed_node(self, host: str, records: Sequence[Record]) -> None:
        """Records of one node's agent, in order."""
        node = self.nodes.get(host)
        if node is None:
            node = self.nodes[host] = NodeSummary(host)
        for record in records:
            if type(record) is RankSample:
                self._note_sample(host, record)
            elif type(record) is GpuSample:
                node.gpus[record.index, -1 if record.mig_index is None else record.mig_index] = record
            elif type(record) is Node:
                node.node = record
            elif type(record) is Exit:
                if record.rank is None:
                    self.launcher_exits[host] = record
                else:
                    self.rank(record.rank).exit = record
            elif type(record) is Event:
                self._note_event(record)
        if records:
            node.last_t = records[-1].t

    def _note_sample(self, host: str, record: RankSample) -> None:
        summary = self.rank(record.rank)
        before = summary.sample
        if not record.rss and before is not None and before.pid == record.pid:
            # a zombie holds no memory any more: what the rank held is what is asked of it
            record = msgspec.structs.replace(record, rss=before.rss)
        summary.sample = record
        summary.sample_host = host
        if summary.meta is None:
            self._place(summary, host)
        if record.rss and record.beat_step > 0 and not record.gpu_uuid:
            self.timeline.note_rss(record.beat_step, record.rss)
        self.launcher_exits.pop(host, None)  # a requeued job has started again
        if summary.exit is not None and summary.exit.pid != record.pid:
            summary.exit = None  # the launcher has started it again

    def expert_layers(self) -> tuple[ExpertLayer, ...]:
        """Per layer, the newest counts of every rank added up. The same object until counts change."""
        if self._stale_layers:
            ranks = list(self.ranks.values())
            for layer in self._stale_layers:
                counts = [rank.experts[layer].counts for rank in ranks if layer in rank.experts]
                self._experts[layer] = ExpertLayer(layer, tuple(map(sum, zip_longest(*counts, fillvalue=0))))
            self._stale_layers.clear()
            self._layers = tuple(self._experts[layer] for layer in sorted(self._experts))
        return self._layers

    def output_dir(self) -> str:
        """Where the first rank that says so writes its checkpoints; empty when none does."""
        told = (rank.meta.output_dir for rank in self.ranks.values() if rank.meta is not None)
        return next(filter(None, told), "")

    def tokens_per_step(self, ranks: int) -> float | None:
        """Mean of the label tokens of all ranks over the newest steps that `ranks` ranks have reported."""
        return self.timeline.tokens_per_step(ranks)

    def points(self) -> tuple[Point, ...]:
        """The whole run, coarse where it is old and step by step where it is new; cumulative tokens."""
        return self.timeline.points(max(1, len(self.ranks)))
