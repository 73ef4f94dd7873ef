"""Reads a run directory step by step and says what the run is doing now."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from ftdash.monitor import exits, procs
from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.beat import Beat, read_beat
from ftdash.monitor.history import RunHistory
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import AGENT_SILENT_S, FINAL
from ftdash.monitor.records import AnyRecord, RankSample, Step, decode_lines, decoder
from ftdash.monitor.rundir import Manifest, RankExit, RunDir, RunError, safe_name
from ftdash.monitor.snapshot import Shown, Surroundings, build_state
from ftdash.monitor.state import Alert, RunPhase, RunState
from ftdash.monitor.summary import LeanSample, Summary, lean_decoder, lean_node_decoder
from ftdash.monitor.tail import CHUNK_BYTES, Tail

RECENT_BYTES = 64 << 10  # the end of a large piece is decoded in full, what is before it only for history
HEAD_BYTES = 64 << 10
LARGE_FILE_BYTES = 1 << 20  # a larger file is entered near its end, its history read in later polls
POLL_BUDGET_S = 0.4  # reading takes no longer than this in one poll; the rest waits for the next
PROCESS_SCAN_S = 2.0
ALERT_S_PER_RANK = 1 / 256  # alerts are looked for this often, seconds times ranks
DIRECT_BEATS = 64  # up to so many ranks, beats are read from their files although an agent hands them on
# Of more ranks, each poll takes in the samples of a share of the nodes and makes a share of the states anew:
RANKS_A_TURN = 256
MOST_TURNS = 4
TURN_S = 1.0  # between polls; where they are rarer, all have their turn in each
SAMPLE_BEGINS = b'{"kind":"node"'
FILES_A_BATCH = 64  # whose few new lines are decoded in one go
BEATS_A_POLL = 256  # of more files, the others have their turn in the next polls
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


@dataclass(slots=True)
class _Followed:
    """One telemetry file: of a rank, or of a node. [history, history_end) is still to be read."""

    tail: Tail
    rank: int | None
    host: str = ""
    garbage: int = 0
    entered: bool = False
    place: int = 0  # of a node: its number among the nodes
    read: float = 0.0  # of a node: when last, monotonic seconds
    history: int = 0
    history_end: int = 0


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
        self._files: dict[str, _Followed] = {}
        self._beat_files: dict[int, str] = {}
        self._beats: dict[int, Beat] = {}
        self._beats_after = -1  # the rank whose beat file was read last
        self._folder_seen = 0
        self._folder_looked = 0.0
        self._host = node_name()
        self._processes: int | None = None
        self._processes_looked = 0.0
        self._launcher_code: int | None = None
        self._polls = 0
        self._shown = Shown()
        self._sampled: set[str] = set()  # hosts whose samples the newest poll took in
        self._attended: Collection[int] = ()

    @property
    def behind(self) -> bool:
        """True while history, or more new lines than one poll takes, is still to be read."""
        return any(file.tail.behind or file.history < file.history_end for file in self._files.values())

    def poll(self, now: float | None = None) -> RunState:
        """The run as it is now. Raises RunError when its manifest could never be read."""
        before, manifest = self._manifest, self._read_manifest()
        self._find_files()
        self._read_files(time.monotonic() + POLL_BUDGET_S)
        self._shown.due = self._due_ranks() if manifest is before else None
        self._polls += 1
        return self._state(manifest, time.time() if now is None else now)

    def attend(self, ranks: Collection[int]) -> None:
        """Somebody looks at these ranks: of a run of any size, what is said of them is of the newest poll."""
        self._attended = ranks

    def read_whole(self) -> RunState:
        """The run as it is now, its whole history read; the reader is closed after it. Raises RunError."""
        try:
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
        for file in self._files.values():
            file.tail.close()
        self._files.clear()

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
        for name in sorted(names):
            if name in self._files:
                continue
            tail = Tail(self.run.telemetry / name, keep_open=len(self._files) < keep)
            if match := RANK_FILE.fullmatch(name):
                self._files[name] = _Followed(tail, int(match[1]))
            elif match := NODE_FILE.fullmatch(name):
                self._files[name] = _Followed(tail, None, match[1], place=len(self._files))

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

    def _has_turn(self, file: _Followed, attended: Collection[str]) -> bool:
        """Whether a node's samples are taken in now; those of ranks are in every poll."""
        if file.rank is not None or not file.entered or (file.place + self._polls) % self._turns == 0:
            return True
        return file.host in attended or time.monotonic() - file.read > (self._turns + 0.5) * TURN_S

    def _read_files(self, deadline: float) -> None:
        batch: list[tuple[_Followed, bytes]] = []
        self._sampled.clear()
        attended = {rank.sample_host for number in self._attended if (rank := self.summary.ranks.get(number))}
        all_have_turns = self._turns == 1
        for file in self._files.values():
            if not (all_have_turns or self._has_turn(file, attended)):
                continue
            if file.rank is None:
                file.read = time.monotonic()
                self._sampled.add(file.host)
            if not file.entered:
                self._enter(file)
                self._read_all(file, deadline)
            elif data := file.tail.read():
                if file.rank is None:
                    data = self._newest_sample(file, data)
                if file.tail.behind:
                    self._feed(file, data)
                    self._read_all(file, deadline)
                    self._note_arrival(file)
                else:
                    batch.append((file, data))
                    if len(batch) < FILES_A_BATCH:
                        continue
                    self._feed_batch(batch)
                    batch.clear()
            elif file.tail.behind:
                self._read_all(file, deadline)
            else:
                continue
            if time.monotonic() > deadline:
                break
        self._feed_batch(batch)
        for file in self._files.values():
            while file.history < file.history_end:
                self._read_history(file)
                if time.monotonic() > deadline:
                    return

    def _read_all(self, file: _Followed, deadline: float) -> None:
        while file.tail.behind and time.monotonic() <= deadline:
            if data := file.tail.read():
                self._feed(file, data)

    def _note_arrival(self, file: _Followed) -> None:
        if file.rank is None and (node := self.summary.nodes.get(file.host)):
            node.skew.observe(time.time(), node.last_t)

    def _enter(self, file: _Followed) -> None:
        """Begin with a large file at its head and near its end, and leave what is between for later."""
        size = file.tail.size()
        if not size:
            return
        file.entered = True
        if size <= LARGE_FILE_BYTES:
            return
        if file.rank is not None:
            self._feed(file, file.tail.read(HEAD_BYTES))
            file.history = file.tail.offset
        file.tail.skip_to(size - 4 * RECENT_BYTES)
        if file.rank is not None:
            file.history_end = file.tail.offset

    def _feed(self, file: _Followed, data: bytes) -> None:
        long = file.rank is not None and len(data) > 2 * RECENT_BYTES
        if cut := data.rfind(b"\n", 0, -RECENT_BYTES) + 1 if long else 0:
            self._feed_history(file, data[:cut])
        records, garbage = decode_lines(decoder, data[cut:])
        file.garbage += garbage
        self._take(file, records)

    def _feed_batch(self, batch: Sequence[tuple[_Followed, bytes]]) -> None:
        """A few lines of each of many files: decoded at once where all of them are records."""
        try:
            records = decoder.decode_lines(b"".join([data for _, data in batch]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            records = []
        counts = [data.count(b"\n") for _, data in batch]
        whole = len(records) == sum(counts)
        start = 0
        for (file, data), count in zip(batch, counts, strict=True):
            if whole:
                self._take(file, records[start : start + count])
                start += count
            else:
                self._feed(file, data)
            self._note_arrival(file)

    def _newest_sample(self, file: _Followed, data: bytes) -> bytes:
        """The lines of a node's newest whole sample; of the samples before it little is kept."""
        newest = data.rfind(SAMPLE_BEGINS)
        cut = data.rfind(SAMPLE_BEGINS, 0, max(0, newest))
        if cut >= 0 and data.count(b"\n", newest) >= data.count(b"\n", cut, newest):
            cut = newest
        if cut <= 0:
            return data
        old, garbage = decode_lines(lean_node_decoder, data[:cut])
        file.garbage += garbage
        self.summary.feed_node(file.host, old)
        for record in old:
            if type(record) is LeanSample:
                self.history.add_sample(record)
        return data[cut:]

    def _take(self, file: _Followed, records: Sequence[AnyRecord]) -> None:
        if file.rank is None:
            self.summary.feed_node(file.host, records)
            for record in records:
                if type(record) is RankSample:
                    self.history.add_sample(record)
            return
        self.summary.feed_rank(file.rank, records)
        for record in records:
            if type(record) is Step:
                self.history.add_step(file.rank, record)

    def _feed_history(self, file: _Followed, data: bytes) -> None:
        assert file.rank is not None
        lean, garbage = decode_lines(lean_decoder, data)
        file.garbage += garbage
        if self.summary.feed_rank_history(file.rank, lean):
            lines = [line for line in data.split(b"\n") if b'"meta"' in line]
            self.summary.feed_rank(file.rank, decode_lines(decoder, b"\n".join(lines))[0])

    def _read_history(self, file: _Followed) -> None:
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
        final = RunPhase(manifest.state) in FINAL
        agents: frozenset[str] = frozenset() if final else self._living_agents(manifest, now)
        # Elsewhere nothing can be counted: silence there is no proof of an end.
        if not final and not agents and set(self._agents(manifest)) <= {self._host}:
            self._count_processes()
        around = Surroundings(
            now=now,
            agents=agents,
            processes=self._processes,
            launcher_code=self._launcher_code,
            beats={} if final else self._read_beats(agents),
            dead_pids=() if final else self._dead_pids(),
            notices=self._notices(manifest, agents, final),
            silent={} if final else self._silent(manifest, agents, now),
        )
        if self._processes == 0 and not agents and not final:
            manifest = self._with_end(manifest)
        state = build_state(self.run, manifest, self.summary, around, self._shown)
        # Alerts of a thousand ranks cost as much as all the rest, and need not be a second old.
        if abs(now - self._alerts_found) >= len(state.ranks) * ALERT_S_PER_RANK:
            self._alerts_found = now
            self.history.observe(state)
            self._alerts = find_alerts(state, self.history)
        return replace(state, alerts=state.alerts + self._alerts)

    def _agents(self, manifest: Manifest) -> dict[str, int]:
        """Pid of each node's agent by host, as the manifest and the nodes' own telemetry say."""
        reported = (entry.node for entry in self.summary.nodes.values())
        return {node.host: node.agent_pid for node in reported if node} | manifest.agent_pids

    def _living_agents(self, manifest: Manifest, now: float) -> frozenset[str]:
        """Hosts whose agent is alive: looked up by process here, by its last record elsewhere."""
        alive = []
        for host, pid in self._agents(manifest).items():
            if host == self._host:
                if procs.agent_alive(self.run.path, pid):
                    alive.append(host)
            elif now - self._heard_t(host) < AGENT_SILENT_S:
                alive.append(host)
        return frozenset(alive)

    def _heard_t(self, host: str) -> float:
        node = self.summary.nodes.get(safe_name(host, 80))
        return node.heard_t if node else 0.0

    def _silent(self, manifest: Manifest, agents: Collection[str], now: float) -> dict[str, float]:
        """Other machines of the run that have stopped reporting without having ended: seconds of silence."""
        return {
            host: now - heard_t
            for host in self._agents(manifest)
            if host != self._host
            and host not in agents
            and safe_name(host, 80) not in self.summary.launcher_exits
            and (heard_t := self._heard_t(host))
        }

    def _count_processes(self) -> None:
        """Count this run's processes here, now and then; only while no agent does it for us."""
        now = time.monotonic()
        if self._processes is not None and now - self._processes_looked < PROCESS_SCAN_S:
            return
        self._processes_looked = now
        self._processes = len(procs.pids_of_run(self.run.path))
        if self._processes == 0:
            self._launcher_code = exits.launcher_exit(self.run)

    def _with_end(self, manifest: Manifest) -> Manifest:
        """The manifest with what can still be told of an end that no agent saw."""
        return exits.complete(self.run, manifest, self.known_exits())

    def _read_beats(self, agents: Collection[str]) -> dict[int, Beat]:
        """Beats straight from the files: for few ranks, and where no agent hands them on."""
        few = len(self.summary.ranks) <= DIRECT_BEATS
        wanted = [
            rank.rank
            for rank in self.summary.ranks.values()
            if (few or rank.sample_host not in agents) and rank.rank in self._beat_files
        ]
        due = wanted
        if len(wanted) > BEATS_A_POLL:
            wanted.sort()
            start = bisect_right(wanted, self._beats_after)
            due = (wanted[start:] + wanted[:start])[:BEATS_A_POLL]
            self._beats_after = due[-1]
        for number in due:
            if (beat := read_beat(self._beat_files[number])) is not None:
                self._beats[number] = beat
        return {number: self._beats[number] for number in wanted if number in self._beats}

    def _dead_pids(self) -> set[int]:
        """Rank processes of this machine that are no longer there."""
        dead = set()
        for rank in self.summary.ranks.values():
            host = rank.meta.host if rank.meta else rank.sample_host
            pid = rank.sample.pid if rank.sample else rank.meta.pid if rank.meta else 0
            if host == self._host and pid and not procs.alive(pid):
                dead.add(pid)
        return dead

    def _notices(self, manifest: Manifest, agents: Collection[str], final: bool) -> tuple[str, ...]:
        told = [self._manifest_notice] if self._manifest_notice else []
        for name in sorted(self._files):
            file = self._files[name]
            if skipped := file.garbage + file.tail.skipped:
                told.append(f"{name}: {skipped} broken line{'s' if skipped > 1 else ''} skipped")
            if file.tail.restarts:
                told.append(f"{name}: was truncated or replaced, read again from its beginning")
            if file.tail.error:
                told.append(file.tail.error)
        if left := sum(file.history_end - file.history for file in self._files.values()):
            told.append(f"reading {left >> 20} MiB of history")
        if not final:
            if self._host in manifest.agent_pids and self._host not in agents and self._processes != 0:
                told.append(
                    f"the agent on {self._host} is gone, training goes on without it: "
                    f"ftdash agent --adopt {manifest.run}"
                )
            for node in self.summary.nodes.values():
                if skew_s := node.skew.skew_s:
                    how = "behind ours" if skew_s > 0 else "ahead of ours"
                    told.append(f"the clock of {node.host} is {abs(skew_s):.0f} s {how}: corrected")
        return tuple(told)


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
