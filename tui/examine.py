"""Looks at a run in a thread: what its agents kept by themselves, a quick verdict, then a confirmed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

import msgspec
from textual.message import Message

from ftdash.monitor import procs
from ftdash.monitor.control import request_dump
from ftdash.monitor.diagnosis import deadline, diagnose, frames, incident, source
from ftdash.monitor.diagnosis.collect import dump_ranks
from ftdash.monitor.diagnosis.model import Diagnosis, RankEvidence, Sample, decode_rank
from ftdash.monitor.diagnosis.rundata import rank_metas, sample_run, unanswered_ranks
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import RunDir, RunError

PATIENCE_S = 6.0
LOOK_EVERY_S = 0.1
LARGEST_DUMP = 32_000_000  # bytes; a stack file beyond this is not one


class How(Enum):
    """How to look."""

    NOW = auto()  # two quick samples, then two further apart
    NATIVE = auto()  # one sample with native frames
    KEPT = auto()  # what an agent took when the run stopped moving


@dataclass(frozen=True, slots=True)
class Look:
    """A verdict and what it rests on. Times are UTC seconds, 0 when not known."""

    diagnosis: Diagnosis
    samples: tuple[Sample, ...]
    confirmed: bool = True
    by_itself: bool = False  # an agent took the evidence, nobody asked for it
    code: Mapping[int, str] = field(default_factory=dict)  # the culprits' own source lines
    ends: float = 0.0  # when the collective that the others wait in times out
    ends_source: str = ""

    @property
    def ranks(self) -> dict[int, RankEvidence]:
        return {one.rank: one for one in self.samples[-1].ranks} if self.samples else {}

    @property
    def earlier(self) -> dict[int, RankEvidence]:
        """The first of two samples; empty when there is one only."""
        return {one.rank: one for one in self.samples[0].ranks} if len(self.samples) > 1 else {}

    @property
    def taken(self) -> float:
        return self.samples[-1].t if self.samples else 0.0


class Examined(Message):
    """A look; without one, `trouble` says in one line why, or nothing when nothing was kept."""

    def __init__(self, look: Look | None, trouble: str = "") -> None:
        super().__init__()
        self.look, self.trouble = look, trouble


class Examination:
    """One look at one run. `post` is called from a thread, after each verdict or once with the trouble."""

    def __init__(
        self,
        run: RunDir,
        world_size: int,
        post: Callable[[Message], object],
        *,
        how: How = How.NOW,
        before: Sample | None = None,
    ) -> None:
        """`before` is an earlier sample that a native one is compared with: one alone shows no movement."""
        self._run, self._world, self._how = run, world_size, how
        self._before = before
        self._post = post
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._examine, name="examination", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _examine(self) -> None:
        try:
            if self._how is How.NATIVE:
                sample = take_sample(self._run, self._world, native=True, ended=self._ended)
                self._tell(Examined(look([self._before, sample] if self._before is not None else [sample])))
            elif self._how is How.KEPT:
                self._tell(Examined(kept_look(self._run)))
            else:
                self._look_twice()
        except (RunError, OSError) as error:
            self._tell(Examined(None, " ".join(str(error).split())))
        except Exception as error:  # a fault in judging is a line on the screen, not the end of it
            self._tell(Examined(None, f"no verdict: {type(error).__name__}: {error}"))

    def _look_twice(self) -> None:
        from ftdash.engine.launch.nodes import reach_of

        reach = reach_of(self._run)
        samples = sample_run(self._run, quick=True, reach=reach)
        final = len(samples) < 2 or self._run.read_manifest().state in ("finished", "failed", "stopped")
        self._tell(Examined(look(samples, confirmed=final)))
        if not final and not self._ended.is_set():
            self._tell(Examined(look(sample_run(self._run, reach=reach))))

    def _tell(self, message: Examined) -> None:
        if not self._ended.is_set():
            self._post(message)


def look(samples: Sequence[Sample], *, confirmed: bool = True, by_itself: bool = False) -> Look:
    """Judge samples, oldest first, with all that a screen needs to know besides."""
    diagnosis = diagnose(samples)
    last = samples[-1]
    ends, ends_source = _deadline(last, diagnosis)
    named = {culprit.rank for culprit in diagnosis.verdict.culprits}
    code = {one.rank: line for one in last.ranks if one.rank in named and (line := _own_code(one))}
    return Look(diagnosis, tuple(samples), confirmed, by_itself, code, ends, ends_source)


def kept_look(run: RunDir) -> Look | None:
    """The verdict on what agents took by themselves, None when they took nothing. Raises RunError."""
    kept = incident.kept(run, run.read_manifest().started)
    if kept is None or not kept.samples or kept.incident.working:
        return None
    world, limit_s = run.read_manifest().world_size, kept.incident.timeout_s
    samples = [
        replace(sample, world_size=world, timeout_s=limit_s, timeout_source="as the agent knew it")
        for sample in kept.samples
    ]
    return look(samples, by_itself=True)


def _own_code(evidence: RankEvidence) -> str:
    started = evidence.process.started if evidence.process is not None else 0.0
    return source.line_text(frames.read_threads(evidence.threads).own, started)


def _deadline(sample: Sample, diagnosis: Diagnosis) -> tuple[float, str]:
    """When the collective that ranks wait in times out, and who says so; (0, "") when not known."""
    limit = deadline.flight_timeout(sample.flight)
    if not limit.seconds:
        limit = deadline.CollectiveTimeout(sample.timeout_s, sample.timeout_source)
    waiting = {rank for group in diagnosis.groups if group.collective for rank in group.ranks}
    since = [
        one.beat.t for one in sample.ranks if one.rank in waiting and one.beat is not None and one.beat.t > 0
    ]
    if not limit.seconds or not since:
        return 0.0, ""
    return min(since) + limit.seconds, limit.source


def take_sample(run: RunDir, world_size: int, *, native: bool, ended: threading.Event) -> Sample:
    """All stacks at once, from the run's agents; without one, of this machine's ranks. Raises RunError."""
    manifest, host = run.read_manifest(), node_name()
    if not procs.agent_alive(run.path, manifest.agent_pids.get(host, 0)):
        here = [(meta.rank, meta.pid) for meta in rank_metas(run).values() if meta.host == host]
        if len(here) == world_size:
            return Sample(
                t=time.time(),
                ranks=tuple(dump_ranks(here, native=native)),
                world_size=world_size,
                expected=frozenset(range(world_size)),
            )
    folder = request_dump(run, None, native)
    found: dict[int, RankEvidence] = {}
    limit = time.monotonic() + PATIENCE_S
    while len(found) < world_size and time.monotonic() < limit and not ended.wait(LOOK_EVERY_S):
        found |= read_stacks(folder, set(range(world_size)) - set(found))
    notices = unanswered_ranks(found, world_size, rank_metas(run)) if len(found) < world_size else ()
    return Sample(
        t=time.time(),
        ranks=tuple(found[rank] for rank in sorted(found)),
        world_size=world_size,
        expected=frozenset(range(world_size)),
        notices=notices,
    )


def read_stacks(folder: Path, wanted: set[int]) -> dict[int, RankEvidence]:
    """Those of the wanted ranks' files that are there and whole."""
    found: dict[int, RankEvidence] = {}
    for rank in wanted:
        path = folder / f"rank-{rank}.json"
        try:
            if path.stat().st_size <= LARGEST_DUMP:
                found[rank] = decode_rank(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found
