"""Threads of one rank that get in one another's way: two of them in collectives at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.frames import Reading
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Culprit, Verdict
from ftdash.monitor.diagnosis.views import View
from ftdash.monitor.diagnosis.words import confidence, describe, ranks_of


def two_collectives_at_once(views: Sequence[View], two: bool, *, saving: bool = False) -> Verdict | None:
    """Ranks whose main thread is in a collective while a thread of theirs is in another one.

    Which of the two comes first is chance, so it differs between the ranks: an asynchronous checkpoint beside
    a barrier (KempnerInstitute/KempnerForge#104). Each thread needs a group of its own.
    With `saving` only threads that save count: others may well wait in a group of their own.
    """
    beside = {view.rank: other for view in views if (other := _communicating_beside(view))}
    if saving:
        beside = {rank: other for rank, other in beside.items() if other.context is Phase.SAVE}
    if not beside:
        return None
    named = [view for view in views if view.rank in beside]
    return Verdict(
        Kind.ORDER_MISMATCH,
        tuple(_with_thread(view, beside[view.rank]) for view in named),
        confidence(0.8, views, two=two),
        f"two threads of rank {ranks_of(named)} are in collectives at once, in an order that is chance",
        (describe(named[0]), f"thread {beside[named[0].rank].thread}: {_place(beside[named[0].rank])}"),
        fix="give the thread a process group of its own (new_group), or wait for it before the next "
        "collective: calls on one group have to come in the same order on every rank",
    )


def _communicating_beside(view: View) -> Reading | None:
    """A thread in a collective beside a main thread that is in one itself, not for its backward."""
    main = frames.main_thread(view.evidence.threads)
    if main is None or not frames.read_thread(main).in_collective:
        return None
    for_backward = frames.autograd_threads(view.evidence.threads, main)
    for thread in view.evidence.threads:
        reading = frames.read_thread(thread)
        if thread is not main and thread not in for_backward and reading.in_collective and reading.op:
            return reading
    return None


def _with_thread(view: View, other: Reading) -> Culprit:
    why = f"its thread {other.thread} is in {other.op} while its main thread is in {view.op}"
    culprit = view.culprit(why)
    return replace(culprit, frame=f"{culprit.frame}; thread {other.thread}: {_place(other)}")


def _place(reading: Reading) -> str:
    """The user's line of a thread, else what it is in below the library that started it."""
    shown = frames.user_frame(reading)
    return f"{reading.op} at {shown}" if shown else reading.op
