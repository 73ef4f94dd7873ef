"""Whether a rank moves: what changed between two looks at the same process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis import frames, knowledge, source
from ftdash.monitor.diagnosis.frames import Origin, Reading, Wait
from ftdash.monitor.diagnosis.knowledge import SLOW_PHASES, Phase
from ftdash.monitor.diagnosis.model import DumpFailure, ProcessEvidence, RankEvidence, Thread

_BUSY = 0.3  # of one core
_CHILD_BUSY = 0.03
_TRANSPORTS = 0.25  # of one core; measured on two: idle 0.05 (most 0.14) at a load of 24, at work 0.45
_SLEEPS = 3
_CHUNK_BYTES = 64 << 10
_GROWTH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Motion:
    """Differences between two samples `interval_s` apart; `known` is False with a single sample.

    `counted` says whether /proc counters exist; recorded stacks have none, only their frames can differ.
    """

    known: bool = False
    counted: bool = False
    interval_s: float = 0.0
    stack_changed: bool = False
    line_changed: bool = False
    cpu: float = 0.0
    wanted: float = 0.0  # share of the interval in which the main thread ran or was ready to
    transport: float = 0.0  # the same, of the threads that move a collective's bytes
    sleeps: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    drains: bool = False  # the other side of the connection that it sends to takes bytes
    grown_bytes: int = 0
    beat_changed: bool = False
    children_move: bool = False
    threads_move: bool = False  # other threads in the user's code
    commands_move: bool = False  # programs below it that are no Python
    died: bool = False

    @property
    def moved(self) -> bool:
        """For a rank inside a collective: whether it left it, or woke up, in between."""
        if not self.known:
            return False
        if self.stack_changed or self.beat_changed or self.transport > _TRANSPORTS:
            return True
        return self.sleeps >= _SLEEPS and max(self.cpu, self.wanted) <= 0.8  # not one that spins

    @property
    def busy(self) -> bool:
        return max(self.cpu, self.wanted) > _BUSY

    @property
    def transfers(self) -> bool:
        return self.read_bytes + self.written_bytes >= _CHUNK_BYTES

    def words(self) -> str:
        """What moved, for the evidence list."""
        said = []
        if self.beat_changed:
            said.append("its heartbeat advanced")
        if self.stack_changed:
            said.append("its stack changed")
        if self.written_bytes:
            said.append(f"it wrote {_amount(self.written_bytes)}")
        if self.read_bytes >= _CHUNK_BYTES:
            said.append(f"it read {_amount(self.read_bytes)}")
        if self.busy:
            said.append(f"it used {self.cpu:.0%} of a core")
        if self.drains:
            said.append("what it sends is taken")
        if self.transport > _TRANSPORTS:
            said.append("its collective moves bytes")
        if self.children_move:
            said.append("its worker processes move")
        return ", ".join(said)


def _amount(count: int) -> str:
    """Bytes with a decimal unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes" if count != 1 else "1 byte"


_PYTHON = frozenset({Origin.OWN, Origin.LIBRARY, Origin.STDLIB})


def _key(thread: Thread, *, python_only: bool = False) -> tuple[object, ...]:
    return tuple(
        (frame.short, frame.file, frame.line)
        for frame in thread.frames
        if not python_only or frames.origin(frame) in _PYTHON
    )


def _turns_in_place(before: ProcessEvidence, after: ProcessEvidence) -> bool:
    """Whether a worker was both times in one loop of the user's that changes nothing it asks for."""
    return _turns(frames.read_threads(before.threads), frames.read_threads(after.threads))


def _turns(first: Reading, second: Reading) -> bool:
    if second.own is None or second.telling is not second.own or not _same_own_function(first, second):
        return False
    return source.gets_on(second.own) is False


def _runs_coroutines(reading: Reading) -> bool:
    """Whether a thread runs an event loop: what its coroutines wait for is on no stack, their turns are."""
    return reading.blocked_by is not None and {"_run_once", "run_forever"} <= reading.names


def _child_moves(before: ProcessEvidence, after: ProcessEvidence, interval_s: float) -> bool:
    cpu = (after.proc.cpu_s - before.proc.cpu_s) / interval_s
    wanted = (after.proc.main_wanted_s - before.proc.main_wanted_s) / interval_s
    moved = after.proc.read_chars + after.proc.write_chars - before.proc.read_chars - before.proc.write_chars
    if _turns_in_place(before, after):
        return False
    if max(cpu, wanted) > _CHILD_BUSY or moved >= _CHUNK_BYTES:
        return True
    main_before, main_after = frames.main_thread(before.threads), frames.main_thread(after.threads)
    if main_before is None or main_after is None:
        return False
    if _key(main_before) != _key(main_after):
        return True
    reading = frames.read_threads(after.threads)
    woke = after.proc.main_sleeps - before.proc.main_sleeps >= _SLEEPS
    return woke and reading.own is not None and not only_waits(reading, reading)


_SHELL = re.compile(r"(?:^|/)(?:ba|da|z|k)?sh$")
_WAITS_IN_SHELL = re.compile(r"\b(?:while|until)\b.*\bsleep\b", re.S)


def _without_waiting_shells(children: Sequence[ProcessEvidence]) -> Sequence[ProcessEvidence]:
    """The children, without a shell that asks again and again, and what it starts to ask and to sleep."""
    shells = [child for child in children if child.command and _SHELL.search(child.command[0])]
    waiting = [child for child in shells if _WAITS_IN_SHELL.search(" ".join(child.command))]
    if not waiting:
        return children
    below = {child.pid for child in waiting}
    return [
        child
        for child in children
        if child.pid not in below and child.ppid not in below and child.failure is not DumpFailure.GONE
    ]


def measure(before: RankEvidence | None, after: RankEvidence) -> Motion:
    """Compare two samples of one rank."""
    if before is None or before is after or before.process is None or after.process is None:
        return Motion()
    if before.pid != after.pid and before.pid and after.pid:
        return Motion(known=True, stack_changed=True)
    old, new = before.proc, after.proc
    interval_s = max(after.t - before.t, 1e-3)
    counted = bool(old.state and new.state and (old.cpu_s or old.threads))
    gone = after.process.failure in (DumpFailure.GONE, DumpFailure.ZOMBIE)
    died = gone and before.process.failure not in (DumpFailure.GONE, DumpFailure.ZOMBIE)
    first, second = frames.main_thread(before.threads), frames.main_thread(after.threads)
    changed = line_changed = False
    if first is not None and second is not None:
        # A dump with native frames holds more than one without: that is no movement.
        mixed = before.process.source != after.process.source
        one, two = _key(first, python_only=mixed), _key(second, python_only=mixed)
        changed = one != two
        line_changed = one[:1] != two[:1]
    children = {child.pid: child for child in before.children}
    moving = [
        child
        for child in _without_waiting_shells(after.children)
        if child.pid not in children or _child_moves(children[child.pid], child, interval_s)
    ]
    move = any(child.failure is not DumpFailure.NOT_PYTHON for child in moving)
    commands = any(child.failure is DumpFailure.NOT_PYTHON for child in moving)
    beat = bool(before.beat and after.beat and before.beat.sign != after.beat.sign)
    if not counted:
        return Motion(
            known=True,
            interval_s=interval_s,
            stack_changed=changed,
            line_changed=line_changed,
            beat_changed=beat,
            children_move=move,
            threads_move=_threads_move(before, after),
            died=died,
        )
    # What wakes such a rank up, and what it writes, is the line that tells that it waits.
    logs_its_wait = not changed and any(
        frame.short in knowledge.LOGS_ITS_WAIT for frame in (second.frames if second else ())
    )
    return Motion(
        known=True,
        counted=True,
        interval_s=interval_s,
        stack_changed=changed,
        line_changed=line_changed,
        cpu=(new.cpu_s - old.cpu_s) / interval_s,
        wanted=(new.main_wanted_s - old.main_wanted_s) / interval_s,
        transport=(new.transport_wanted_s - old.transport_wanted_s) / interval_s,
        sleeps=0 if logs_its_wait else new.main_sleeps - old.main_sleeps,
        read_bytes=max(0, new.read_chars - old.read_chars, new.read_bytes - old.read_bytes),
        written_bytes=0
        if logs_its_wait
        else max(0, new.write_chars - old.write_chars, new.write_bytes - old.write_bytes),
        drains=bool(new.unsent and old.unsent and new.unsent != old.unsent),
        grown_bytes=new.rss - old.rss,
        beat_changed=beat,
        children_move=move,
        threads_move=_threads_move(before, after),
        commands_move=commands,
        died=died,
    )


def _threads_move(before: RankEvidence, after: RankEvidence) -> bool:
    """Whether another thread than the main one computes, or gets on in a loop of the user's that ends.

    A thread that only repeats itself, as a heartbeat, is alive in a stuck rank too.
    """
    interval_s = max(after.t - before.t, 1e-3)
    main = frames.main_thread(after.threads)
    awaits = main is not None and "result" in frames.read_thread(main).names
    old = {thread.os_tid: thread for thread in before.threads if thread.os_tid}
    slept = (after.process.proc.sleeps if after.process else 0) - (
        before.process.proc.sleeps if before.process else 0
    )
    for thread in after.threads:
        earlier = old.get(thread.os_tid)
        if thread is main:
            continue
        if earlier is None:  # of a pool that was made in between
            if thread.wanted_s / interval_s > _BUSY and "_worker" in frames.read_thread(thread).names:
                return True
            continue
        first, second = frames.read_thread(earlier), frames.read_thread(thread)
        if (thread.wanted_s - earlier.wanted_s) / interval_s > _BUSY and not _turns(first, second):
            return True
        for_main = (
            second.own is not None or "_worker" in second.names
        )  # a pool's; not a reporter's own thread
        receives = for_main and bool(second.names & knowledge.RECEIVES)
        if (receives or (awaits and _runs_coroutines(second))) and thread.sleeps - earlier.sleeps >= _SLEEPS:
            return True
        if second.own is None or not _in_a_loop_that_gets_on(second, to_an_end=True):
            continue
        if _key(earlier, python_only=True) != _key(thread, python_only=True):
            return True
        if slept >= _SLEEPS and _paces_itself(first, second, to_an_end=True):
            return True
    return False


def _same_own_function(first: Reading, second: Reading) -> bool:
    if first.own is None or second.own is None:
        return False
    return (first.own.name, first.own.file) == (second.own.name, second.own.file)


def _tight_loop(motion: Motion, first: Reading, second: Reading, gil: bool) -> bool:
    """A pure Python loop in one function of the user, that calls nothing and holds the interpreter lock."""
    own = second.telling is not None and frames.origin(second.telling) is Origin.OWN
    own = own and first.telling is not None and frames.origin(first.telling) is Origin.OWN
    if second.own is not None and source.gets_on(second.own):
        return False
    return own and gil and motion.busy and _same_own_function(first, second) and not motion.transfers


def _at_a_lock(reading: Reading) -> bool:
    return reading.telling is reading.own and source.says_lock(source.line_text(reading.own))


def _waits_for_workers(reading: Reading) -> bool:
    return bool(reading.names & knowledge.WORKER_POLLS)


def only_waits(first: Reading, second: Reading) -> bool:
    """Whether the user's lines stand in a loop that waits until something holds, or in a lock's own poll."""
    if first.wait is second.wait is Wait.LOCK:
        return True
    callee = ""
    for frame in (second.own, *second.callers[:2]):
        if frame is None:
            return False
        if source.polls(frame, callee):
            return True
        if not source.does_nothing(frame):
            return False
        callee = frame.short
    return False


def stays(first: Reading, second: Reading) -> bool:
    """Whether the user's innermost function was the same at both looks, in a loop that only waits."""
    return _same_own_function(first, second) and only_waits(first, second)


def _paces_itself(before: Reading, reading: Reading, *, to_an_end: bool = False) -> bool:
    """Whether it sleeps in a loop of the user's that goes through something."""
    if reading.own is None or reading.telling is not reading.own or reading.blocked_by is not None:
        return False
    if not any("sleep" in source.line_text(frame) for frame in (before.own, reading.own)):
        return False
    return _in_a_loop_that_gets_on(reading, to_an_end=to_an_end)


def _sends(reading: Reading) -> bool:
    """Whether it hands bytes to a socket or a pipe, which /proc counts for no process."""
    if reading.blocked_by is not None:
        return reading.blocked_by.short in knowledge.SENDS
    return reading.telling is reading.own and source.says_send(source.line_text(reading.own))


def _in_a_loop_that_gets_on(reading: Reading, *, to_an_end: bool) -> bool:
    for frame in (reading.own, *reading.callers[:3]):
        gets_on = source.gets_on(frame, to_an_end=to_an_end) if frame is not None else None
        if gets_on is not None:
            return gets_on
    return False


# Deepest in a library's own code, which asks no other thread or process: its wake-ups are work.
_AT_WORK = frozenset({Wait.LIBRARY, Wait.COMPILE, Wait.SAVE_IO})


def progresses(motion: Motion, first: Reading, second: Reading, gil: bool) -> bool:
    """For a rank outside of any collective: whether it gets on with work that will end.

    A sleep or a wait without end shows nothing; a poll shows wake-ups at one and the same line, or a loop
    in the source that only waits until a condition holds, in any phase; a tight loop burns a core without
    calling anything. Work changes its stack, moves bytes, grows, uses a core in native code, goes through
    a loop at its own pace, or wakes up inside a library in a phase that is known to be slow.
    """
    if motion.beat_changed or motion.transfers:
        return True
    if second.for_children and (motion.children_move or motion.commands_move):
        return True  # others than those that it waits for may well be at work
    if not motion.busy and _waits_for_workers(second):
        return False  # its workers are what would move
    waits = not motion.busy and _same_own_function(first, second) and only_waits(first, second)
    fed_by_threads = not second.names & knowledge.TAKES_FROM_WORKERS
    if (
        fed_by_threads
        and motion.threads_move
        and (waits or second.blocked_by is not None or _at_a_lock(second))
    ):
        return True  # it waits for a thread of its own, which works
    if waits:
        return False
    slow_phase = second.phase in SLOW_PHASES or first.phase in SLOW_PHASES
    by_itself = second.blocked_by is None  # a few bytes may be of a heartbeat beside a main thread that waits
    wakes = motion.sleeps >= _SLEEPS and by_itself and second.wait in _AT_WORK
    writes = by_itself and motion.written_bytes > 0
    if slow_phase and (writes or motion.busy or wakes or motion.stack_changed):
        return True
    if not motion.counted:
        return motion.stack_changed
    if motion.busy:
        return not _tight_loop(motion, first, second, gil)
    if motion.grown_bytes > _GROWTH_BYTES or (motion.sleeps >= _SLEEPS and _paces_itself(first, second)):
        return True
    if motion.sleeps >= _SLEEPS and second.names & knowledge.RECEIVES and second.blocked_by is not None:
        return True  # a blocked read wakes up when something has come
    if motion.drains or (motion.sleeps and _sends(second)):
        return True  # the other side took something: nothing else ends a blocked write
    if motion.sleeps >= _SLEEPS and _runs_coroutines(second):
        return True
    if second.phase is Phase.UNKNOWN or second.phase in (Phase.TRAIN, Phase.TEARDOWN):
        # A poll: wakes up, sleeps again at the same place.
        return motion.stack_changed and not _same_own_function(first, second)
    return motion.stack_changed
