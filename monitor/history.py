"""The bounded past of a run: enough to judge the present, never more because the run is longer or larger.

The reader feeds the newest step records of each rank (`add_step`), what agents saw of their processes
(`add_sample`), then the state (`observe`), before it asks `find_alerts`. What is kept does not grow with
the run: per rank a few numbers and 48 memory values, for the run 64 steps of phase times and 240 records
of routing figures.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path

from ftdash.monitor.experts import ExpertHistory
from ftdash.monitor.losses import LossLevel
from ftdash.monitor.records import Experts, RankSample, Step, to_float
from ftdash.monitor.state import RankPhase, RankState, RunState
from ftdash.monitor.stragglers import StragglerDetector
from ftdash.monitor.summary import LeanSample

MEMORY_STEPS = 48
LOSS_STEPS = 48
WARM_STEPS = 5  # before that, a process's memory is still being set up
LOOK_S = 30.0  # how often file systems are asked


@dataclass(slots=True)
class Odd:
    """The first and the newest step at which something was odd on a rank, and how often."""

    first_step: int
    last_step: int
    t: float
    count: int = 1


@dataclass(slots=True)
class RankPast:
    """What is remembered of one rank."""

    last_step: int = -1
    fed: bool = False  # with its records, one by one
    loss_nan: Odd | None = None
    grad_nan: Odd | None = None
    zero_losses: int = 0  # in a row, up to the newest
    same_losses: int = 0
    last_loss: float | None = None
    on_device: bool = False  # torch counts its memory, so that the process's own does not matter
    states: deque[str] = field(default_factory=lambda: deque(maxlen=10))  # of its process, S, R, T, D
    memory: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MEMORY_STEPS))


@dataclass(frozen=True, slots=True)
class HostLook:
    """What the reader's own machine sees of the run's files."""

    t: float
    disk_free: int  # bytes on the file system of the run or its output
    disk_total: int
    disk_path: str
    checkpoint_t: float | None = None  # when the newest checkpoint-* folder was last written
    checkpoint_every_s: float | None = None  # the longest time between two of those kept


class RunHistory:
    """Feed it, then give it to `find_alerts`."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankPast] = {}
        self.stragglers = StragglerDetector()
        self.experts = ExpertHistory()
        self.losses = LossLevel()
        self.grad_norms: deque[tuple[int, float]] = deque(maxlen=LOSS_STEPS)
        self.grad_spike: tuple[int, float, float] | None = None  # step, norm, median before it
        self.disk: deque[tuple[float, int]] = deque(maxlen=20)  # when, bytes free
        self.look: HostLook | None = None
        self._rates: deque[float] = deque(maxlen=240)
        self._expert_counts: dict[int, tuple[int, ...]] = {}
        self._looked_at = 0.0
        self._norm_step = self._loss_step = -1
        self._last_rate_step = -1

    def add_step(self, rank: int, step: Step) -> None:
        """One step record of one rank, in order."""
        self.add_steps((rank,), (step,))

    def add_steps(self, ranks: Sequence[int], steps: Sequence[Step]) -> None:
        """One step record of each of these ranks: what a thousand ranks write in a second."""
        pasts = self.ranks
        for rank, step in zip(ranks, steps, strict=True):
            past = pasts.get(rank)
            if past is None:
                past = pasts[rank] = RankPast()
            if step.step < past.last_step and past.fed:
                past = self._begin_anew(rank)
            past.fed = True
            if step.step > past.last_step:
                self._note_step(past, step)
        self.stragglers.add_all(ranks, steps)

    def _begin_anew(self, rank: int) -> RankPast:
        """A rank whose steps went back: it was started again, from a checkpoint or from nothing."""
        past = self.ranks[rank] = RankPast()
        self.stragglers.restart(rank)
        self.losses = LossLevel()
        self._norm_step = self._loss_step = self._last_rate_step = -1
        return past

    def add_experts(self, records: Sequence[Experts]) -> None:
        """Tokens per expert as one rank counted them, in order. The newest of a layer comes with the state,
        added up over ranks: adding up all of them for a thousand ranks would cost more than all the rest."""
        newest: dict[int, Experts] = {}
        for record in records:
            if (earlier := newest.get(record.layer)) is not None:
                self.experts.add_earlier(earlier.step, earlier.layer, earlier.counts)
            newest[record.layer] = record

    def add_sample(self, sample: RankSample | LeanSample) -> None:
        """What an agent saw of a rank's process: on CPU its resident memory is the one to watch."""
        past = self.ranks.get(sample.rank)
        if past is None:
            past = self.ranks[sample.rank] = RankPast()
        if sample.state:
            past.states.append(sample.state)
        unseen = not past.memory or past.memory[-1][0] < sample.beat_step
        if unseen and not past.on_device and sample.rss and sample.beat_step >= WARM_STEPS:
            past.memory.append((sample.beat_step, sample.rss))

    def observe(self, state: RunState, *, look: bool = True, output_dir: str = "") -> None:
        """The newest state. Steps that were not fed one by one are taken from it. `output_dir` is where the
        ranks say that they write, for a run whose manifest does not."""
        live = [rank for rank in state.ranks if rank.state not in (RankPhase.DEAD, RankPhase.STARTING)]
        self.stragglers.expect(rank.rank for rank in live)
        for rank in state.ranks:
            past = self.ranks.get(rank.rank)
            if past is None:
                past = self.ranks[rank.rank] = RankPast()
            if not past.fed and rank.step > past.last_step and rank.step_s is not None:
                step = _as_step(rank, state.now)
                self._note_step(past, step)
                self.stragglers.add(rank.rank, step.step, step)
        self.experts.settle()
        for layer in state.experts:
            if self._expert_counts.get(layer.layer) != layer.counts:
                self._expert_counts[layer.layer] = layer.counts
                self.experts.add(layer.layer, layer.counts)
        if state.tokens_per_s and state.step > self._last_rate_step:
            self._last_rate_step = state.step
            self._rates.append(state.tokens_per_s)
        if look and state.now - self._looked_at >= LOOK_S:
            self._looked_at = state.now
            self.note_look(look_at_files(Path(state.path), state.manifest.output_dir or output_dir))

    def note_look(self, look: HostLook | None) -> None:
        """What the file system said; kept to see how fast it fills."""
        if look is not None:
            self.look = look
            self.disk.append((look.t, look.disk_free))

    def rates(self) -> list[float]:
        """Tokens per second of the run at its newest 240 observed steps, oldest first."""
        return list(self._rates)

    def _note_step(self, past: RankPast, step: Step) -> None:
        past.last_step = step.step
        loss = step.loss if type(step.loss) is float else to_float(step.loss)
        if loss is not None:
            if not isfinite(loss):
                past.loss_nan = _again(past.loss_nan, step)
            elif step.step > self._loss_step:  # of one rank, whose noise is not less than that of their mean
                self._loss_step = step.step
                self.losses.add(step.step, loss)
            past.zero_losses = past.zero_losses + 1 if loss == 0.0 else 0
            past.same_losses = past.same_losses + 1 if loss == past.last_loss else 0
            past.last_loss = loss
        norm = step.grad_norm if type(step.grad_norm) is float else to_float(step.grad_norm)
        if norm is not None:
            if not isfinite(norm):
                past.grad_nan = _again(past.grad_nan, step)
            elif step.step > self._norm_step:
                self._norm_step = step.step
                self._note_norm(step.step, norm)
        if step.allocated:
            if not past.on_device:
                past.on_device = True
                past.memory.clear()  # of the process, as its agent saw it before the first step
            past.memory.append((step.step, step.allocated))

    def _note_norm(self, step: int, norm: float) -> None:
        """Gradient norms are the same on all ranks of a step: the first report of a step counts."""
        if len(self.grad_norms) >= 16:
            before = sorted(value for _, value in self.grad_norms)
            usual = before[len(before) // 2]
            if usual > 0 and norm > 10 * usual:
                self.grad_spike = (step, norm, usual)
        self.grad_norms.append((step, norm))


def look_at_files(run: Path, output_dir: str) -> HostLook | None:
    """Free space where the run writes, and the age of its newest checkpoint; None when neither is here."""
    place = Path(output_dir) if output_dir and Path(output_dir).is_dir() else run
    try:
        usage = os.statvfs(place)
    except OSError:
        return None
    written: list[float] = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(("checkpoint-", "global_step")) and entry.is_dir():
                    written.append(entry.stat().st_mtime)
    except OSError:
        written = []
    written.sort()
    return HostLook(
        t=time.time(),
        disk_free=usage.f_bavail * usage.f_frsize,
        disk_total=usage.f_blocks * usage.f_frsize,
        disk_path=str(place),
        checkpoint_t=written[-1] if written else None,
        checkpoint_every_s=max((b - a for a, b in pairwise(written)), default=None),
    )


def _again(odd: Odd | None, step: Step) -> Odd:
    if odd is None:
        return Odd(step.step, step.step, step.t)
    odd.last_step = step.step
    odd.count += 1
    return odd


def _as_step(rank: RankState, t: float) -> Step:
    return Step(
        t=t,
        step=rank.step,
        loss=rank.loss,
        grad_norm=rank.grad_norm,
        step_s=rank.step_s or 0.0,
        data_s=rank.data_s or 0.0,
        forward_s=rank.forward_s or 0.0,
        backward_s=rank.backward_s or 0.0,
        optimizer_s=rank.optimizer_s or 0.0,
        allocated=rank.allocated or 0,
    )
