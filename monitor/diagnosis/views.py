"""One rank as the verdict sees it: its evidence, its stack read, and how it moved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis import endless, frames, knowledge, motion, source
from ftdash.monitor.diagnosis.frames import Origin, Reading, Wait
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import (
    NOT_SEEN,
    Culprit,
    DumpFailure,
    Frame,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Sample,
)
from ftdash.monitor.diagnosis.motion import Motion

FUTEX_SYSCALL = 202
_MOST_LOCKED = 2  # threads that are named: two that took locks crosswise hold each other
_FLOCK = 73
_SLEEPING = (230, 35)  # clock_nanosleep, nanosleep
_SLEEP = re.compile(r"\bsleep\(\s*(\d+(?:\.\d*)?)\s*\)")
_BRIEF_S = 5.0  # as far apart as the looks of a confirmed verdict
# read, write, open, pread64, pwrite64, readv, writev, connect, accept, wait4, flock, fsync, fdatasync,
# waitid, openat, accept4 of x86-64: for files, pipes and children. A collective spins or waits in a futex.
_ON_FILES = frozenset({0, 1, 2, 17, 18, 19, 20, 42, 43, 61, 73, 74, 75, 247, 257, 288})
_FED_BY_A_THREAD = frozenset({"get", "join", "result", "wait", "_wait_for_tstate_lock"})
_WITH_THREADS = re.compile(r"concurrent/futures/|asyncio/|multiprocessing/pool\.py$")
_OF_PROCESSES = re.compile(r"multiprocessing/(?:process|popen_\w+)\.py$")
_DEAD = (DumpFailure.GONE, DumpFailure.ZOMBIE)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One rank. `wait` is the reading's, corrected by the source line and by native frames."""

    evidence: RankEvidence
    reading: Reading
    before: Reading
    motion: Motion
    wait: Wait
    text: str = ""  # the user's source line, where it can be read
    polls: bool = False  # it stands in a loop that only waits, at both looks
    context: Phase = Phase.UNKNOWN  # the surrounding phase, without what all ranks have in common
    in_vain: bool = False  # it, or the worker that it waits for, tries the same again, beyond its own pace

    @property
    def rank(self) -> int:
        return self.evidence.rank

    @property
    def recorded(self) -> bool:
        """Read from a file, not from a live process."""
        return self.evidence.process is not None and self.evidence.process.source == "file"

    @property
    def dead(self) -> bool:
        process = self.evidence.process
        return process is not None and (process.failure in _DEAD or process.proc.state in ("Z", "X"))

    @property
    def stopped(self) -> bool:
        return self.evidence.proc.state in ("T", "t")

    @property
    def has_stack(self) -> bool:
        return self.reading.telling is not None

    @property
    def not_seen(self) -> bool:
        """Nobody could look at it in time: no evidence, for or against."""
        process = self.evidence.process
        return (
            not self.has_stack and process is not None and process.failure in NOT_SEEN and not self.recorded
        )

    @property
    def undumpable(self) -> bool:
        return not self.has_stack and not self.dead and not self.not_seen

    @property
    def waits_for_peers(self) -> bool:
        """In a collective, and not seen to leave it or to work inside of it."""
        if self.wait not in frames.IN_COLLECTIVE:
            return False
        if self.polls:
            return True
        return not (self.motion.known and self.motion.moved)

    @property
    def in_collective(self) -> bool:
        return self.wait in frames.IN_COLLECTIVE

    @property
    def at_a_file_lock(self) -> bool:
        """It waits for a lock that another process holds, which may be another rank."""
        return self.wait is Wait.LOCK or self.evidence.proc.syscall == _FLOCK

    @property
    def sleeps_briefly(self) -> bool:
        """In a sleep whose line says that it lasts longer than it was looked at, and ends within seconds."""
        match = None if self.polls or not _by_the_clock(self.evidence.proc) else _SLEEP.search(self.text)
        return match is not None and self.motion.interval_s < float(match[1]) <= _BRIEF_S

    @property
    def leaves(self) -> bool:
        """On its way out: in a library's teardown, or in a cleanup of the user's after all loops."""
        if self.wait is Wait.TEARDOWN:
            return True
        if self.waits_for_peers or self.context is not Phase.TEARDOWN:
            return False
        return not any(map(source.in_a_loop, self.reading.callers))

    @property
    def active(self) -> bool:
        main = frames.main_thread(self.evidence.threads)
        return bool(main and main.active)

    @property
    def holds_gil(self) -> bool:
        main = frames.main_thread(self.evidence.threads)
        return bool(main and main.owns_gil)

    @property
    def progresses(self) -> bool:
        return not self.in_vain and motion.progresses(self.motion, self.before, self.reading, self.holds_gil)

    @property
    def stands(self) -> bool:
        """It does not get on: at most it wakes up to ask the same again."""
        return not self.progresses and (self.polls or not self.motion.moved)

    @property
    def shown_frame(self) -> Frame | None:
        return frames.user_frame(self.reading)

    @property
    def op(self) -> str:
        return self.reading.op or ("wait" if self.in_collective else "")

    def culprit(self, why: str) -> Culprit:
        frame = self.shown_frame
        text = str(frame) if frame else ""
        if child := self.guilty_child():
            worker_frame = frames.user_frame(frames.read_threads(child.threads))
            if worker_frame is not None:
                text += f"; worker {child.pid}: {worker_frame}"
        held = blocked_in_lock(self.reading, self.evidence.proc.syscall)
        if other := (self._own_thread() if held else self.awaited_thread()):
            locked = [reading for reading in self._own_threads() if blocked_in_lock(reading, None)]
            for reading in locked[:_MOST_LOCKED] or [other]:
                text += f"; thread {reading.thread}: {reading.own}"
        return Culprit(self.rank, self.evidence.host, self.evidence.pid, text, why)

    @property
    def joins_its_thread(self) -> bool:
        """Its main thread waits for a thread of its own that is in a collective."""
        main = frames.main_thread(self.evidence.threads)
        if main is None or not self.in_collective:
            return False
        reading = frames.read_thread(main)
        return not reading.in_collective and "_engine_run_backward" not in reading.names

    def in_call(self, op: str) -> list[Reading]:
        """Its threads that are in a collective of this name, the main one first."""
        found = [self.reading, *map(frames.read_thread, self.evidence.threads)]
        return [reading for reading in found if reading.op == op and reading.in_collective]

    @property
    def joins_a_process(self) -> bool:
        """Its main thread waits for a process that it has started to end."""
        held = self.reading.blocked_by
        return held is not None and bool(_OF_PROCESSES.search(held.file))

    def awaited_thread(self) -> Reading | None:
        """The first other thread in the user's code, where the main thread waits for one; else None.

        A queue, a future or a join has no owner to ask: any thread of the process may be meant.
        """
        blocked = self.reading.blocked_by
        fed = blocked is not None and (
            blocked.short in _FED_BY_A_THREAD or bool(_WITH_THREADS.search(blocked.file))
        )
        leaving = self.wait is Wait.TEARDOWN and self.reading.own is None
        if self.joins_a_process:
            return None
        if not leaving and not (fed and self.wait in (Wait.OWN, Wait.LIBRARY, Wait.SAVE_IO)):
            return None
        return self._own_thread()

    def _own_thread(self) -> Reading | None:
        """Another thread in the user's code, one at a lock first: who fills a queue is not recorded."""
        return next(iter(self._own_threads()), None)

    def _own_threads(self) -> list[Reading]:
        main = frames.main_thread(self.evidence.threads)
        readings = [frames.read_thread(thread) for thread in self.evidence.threads if thread is not main]
        own = [reading for reading in readings if reading.own is not None]
        return sorted(own, key=lambda reading: not blocked_in_lock(reading, None))

    def guilty_child(self) -> ProcessEvidence | None:
        """The first worker that is stuck in code of its own, when this rank waits for its workers."""
        if self.wait not in (Wait.LOADER, Wait.FINALIZER, Wait.LIBRARY, Wait.OWN):
            return None
        if self.wait is Wait.OWN and self.reading.blocked_by is None:
            return None
        for child in self.evidence.children:
            reading = frames.read_threads(child.threads)
            if reading.telling is None or idle_worker(reading):
                continue
            if child_blocked_in_lock(child) or reading.own is not None:
                return child
        return None


def idle_worker(reading: Reading) -> bool:
    """A loader worker that waits for work to be given."""
    return (
        "_worker_loop" in reading.names
        and reading.telling is not None
        and reading.telling.short == "_worker_loop"
    ) or (reading.telling is not None and reading.telling.short in ("_pin_memory_loop", "forkserver", "main"))


def child_blocked_in_lock(child: ProcessEvidence) -> bool:
    """A forked child in a finalizer, a lock or a future: what it waits for does not exist after the fork."""
    reading = frames.read_threads(child.threads)
    if reading.wait is Wait.FINALIZER:
        return True
    return blocked_in_lock(reading, child.proc.syscall)


_LOCK_FILES = ("threading.py", "logging/__init__.py", "synchronize.py", "futures/_base.py", "weakref.py")
_LOCK_NAMES = frozenset({"acquire", "__enter__", "_wait_for_tstate_lock", "result", "join", "_wait_for_lock"})


def blocked_in_lock(reading: Reading, syscall: int | None) -> bool:
    if reading.wait in frames.IN_COLLECTIVE or reading.wait is Wait.STORE:
        return False
    blocked = reading.blocked_by
    if blocked is not None:
        if blocked.short in _LOCK_NAMES or "acquire" in reading.names:
            return True
        return blocked.short in ("wait", "emit", "handle") and blocked.file.endswith(_LOCK_FILES)
    if syscall == _FLOCK and reading.wait in (Wait.OWN, Wait.LIBRARY):
        return True
    text = source.line_text(reading.telling) if reading.wait is Wait.OWN else ""
    return bool(text) and source.says_lock(text) and syscall in (None, FUTEX_SYSCALL)


def _by_the_clock(proc: ProcState) -> bool:
    """Whether the main thread sleeps for a time, and not until something comes."""
    return proc.syscall in _SLEEPING or "nanosleep" in proc.wchan


def _corrected(reading: Reading, text: str, evidence: RankEvidence) -> Wait:
    """The wait of a thread whose deepest Python frame is the user's own line: C code may wait below it."""
    own_deepest = reading.telling is not None and frames.origin(reading.telling) is Origin.OWN
    if reading.wait is not Wait.OWN or reading.blocked_by is not None or not own_deepest:
        return reading.wait
    if evidence.proc.syscall in _ON_FILES:
        return Wait.OWN
    if _by_the_clock(evidence.proc):
        return Wait.OWN
    if source.says_store(text):
        return Wait.STORE
    if source.says_collective(text):
        return Wait.IMPLICIT
    return Wait.OWN


def _asked(reading: Reading, started: float) -> Wait:
    """What the user's own loop asks for again and again: a key of the store, a collective's end."""
    if reading.wait is not Wait.OWN or reading.own is None or not source.line_text(reading.own, started):
        return Wait.OWN
    text = source.asked_in_loop(reading.own)
    if source.says_store(text):
        return Wait.STORE
    return Wait.IMPLICIT if source.says_collective(text) else Wait.OWN


def _common_functions(ranks: Sequence[RankEvidence]) -> frozenset[tuple[str, str]]:
    found = [own for evidence in ranks if (own := frames.own_functions(evidence.threads))]
    return frozenset.intersection(*found) if len(found) > 1 else frozenset()


def make_views(samples: Sequence[Sample]) -> list[View]:
    """The ranks of the last sample, each joined with its earlier self."""
    if not samples:
        return []
    earlier = {item.rank: item for item in samples[0].ranks} if len(samples) > 1 else {}
    views = []
    common = _common_functions(samples[-1].ranks)
    for evidence in samples[-1].ranks:
        old = earlier.get(evidence.rank)
        reading = frames.read_threads(evidence.threads)
        before = frames.read_threads(old.threads) if old else reading
        if (
            reading.telling is None
            and before.telling is not None
            and old is not None
            and not evidence.threads
        ):
            reading = before
        started = evidence.process.started if evidence.process else 0.0
        text = source.line_text(reading.own, started)
        moved = motion.measure(old, evidence)
        wait = _corrected(reading, text, evidence)
        if wait is Wait.OWN:
            wait = _asked(reading, started)
        polls = not moved.busy and motion.stays(before, reading)
        context = reading.context
        if common and context:
            context = frames.context_without(evidence.threads, common)
        in_vain = old is not None and not moved.beat_changed and _in_vain(old, evidence, reading, moved)
        views.append(View(evidence, reading, before, moved, wait, text, polls, context, in_vain))
    return views


def _in_vain(old: RankEvidence, new: RankEvidence, reading: Reading, moved: Motion) -> bool:
    """Whether a rank, or a worker that it waits for, computes without an end, by the rank's own pace."""
    if not endless.beyond_its_pace(new):
        return False
    if endless.computes_in_vain(old.threads, new.threads, moved):
        return True
    if endless.beyond_its_pace(new, endless.DOUBTFUL_S) and endless.stands_still(
        old.threads, new.threads, moved
    ):
        return True
    if reading.for_children and endless.started_anew(old.children, new.children):
        return True
    earlier = {child.pid: child for child in old.children}
    return not moved.busy and any(
        child.pid in earlier and endless.tries_for_ever(earlier[child.pid].threads, child.threads)
        for child in (new.children if reading.for_children else ())
    )


_LONG_PHASES = frozenset({Phase.LOAD, Phase.EVAL, Phase.GENERATE, Phase.COMPILE, Phase.SAVE})
_ARITHMETIC = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


def _workers_work(view: View) -> bool:
    """Whether the rank feeds on worker processes (datasets' map) of which one is at work."""
    workers = [frames.read_threads(child.threads) for child in view.evidence.children]
    working = any(reading.telling is not None and not idle_worker(reading) for reading in workers)
    return working or "iflatmap_unordered" in view.reading.names


def _in_arithmetic(reading: Reading) -> bool:
    return reading.telling is not None and bool(knowledge.ARITHMETIC_FILE.search(reading.telling.file))


def static_slow(view: View) -> Phase:
    """With a single sample: the slow phase that a rank outside of collectives is plainly working in."""
    reading = view.reading
    if view.wait is Wait.COMPILE:
        return Phase.COMPILE
    if view.wait is Wait.SAVE_IO or (reading.phase is Phase.SAVE and reading.blocked_by is None):
        return Phase.SAVE
    if "_find_and_load" in reading.names:
        return Phase.INIT
    in_library = reading.wait is Wait.LIBRARY and reading.blocked_by is None
    if reading.phase is Phase.PREPROCESS and (_workers_work(view) or in_library or view.active):
        return Phase.PREPROCESS
    if reading.phase in _LONG_PHASES and (view.active or in_library):
        return reading.phase
    # In the model's own arithmetic: a faulthandler dump does not say active, and py-spy's idle is a guess.
    if in_library and (reading.step in _ARITHMETIC or _in_arithmetic(reading)):
        return reading.step
    return Phase.UNKNOWN
