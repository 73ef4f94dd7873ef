"""A rank outside of any collective: what it is held up by, or what it is working at."""

from __future__ import annotations

from collections.abc import Sequence

from ftdash.monitor.diagnosis import endless
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import SLOW_PHASES, WORKER_POLLS, Phase
from ftdash.monitor.diagnosis.model import DumpFailure, Verdict
from ftdash.monitor.diagnosis.views import View, blocked_in_lock, child_blocked_in_lock, static_slow
from ftdash.monitor.diagnosis.words import describe, it, they


def outside_kind(view: View) -> Kind:
    """What a rank outside of collectives is held up by."""
    children = view.evidence.children
    if view.wait is Wait.LOADER or view.reading.names & WORKER_POLLS:
        return Kind.LOCK if any(child_blocked_in_lock(child) for child in children) else Kind.DATA_LOADER
    if view.joins_a_process and any(child_blocked_in_lock(child) for child in children):
        return Kind.LOCK
    if view.wait in (Wait.FINALIZER, Wait.LOCK):
        return Kind.LOCK
    if view.wait is Wait.STORE:
        return Kind.STORE
    if view.wait is Wait.RENDEZVOUS:
        return Kind.RENDEZVOUS
    if view.wait is Wait.TEARDOWN:
        return Kind.TEARDOWN
    if view.wait is Wait.SAVE_IO:
        return Kind.STORAGE
    if awaited := view.awaited_thread():
        if blocked_in_lock(awaited, None):
            return Kind.LOCK
        return Kind.STORAGE if awaited.wait is Wait.SAVE_IO else Kind.OUTSIDE
    if blocked_in_lock(view.reading, view.evidence.proc.syscall):
        return Kind.LOCK
    return Kind.OUTSIDE


def outside_why(view: View, kind: Kind) -> str:
    held = view.reading.blocked_by
    inside = f" in {held.name}" if held else ""
    if view.in_vain and view.motion.busy:
        return endless.words(view.evidence)
    if (awaited := view.awaited_thread()) and kind is not Kind.LOCK:
        return f"it waits{inside} for its own thread {awaited.thread}, which is at {awaited.own}"
    dead = [c for c in view.evidence.children if c.failure is DumpFailure.ZOMBIE]
    if kind is Kind.DATA_LOADER:
        tail = f"; {len(dead)} of its workers are dead" if dead else ""
        workers = "worker processes" if view.reading.names & WORKER_POLLS else "data loader"
        return f"it waits for its {workers}{inside}, which does not deliver{tail}"
    if kind is Kind.LOCK:
        if any(child_blocked_in_lock(child) for child in view.evidence.children):
            return "its worker waits for a lock or a thread that does not exist after the fork"
        return f"it waits for a lock or another thread{inside}"
    if kind is Kind.STORE:
        return "it waits for a key of the store"
    if kind is Kind.STORAGE:
        return "it is blocked in file I/O that does not get on"
    if view.motion.counted and view.motion.busy:
        return "it loops in its own code, outside of any collective"
    if view.motion.counted and view.motion.sleeps >= 3:
        return f"it polls{inside} outside of any collective"
    return f"it is outside of any collective{inside}"


def slow(working: Sequence[View], waiting: Sequence[View], *, guess: bool = False) -> Verdict:
    lead = next((view for view in working if view.reading.phase in SLOW_PHASES), working[0])
    phase = lead.reading.phase or static_slow(lead)
    doing = {
        Phase.PREPROCESS: "preprocessing data",
        Phase.SAVE: "writing a checkpoint",
        Phase.COMPILE: "compiling",
        Phase.EVAL: "evaluating",
        Phase.LOAD: "loading",
        Phase.INIT: "starting",
        Phase.GENERATE: "generating",
        Phase.DATA: "waiting for data that its workers are making",
    }.get(phase, "computing")
    moves = lead.motion.words()
    evidence = [describe(lead)]
    if moves:
        evidence.insert(0, f"rank {lead.rank}: {moves} within {lead.motion.interval_s:.1f} s")
    reason = f"slow, not stuck: {they(working, 'is')} {doing}"
    if waiting:
        reason += f", {they(waiting, 'waits')} for {it(working)}"
    next_steps = (
        "watch the time left to the collective timeout (`ddp_timeout`, init_process_group's timeout)",
    )
    return Verdict(
        Kind.SLOW,
        (),
        0.6 if guess else 0.85,
        reason,
        tuple(evidence),
        ("looked at too shortly to see whether it gets on: look again over some seconds",) if guess else (),
        next_steps,
    )
