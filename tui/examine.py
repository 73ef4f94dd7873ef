"""Looks at a run in a thread: what its agents kept by themselves, a quick verdict, then a confirmed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path

import msgspec
from msgspec import structs
from textual.message import Message

from ftdash.monitor import procs
from ftdash.monitor.control import request_dump
from ftdash.monitor.diagnosis import deadline, diagnose, frames, incident, source
from ftdash.monitor.diagnosis.collect import dump_ranks
from ftdash.monitor.diagnosis.model import Diagnosis, RankEvidence, Sample, decode_rank
from ftdash.monitor.diagnosis.rundata import rank_metas, sample_run
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import RunDir, RunError

PATIENCE_S = 20.0  # native stacks of a burdened machine: an agent tries a rank twice
LOOK_EVERY_S = 0.1
LARGEST_DUMP = 32_000_000  # bytes; a stack file beyond this is not one


class How(Enum):
    """How to look."""

    NOW = auto()  # two quick samples, then two further apart
    NATIVE = auto()  # the same, then native frames of every rank
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
    ) -> None:
        self._run, self._world, self._how = run, world_size, how
        self._post = post
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._examine, name="examination", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _examine(self) -> None:
        try:
            if self._how is How.KEPT:
                self._tell(Examined(kept_look(self._run)))
            else:
                self._look_twice()
        except (RunError, OSError) as error:
            self._tell(Examined(None, " ".join(str(error).split())))
        except Exception as error:  # a fault in judging is a line on the screen, not the end of it
            self._tell(Examined(None, f"no verdict: {type(error).__name__}: {error}"))

    def _look_twice(self) -> None:
        from ftdash.engine.launch.nodes import reach_of

        reach, native = reach_of(self._run), self._how is How.NATIVE
        samples = sample_run(self._run, quick=True, reach=reach)
        final = len(samples) < 2 or self._run.read_manifest().state in ("finished", "failed", "stopped")
        self._tell(Examined(look(samples, confirmed=final)))
        if final or self._ended.is_set():
            return
        samples = sample_run(self._run, reach=reach)
        self._tell(Examined(look(samples, confirmed=not native)))
        if native and not self._ended.is_set():
            stacks = native_stacks(self._run, self._world, self._ended)
            self._tell(Examined(look([*samples, with_native(samples[-1], stacks)])))

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


def native_stacks(run: RunDir, world_size: int, ended: threading.Event) -> dict[int, RankEvidence]:
    """Native stacks by rank, from the run's agents; without one, of this machine's ranks. Raises RunError."""
    manifest, host = run.read_manifest(), node_name()
    if not procs.agent_alive(run.path, manifest.agent_pids.get(host, 0)):
        here = [(meta.rank, meta.pid) for meta in rank_metas(run).values() if meta.host == host]
        if len(here) == world_size:
            return {one.rank: one for one in dump_ranks(here, native=True)}
    folder = request_dump(run, None, True)
    found: dict[int, RankEvidence] = {}
    limit = time.monotonic() + PATIENCE_S
    while len(found) < world_size and time.monotonic() < limit and not ended.wait(LOOK_EVERY_S):
        found |= read_stacks(folder, set(range(world_size)) - set(found))
    if not found:
        raise RunError(f"no rank gave its native stack in {PATIENCE_S:.0f} s")
    return found


def with_native(sample: Sample, stacks: Mapping[int, RankEvidence]) -> Sample:
    """The sample a moment later: native stacks where they were had, and all else that was known."""
    ranks = [
        structs.replace(one, process=newer.process, t=newer.t)
        if (newer := stacks.get(one.rank)) is not None and newer.threads
        else one
        for one in sample.ranks
    ]
    return replace(sample, t=time.time(), ranks=tuple(ranks))


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
