"""A run directory played again at any speed, with seek: a demo, a bug report, a test fixture."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.export import MAX_LINE_BYTES, rank_files
from ftdash.monitor.history import RunHistory
from ftdash.monitor.records import RankSample, Record, Step, decode_lines, decoder
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.snapshot import Surroundings, build_state
from ftdash.monitor.state import RunState
from ftdash.monitor.summary import Summary

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Source:
    """One telemetry file: of a rank, or of a node's agent."""

    path: Path
    rank: int | None
    host: str = ""


class Replay:
    """The run as it was at a moment. Moving forward reads on; moving back begins anew.

    Raises RunError when the run directory has no manifest. Memory does not grow with the run.
    """

    def __init__(self, run: RunDir, points: int = 600) -> None:
        self.run = run
        self.manifest = run.read_manifest()
        self._points = points
        self._sources = [_Source(path, rank) for rank, path in rank_files(run)]
        for path in sorted(run.telemetry.glob("node-*.jsonl")):
            self._sources.append(_Source(path, None, path.stem.removeprefix("node-")))
        self.start, self.end = self._span()
        self.now = float("-inf")
        self._summary = Summary(points)
        self._history = RunHistory()
        self._stream: Iterator[tuple[float, int, Record]] = iter(())
        self._next: tuple[float, int, Record] | None = None
        self._rewind()

    def seek(self, t: float) -> RunState:
        """The run as it was at `t` (UTC seconds), with the alerts that held then."""
        if t < self.now:
            self._rewind()
        self.now = t
        while self._next is not None and self._next[0] <= t:
            _, place, record = self._next
            self._feed(self._sources[place], record)
            self._next = next(self._stream, None)
        manifest = self._manifest_at(t)
        around = Surroundings(
            now=t,
            agents=[source.host for source in self._sources if source.rank is None],
            processes=None,
            launcher_code=None,
            beats={},
            dead_pids=(),
            notices=(),
        )
        state = build_state(self.run, manifest, self._summary, around)
        self._history.observe(state, look=False)
        return replace(state, alerts=state.alerts + find_alerts(state, self._history))

    def play(
        self,
        speed: float = 1.0,
        interval_s: float = 1.0,
        *,
        start: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[RunState]:
        """States from `start` to the end, one an interval of the watcher's time, `speed` times as fast."""
        if speed <= 0 or interval_s <= 0:
            raise ValueError("speed and interval must be positive")
        begin, t0 = clock(), self.start if start is None else start
        while True:
            t = t0 + (clock() - begin) * speed
            yield self.seek(min(t, self.end))
            if t >= self.end:
                return
            sleep(interval_s)

    def _manifest_at(self, t: float) -> Manifest:
        """The manifest as it stood: exits and the final state belong to the end of the run."""
        if t >= self.end:
            return self.manifest
        early = [end for end in self.manifest.exits if 0 < end.t <= t]
        return msgspec.structs.replace(
            self.manifest, state="running", exits=early, exit_code=None, ended=0.0, reason=""
        )

    def _rewind(self) -> None:
        self.now = float("-inf")
        self._summary = Summary(self._points)
        self._history = RunHistory()
        streams = (_records(source.path, place) for place, source in enumerate(self._sources))
        self._stream = heapq.merge(*streams, key=lambda item: item[0])
        self._next = next(self._stream, None)

    def _feed(self, source: _Source, record: Record) -> None:
        if source.rank is None:
            self._summary.feed_node(source.host, [record])
            if isinstance(record, RankSample):
                self._history.add_sample(record)
        else:
            self._summary.feed_rank(source.rank, [record])
            if isinstance(record, Step):
                self._history.add_step(source.rank, record)

    def _span(self) -> tuple[float, float]:
        """From the first to the last record."""
        firsts, lasts = [], []
        for place, source in enumerate(self._sources):
            first = next(_records(source.path, place), None)
            if first is not None:
                firsts.append(first[0])
                lasts.append(_last_t(source.path) or first[0])
        if not firsts:
            return self.manifest.created, max(self.manifest.created, self.manifest.ended)
        return min(firsts), max(lasts)


def _records(path: Path, place: int) -> Iterator[tuple[float, int, Record]]:
    """The records of one file in order. A clock that went back is held at its newest time."""
    newest = float("-inf")
    rest = b""
    offset = 0
    while True:
        try:  # opened for each piece: a run of a thousand ranks has more files than a process may hold
            with path.open("rb") as handle:
                handle.seek(offset)
                piece = handle.read(CHUNK_BYTES)
        except OSError:
            return
        if not piece:
            return
        offset += len(piece)
        data = rest + piece
        cut = data.rfind(b"\n") + 1
        rest = data[cut:] if len(data) - cut <= MAX_LINE_BYTES else b""
        for record in decode_lines(decoder, data[:cut])[0]:
            newest = max(newest, record.t)
            yield newest, place, record


def _last_t(path: Path) -> float | None:
    """The time of the newest record near the end of the file."""
    with path.open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(max(0, size - CHUNK_BYTES))
        data = handle.read()
    records, _ = decode_lines(decoder, data[data.find(b"\n") + 1 :] if size > CHUNK_BYTES else data)
    return max((record.t for record in records), default=None)
