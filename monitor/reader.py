"""Reads a run directory step by step and says what the run is doing now."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from ftdash.monitor import exits
from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.history import RunHistory
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.living import Living
from ftdash.monitor.records import AnyRecord, Event, Exit, Experts, RankSample, Step, decode_lines, decoder
from ftdash.monitor.rundir import Manifest, RankExit, RunDir, RunError
from ftdash.monitor.snapshot import Shown, Surroundings, build_state
from ftdash.monitor.state import Alert, RunPhase, RunState
from ftdash.monitor.summary import LeanSample, Summary, lean_decoder, lean_node_decoder
from ftdash.monitor.tail import CHUNK_BYTES, Tail

RECENT_BYTES = 64 << 10  # the end of a large piece is decoded in full, what is before it only for history
HEAD_BYTES = 64 << 10
LARGE_FILE_BYTES = 1 << 20  # a larger file is entered near its end, its history read in later polls
POLL_BUDGET_S = 0.4  # reading takes no longer than this in one poll; the rest waits for the next
ALERT_S_PER_RANK = 1 / 128  # alerts are looked for this often, seconds times ranks
# Of more ranks, each poll takes in the samples of a share of the nodes and makes a share of the states anew:
RANKS_A_TURN = 256
MOST_TURNS = 4
TURN_S = 1.0  # between polls; where they are rarer, all have their turn in each
SAMPLE_BEGINS = b'{"kind":"node"'
STEP_BEGINS = b'{"kind":"step"'
STEPS_IN_FULL = 32
NODE_BYTES = 64 << 10  # what an agent adds in a few seconds fits
FILES_A_BATCH = 256  # whose few new lines are decoded in one go
RESERVED_DESCRIPTORS = 256  # left to the rest of the program
RANK_FILE = re.compile(r"rank-(\d{1,7})\.jsonl")
BEAT_FILE = re.compile(r"rank-(\d{1,7})\.beat")
NODE_FILE = re.compile(r"node-(.+)\.jsonl")


def spread_s(ranks: int) -> float:
    """By how many seconds the figures of one rank may be older than those of another, in a run of so many."""
    return (_turns(ranks) - 1) * TURN_S


def _turns(ranks: int) -> int:
    """In how many polls every rank of so many has its turn."""
    return max(1, min(MOST_TURNS, ranks // RANKS_A_TURN))


@dataclass(slots=True, kw_only=True)
class _Followed:
    """One telemetry file."""

    name: str
    tail: Tail
    garbage: int = 0
    entered: bool = False

    @property
    def is_odd(self) -> bool:
        """Whether there is something to tell about it."""
        return bool(self.garbage or self.tail.skipped or self.tail.restarts or self.tail.error)


@dataclass(slots=True, kw_only=True)
class _RankFile(_Followed):
    """A rank's records. [history, history_end) is still to be read."""

    rank: int
    history: int = 0
    history_end: int = 0


@dataclass(slots=True, kw_only=True)
class _NodeFile(_Followed):
    """The records of a node's agent."""

    host: str
    place: int  # its number among the nodes
    read: float = 0.0  # when last, monotonic seconds


class RunReader:
    """Follows one run. Each `poll` reads only what was added since the last one; memory is bounded.

    `points` bounds the number of points in the state; about 2.5 times as many are kept.
    """

    def __init__(self, run: RunDir, points: int = 600) -> None:
        self.run = run
        self.summary = Summary(points)
        self.history = RunHistory()
        self._alerts: tuple[Alert, ...] = ()
        self._alerts_found = 0.0
        self._manifest: Manifest | None = None
        self._manifest_seen: tuple[int, int, int] | None = None
        self._manifest_notice = ""
        self._ranks: list[_RankFile] = []
        self._nodes: list[_NodeFile] = []
        self._known: set[str] = set()  # names of the files that are followed
        self._beat_files: dict[int, str] = {}
        self._folder_seen = 0
        self._folder_looked = 0.0
        self._living = Living(run, self.summary)
        self._polls = 0
        self._shown = Shown()
        self._sampled: set[str] = set()  # hosts whose samples the newest poll took in
        self._attended: Collection[int] = ()
        self._in_turns = True  # what is said of many ranks may be a few polls old

    @property
    def behind(self) -> bool:
        """True while history, or more new lines than one poll takes, is still to be read."""
        return any(file.tail.behind for file in self._files()) or any(
            file.history < file.history_end for file in self._ranks
        )

    def poll(self, now: float | None = None) -> RunState:
        """The run as it is now. Raises RunError when its manifest could never be read."""
        before, manifest = self._manifest, self._read_manifest()
        self._find_files()
        self._read_files(time.monotonic() + POLL_BUDGET_S)
        self._shown.due = self._due_ranks() if manifest is before and self._in_turns else None
        self._shown.sums_due = self._shown.due is None or self._polls % self._turns == 0
        self._polls += 1
        return self._state(manifest, time.time() if now is None else now)

    def attend(self, ranks: Collection[int]) -> None:
        """Somebody looks at these ranks: of a run of any size, what is said of them is of the newest poll."""
        self._attended = ranks

    def read_whole(self) -> RunState:
        """The run as it is now, its whole history read; the reader is closed after it. Raises RunError."""
        self._in_turns = False
        try:
            self._find_files()
            self._read_files(math.inf)  # what is said of ten thousand ranks is made once
            state = self.poll()
            while self.behind:
                state = self.poll()
            return state
        finally:
            self.close()

    def known_exits(self) -> list[RankExit]:
        """Ends of ranks that agents saw and wrote into their telemetry."""
        self._find_files()
        self._read_files(time.monotonic() + POLL_BUDGET_S)
        return [
            RankExit(rank.rank, rank.exit.code, rank.exit.t, rank.exit.host)
            for rank in self.summary.ranks.values()
            if rank.exit is not None and rank.exit.code is not None
        ]

    def hosts(self) -> set[str]:
        """The machines whose agents have written telemetry."""
        return {entry.node.host for entry in self.summary.nodes.values() if entry.node}

    def close(self) -> None:
        """Give the descriptors back."""
        for file in self._files():
            file.tail.close()
        self._ranks.clear()
        self._nodes.clear()
        self._known.clear()

    def _files(self) -> Iterator[_Followed]:
        yield from self._nodes
        yield from self._ranks

    def _read_manifest(self) -> Manifest:
        try:
            found = os.stat(self.run.manifest_path)
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if self._manifest is None or seen != self._manifest_seen:
                self._manifest = self.run.read_manifest()
                self._manifest_seen = seen
            self._manifest_notice = ""
        except (OSError, RunError) as error:
            if self._manifest is None:
                raise (
                    error
                    if isinstance(error, RunError)
                    else RunError(f"cannot read {self.run.manifest_path}: {error.strerror or error}")
                ) from error
            self._manifest_notice = f"{error}; showing what was read before"
        return self._manifest

    def _find_files(self) -> None:
        now = time.monotonic()
        try:
            changed = os.stat(self.run.telemetry).st_mtime_ns
        except OSError:
            return
        if changed == self._folder_seen and now - self._folder_looked < 10:
            return
        self._folder_seen, self._folder_looked = changed, now
        names = os.listdir(self.run.telemetry)
        keep = _raise_descriptor_limit(len(names))
        self._beat_files = {
            int(match[1]): str(self.run.telemetry / name)
            for name in names
            if (match := BEAT_FILE.fullmatch(name))
        }
        for name in sorted(set(names) - self._known):
            path, keep_open = self.run.telemetry / name, len(self._known) < keep
            if match := RANK_FILE.fullmatch(name):
                self._ranks.append(_RankFile(name=name, tail=Tail(path, keep_open), rank=int(match[1])))
            elif match := NODE_FILE.fullmatch(name):
                tail = Tail(path, keep_open, NODE_BYTES)
                self._nodes.append(_NodeFile(name=name, tail=tail, host=match[1], place=len(self._nodes)))
            else:
                continue
            self._known.add(name)

    @property
    def _turns(self) -> int:
        return _turns(len(self.summary.ranks))

    def _due_ranks(self) -> Collection[int] | None:
        """The ranks that are made anew in this poll; None: all of them."""
        if self._turns == 1:
            return None
        due = set(self._attended)
        for number, rank in self.summary.ranks.items():
            if rank.sample_host in self._sampled or not (
                rank.sample_host or (number + self._polls) % self._turns
            ):
                due.add(number)
        return due

    def _has_turn(self, node: _NodeFile, attended: Collection[str]) -> bool:
        """Whether a node's samples are taken in now; the steps of ranks are in every poll."""
        if not node.entered or (node.place + self._polls) % self._turns == 0:
            return True
        return node.host in attended or time.monotonic() - node.read > (self._turns + 0.5) * TURN_S

    def _read_files(self, deadline: float) -> None:
        self._read_nodes(deadline)
        self._read_ranks(deadline)
        for file in self._ranks:
            while file.history < file.history_end:
                self._read_history(file)
                if time.monotonic() > deadline:
                    return

    def _read_nodes(self, deadline: float) -> None:
        self._sampled.clear()
        attended = {rank.sample_host for number in self._attended if (rank := self.summary.ranks.get(number))}
        for node in self._nodes:
            if not self._has_turn(node, attended):
                continue
            node.read = time.monotonic()
            self._sampled.add(node.host)
            followed, arrived = node.entered, False
            if not followed:
                self._enter_node(node)
            for data in _pieces(node.tail, deadline):
                self._feed_node(node, self._newest_sample(node, data) if followed else data)
                arrived = followed
            if arrived and (known := self.summary.nodes.get(node.host)) is not None:
                known.skew.observe(time.time(), known.last_t)
            if time.monotonic() > deadline:
                break

    def _read_ranks(self, deadline: float) -> None:
        batch: list[tuple[_RankFile, bytes]] = []
        for place, file in enumerate(self._ranks, 1):
            if file.entered:
                data = file.tail.read()
                if not file.tail.behind:
                    if data:
                        batch.append((file, data))
                    if len(batch) < FILES_A_BATCH:
                        continue
                    self._feed_batch(batch)
                    batch.clear()
                elif data:
                    self._feed(file, data)
            else:
                self._enter(file)
            if file.tail.behind:
                for data in _pieces(file.tail, deadline):
                    self._feed(file, data)
            if time.monotonic() > deadline:
                # The others come first in the next poll: no writer is so fast that nobody else is heard.
                self._ranks = self._ranks[place:] + self._ranks[:place]
                break
        self._feed_batch(batch)

    def _enter_node(self, node: _NodeFile) -> None:
        """Begin with a large file near its end."""
        if size := node.tail.size():
            node.entered = True
            if size > LARGE_FILE_BYTES:
                node.tail.skip_to(size - 4 * RECENT_BYTES)

    def _enter(self, file: _RankFile) -> None:
        """Begin with a large file at its head and near its end, and leave what is between for later."""
        if not (size := file.tail.size()):
            return
        file.entered = True
        if size > LARGE_FILE_BYTES:
            self._feed(file, file.tail.read(HEAD_BYTES))
            file.history = file.tail.offset
            file.tail.skip_to(size - 4 * RECENT_BYTES)
            file.history_end = file.tail.offset

    def _feed(self, file: _RankFile, data: bytes) -> None:
        long = len(data) > 2 * RECENT_BYTES
        experts: list[AnyRecord] = []
        if cut := _recent(data) if long else 0:
            self._feed_history(file, data[:cut])
            experts = _experts_at_end(data[:cut])
        records, garbage = decode_lines(decoder, data[cut:])
        file.garbage += garbage
        self._take(file.rank, experts + records)

    def _feed_batch(self, batch: Sequence[tuple[_RankFile, bytes]]) -> None:
        """A few lines of each of many files: decoded at once where all of them are records."""
        try:
            records = decoder.decode_lines(b"".join([data for _, data in batch]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            records = []
        counts = [data.count(b"\n") for _, data in batch]
        if len(records) != sum(counts):
            for file, data in batch:
                self._feed(file, data)
            return
        ranks: list[int] = []
        steps: list[Step] = []
        start = 0
        for (file, _), count in zip(batch, counts, strict=True):
            record = records[start]
            if count == 1 and type(record) is Step:  # as nearly all have it
                ranks.append(file.rank)
                steps.append(record)
            else:
                self._take(file.rank, records[start : start + count])
            start += count
        self.summary.feed_steps(ranks, steps)
        self.history.add_steps(ranks, steps)

    def _take(self, rank: int, records: Sequence[AnyRecord]) -> None:
        self.summary.feed_rank(rank, records)
        experts = []
        for record in records:
            if type(record) is Step:
                self.history.add_step(rank, record)
            elif type(record) is Experts:
                experts.append(record)
        self.history.add_experts(experts)

    def _feed_node(self, node: _NodeFile, data: bytes) -> None:
        records, garbage = decode_lines(decoder, data)
        node.garbage += garbage
        self.summary.feed_node(node.host, records)
        for record in records:
            if type(record) is RankSample:
                self.history.add_sample(record)

    def _newest_sample(self, node: _NodeFile, data: bytes) -> bytes:
        """The lines of a node's newest whole sample; of the samples before it little is kept."""
        newest = data.rfind(SAMPLE_BEGINS)
        cut = data.rfind(SAMPLE_BEGINS, 0, max(0, newest))
        if cut >= 0 and data.count(b"\n", newest) >= data.count(b"\n", cut, newest):
            cut = newest
        if cut <= 0:
            return data
        old, garbage = decode_lines(lean_node_decoder, data[:cut])
        node.garbage += garbage
        told: list[AnyRecord] = []
        for record in old:
            if type(record) is LeanSample:
                self.history.add_sample(record)
            elif type(record) is Event or type(record) is Exit:
                told.append(record)
        self.summary.feed_node(node.host, told)
        return data[cut:]

    def _feed_history(self, file: _RankFile, data: bytes) -> None:
        lean, garbage = decode_lines(lean_decoder, data)
        file.garbage += garbage
        if self.summary.feed_rank_history(file.rank, lean):
            lines = [line for line in data.split(b"\n") if b'"meta"' in line]
            self.summary.feed_rank(file.rank, decode_lines(decoder, b"\n".join(lines))[0])

    def _read_history(self, file: _RankFile) -> None:
        end = min(file.history + CHUNK_BYTES, file.history_end)
        data = file.tail.read_range(file.history, end)
        complete = data.rfind(b"\n") + 1
        if not data or file.tail.restarts:
            file.history = file.history_end
            return
        if not complete:
            file.history = end
            file.garbage += 1
            return
        self._feed_history(file, data[:complete])
        file.history += complete

    def _state(self, manifest: Manifest, now: float) -> RunState:
        living = self._living
        final = RunPhase(manifest.state) in FINAL
        agents: frozenset[str] = frozenset() if final else living.agents(manifest, now)
        around = Surroundings(
            now=now,
            agents=agents,
            processes=living.processes,
            launcher_code=living.launcher_code,
            beats={} if final else living.beats(agents, self._beat_files),
            dead_pids=() if final else living.dead_pids(),
            notices=(*self._notices(), *(() if final else living.notices(manifest, agents))),
            silent={} if final else living.silent(manifest, agents, now),
        )
        if living.processes == 0 and not agents and not final:
            manifest = exits.complete(self.run, manifest, self.known_exits())
        state = build_state(self.run, manifest, self.summary, around, self._shown)
        # Alerts of a thousand ranks cost as much as all the rest, and need not be a second old.
        if not self._in_turns or abs(now - self._alerts_found) >= len(state.ranks) * ALERT_S_PER_RANK:
            self._alerts_found = now
            self.history.observe(state, output_dir=self.summary.output_dir())
            self._alerts = find_alerts(state, self.history)
        return replace(state, alerts=state.alerts + self._alerts)

    def _notices(self) -> list[str]:
        """What was skipped or could not be read, and what is still to be read."""
        told = [self._manifest_notice] if self._manifest_notice else []
        for file in sorted([file for file in self._files() if file.is_odd], key=lambda file: file.name):
            if skipped := file.garbage + file.tail.skipped:
                told.append(f"{file.name}: {skipped} broken line{'s' if skipped > 1 else ''} skipped")
            if file.tail.restarts:
                told.append(f"{file.name}: was truncated or replaced, read again from its beginning")
            if file.tail.error:
                told.append(file.tail.error)
        if left := sum([file.history_end - file.history for file in self._ranks]):
            told.append(f"reading {left >> 20} MiB of history")
        return told


def _pieces(tail: Tail, deadline: float) -> Iterator[bytes]:
    """What was added to a file, as far as it can be read until then (monotonic seconds)."""
    while True:
        if data := tail.read():
            yield data
        if not tail.behind or time.monotonic() > deadline:
            return


def _recent(data: bytes) -> int:
    """Where the end of these lines begins: with steps in it, also behind the counts of a hundred layers."""
    cut = data.rfind(b"\n", 0, -RECENT_BYTES) + 1
    farthest = len(data) - 4 * RECENT_BYTES
    lacking = STEPS_IN_FULL - data.count(STEP_BEGINS, cut)
    while lacking > 0 and (before := data.rfind(STEP_BEGINS, 0, cut)) >= 0:
        if before < farthest and lacking < STEPS_IN_FULL:
            break
        cut, lacking = before, lacking - 1
    return cut


def _experts_at_end(data: bytes) -> list[AnyRecord]:
    """Expert counts near the end of lines that only history is made of: it takes several to judge."""
    near = data[-3 * RECENT_BYTES :]
    if b'"experts"' not in near:
        return []
    lines = [line for line in near.split(b"\n")[1:] if b'"experts"' in line]
    records, _ = decode_lines(decoder, b"\n".join(lines))
    return [record for record in records if type(record) is Experts]


def _raise_descriptor_limit(files: int) -> int:
    """Make room for one descriptor a file; returns how many files may be kept open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return files if soft == resource.RLIM_INFINITY else max(16, soft - RESERVED_DESCRIPTORS)
