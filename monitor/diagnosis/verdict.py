"""From the stacks and states of all ranks to a verdict, in the order of suspicion.

Undumpable or dead; in teardown; outside any collective while others wait; in a save or evaluation of its
own; the odd phase; another collective; the same collective from another place; nobody. A rank that gets
on with work is no culprit: the others are slow, not stuck. An idle rank is not innocent and an active one
not guilty (a spinning wait is active).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ftdash.monitor.diagnosis.alone import nobody_waits
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Culprit, DumpFailure, Sample, Verdict
from ftdash.monitor.diagnosis.odd import all_waiting, key_not_set
from ftdash.monitor.diagnosis.outside import outside_kind, outside_why, slow
from ftdash.monitor.diagnosis.starting import before_training
from ftdash.monitor.diagnosis.views import View, static_slow
from ftdash.monitor.diagnosis.words import confidence, describe, it, place_of, rank_list, ranks_of, they
from ftdash.monitor.wording import plural

_WAITS_FOR_OTHERS = frozenset({Wait.STORE, Wait.RENDEZVOUS})


def stack_verdict(views: Sequence[View], sample: Sample) -> Verdict:
    """The verdict of stacks and process states alone."""
    verdict = _of_seen([view for view in views if not view.not_seen], sample, views)
    missing = [view for view in views if view.not_seen]
    return _without(missing, verdict) if missing else verdict


_REASONS = 3  # told in full, of those why ranks could not be looked at
# Verdicts that hold only when every rank was looked at.
_NEEDS_ALL = frozenset({Kind.ALL_OUTSIDE, Kind.NETWORK, Kind.RENDEZVOUS, Kind.STORE, Kind.NO_EVIDENCE})


def _without(missing: Sequence[View], verdict: Verdict) -> Verdict:
    """What a verdict is worth when nobody could look at some ranks: they are neither guilty nor cleared."""
    texts = sorted({view.evidence.process.failure_text for view in missing if view.evidence.process})
    more = f"; and {len(texts) - _REASONS} more such reasons" if len(texts) > _REASONS else ""
    unseen = f"rank {ranks_of(missing)} could not be looked at: {'; '.join(texts[:_REASONS])}{more}"
    if working := [view for view in missing if view.motion.counted and (view.motion.busy or view.progresses)]:
        unseen += f"; rank {ranks_of(working)} runs ({working[0].motion.words()})"
    against = (*verdict.against, unseen)
    if verdict.kind in _NEEDS_ALL:
        reason = f"{unseen}. What the others show does not decide: {verdict.reason}"
        return Verdict(
            Kind.NO_EVIDENCE, (), 0.0, reason, verdict.evidence, verdict.against, ("look again in a minute",)
        )
    return replace(verdict, against=against, confidence=verdict.confidence * 0.8)


def _of_seen(views: Sequence[View], sample: Sample, everybody: Sequence[View]) -> Verdict:
    seen = [view for view in views if not view.dead]
    two = any(view.motion.known for view in views)
    absent = sample.expected - {view.rank for view in everybody}
    waiting = [view for view in seen if view.waits_for_peers]
    for stage in (_gone, _unresponsive, _external_peer, _teardown):
        if verdict := stage(seen, views, waiting, absent, two):
            return verdict
    if not any(view.has_stack for view in seen):
        return no_evidence(everybody)
    pending = [view for view in seen if view.wait in _WAITS_FOR_OTHERS]
    if not waiting and pending:
        return before_training(seen, pending, absent, two)
    held = {view.rank for view in waiting}
    outside = [view for view in seen if view.rank not in held and view.has_stack]
    if waiting and any(not view.in_collective for view in outside):
        return _outside(waiting, outside, two)
    if waiting and not outside:
        if working := _computing(waiting):
            return slow(working, [view for view in waiting if view not in working])
        return all_waiting(waiting, absent, two)
    return nobody_waits(seen, waiting, two)


def _computing(waiting: Sequence[View]) -> list[View]:
    """Ranks at work in a backward that shows no collective, while the wait of the others uses no processor.

    Where waits spin (NCCL), the others are busy as well, and nothing can be told.
    """
    working = [view for view in waiting if view.op == "backward" and view.motion.counted and view.motion.busy]
    rest = [view for view in waiting if view not in working]
    if not rest or any(view.motion.busy or not view.motion.counted for view in rest):
        return []
    return working


def no_evidence(views: Sequence[View]) -> Verdict:
    failures = {
        (view.evidence.process.failure, view.evidence.process.failure_text, view.evidence.process.remedy)
        for view in views
        if view.evidence.process is not None and view.evidence.process.failure
    }
    texts = tuple(f"{failure}: {text}" for failure, text, _ in sorted(failures, key=str))
    remedies = tuple(sorted({remedy for _, _, remedy in failures if remedy}))
    reason = "no process could be read" if views else "no rank was found"
    return Verdict(Kind.NO_EVIDENCE, (), 0.0, reason, texts, (), remedies)


def _gone(
    seen: Sequence[View], views: Sequence[View], waiting: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict | None:
    """A dead or missing rank, while the others wait in a collective, for the store or to start."""
    dead = [view for view in views if view.dead]
    held = [view for view in seen if view.waits_for_peers or view.wait in _WAITS_FOR_OTHERS]
    lost = absent - {view.rank for view in dead}
    if not (dead or lost) or not held:
        return None
    gone = lost | {view.rank for view in dead}
    starting = all(
        view.wait is Wait.RENDEZVOUS or (view.reading.context is Phase.INIT and view.op != "new_group")
        for view in held
    )
    store_lost = 0 in gone and (starting or all(view.wait is Wait.STORE for view in held))
    recorded = not dead and all(view.recorded for view in seen)
    if recorded and not starting and not store_lost:
        return _undumped(seen, held, lost)
    named = [view for view in dead if not store_lost or view.rank == 0]
    culprits = [view.culprit("its process is gone: the others wait for it") for view in named]
    where = place_of(held[0])
    for rank in sorted({0} & lost if store_lost else lost):
        text = "it has not joined" if starting and not store_lost else "no process of it is left"
        culprits.append(Culprit(rank, "", 0, "", f"{text}: {ranks_of(held)} wait{where}"))
    ranks = rank_list(culprit.rank for culprit in culprits)
    if store_lost:
        kind, reason = Kind.STORE, "rank 0, which owns the store, is gone: stop the job"
    elif starting:
        kind, reason = Kind.RENDEZVOUS, f"rank {ranks} has not come to the rendezvous"
    else:
        kind, reason = Kind.DEAD_RANK, f"rank {ranks} is gone, the others wait for it"
    evidence = (
        f"ranks {ranks_of(held)} wait: {describe(held[0])}",
        f"{len(gone)} of {len(seen) + len(gone)} are gone",
    )
    return Verdict(kind, tuple(culprits), confidence(0.95, held, two=True), reason, evidence)


def _undumped(seen: Sequence[View], held: Sequence[View], lost: frozenset[int]) -> Verdict | None:
    """Ranks without a file among recorded dumps: suspects when everybody else waits, noise when many miss."""
    if len(held) < len(seen) or len(lost) > len(seen) / 2:
        return None
    why = "there is no dump of it, while all others wait in a collective"
    return Verdict(
        Kind.UNDUMPABLE,
        tuple(Culprit(rank, "", 0, "", why) for rank in sorted(lost)),
        0.6,
        f"rank {rank_list(lost)} gave no dump: missing evidence is evidence",
        (f"ranks {ranks_of(held)} wait: {describe(held[0])}",),
        ("the tool that took the dumps may have lost it: count dumps and ranks",),
    )


def _unresponsive(
    seen: Sequence[View], views: Sequence[View], waiting: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict | None:
    stopped = [view for view in seen if view.stopped]
    if (stopped and len(stopped) < len(seen)) or (stopped and not waiting):
        culprits = []
        for view in stopped:
            tracer = view.evidence.proc.tracer_pid
            by = f"by tracer {tracer}" if tracer else "by a signal (SIGSTOP)"
            culprits.append(view.culprit(f"the process is stopped {by}: kill -CONT {view.evidence.pid}"))
        moved = [c.evidence.process.moved for c in stopped if c.evidence.process and c.evidence.process.moved]
        return Verdict(
            Kind.STOPPED_RANK,
            tuple(culprits),
            0.95,
            f"{they(stopped, 'is')} stopped",
            (f"state T in /proc of rank {ranks_of(stopped)}", *moved),
        )
    asleep = [
        view
        for view in seen
        if (view.evidence.proc.state == "D" and not (view.motion.known and view.progresses))
        or (view.evidence.process and view.evidence.process.failure is DumpFailure.D_STATE)
    ]
    if asleep and len(asleep) < len(seen) and (waiting or not all(view.has_stack for view in asleep)):
        culprits = [
            view.culprit(
                "uninterruptible sleep"
                + (f" in {view.evidence.proc.wchan}" if view.evidence.proc.wchan else "")
                + ": driver or storage of this node"
            )
            for view in asleep
        ]
        return Verdict(
            Kind.D_STATE,
            tuple(culprits),
            0.9 if two or any(view.undumpable for view in asleep) else 0.75,
            f"rank {ranks_of(asleep)} sleeps in the kernel and cannot be woken",
            (
                f"state D in /proc of rank {ranks_of(asleep)}",
                f"{plural(len(waiting), 'rank')} in a collective",
            ),
        )
    mute = [view for view in seen if view.undumpable]
    if mute and waiting and len(mute) <= len(seen) / 2:
        culprits = [
            view.culprit(
                "no stack could be read, while the others' could: "
                + ((view.evidence.process.failure_text if view.evidence.process else "") or "no dump")
            )
            for view in mute
        ]
        return Verdict(
            Kind.UNDUMPABLE,
            tuple(culprits),
            0.75,
            f"rank {ranks_of(mute)} gives no stack: a missing dump is evidence",
            (f"ranks {ranks_of(waiting)} wait: {describe(waiting[0])}",),
        )
    return None


def _external_peer(
    seen: Sequence[View], views: Sequence[View], waiting: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict | None:
    peers = [view for view in seen if view.wait is Wait.WEIGHT_SYNC]
    if not peers or any(view.motion.known and view.motion.moved for view in peers):
        return None
    why = "it waits for the inference server to join the weight-sync group, not for a training rank"
    return Verdict(
        Kind.EXTERNAL_PEER,
        tuple(view.culprit(why) for view in peers),
        confidence(0.85, peers, two=two),
        f"rank {ranks_of(peers)} waits for a process outside of the job",
        (f"{describe(peers[0])}",),
    )


def _teardown(
    seen: Sequence[View], views: Sequence[View], waiting: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict | None:
    leaving = [view for view in seen if view.leaves]
    others = [view for view in waiting if view not in leaving]
    if not leaving or not others:
        return None
    why = "it shuts down while the others still wait: look for the exception in its log, it may be swallowed"
    return Verdict(
        Kind.TEARDOWN,
        tuple(view.culprit(why) for view in leaving),
        confidence(0.9, seen, two=two),
        f"{they(leaving, 'is')} in teardown while {they(others, 'waits')}",
        tuple(describe(view) for view in (leaving[0], others[0])),
    )


def _outside(waiting: Sequence[View], outside: Sequence[View], two: bool) -> Verdict:
    """Some wait in a collective; others are elsewhere: stuck, or on their way."""
    candidates = [view for view in outside if not view.in_collective]
    if two:
        stuck = [view for view in candidates if not (view.motion.known and view.progresses)]
        if not stuck:
            return slow(outside, waiting)
    else:
        stuck = [view for view in candidates if not static_slow(view)]
        if not stuck:
            return slow(candidates, waiting, guess=True)
    if all(view.sleeps_briefly for view in stuck):
        return slow(stuck, waiting, guess=True)
    if verdict := key_not_set(waiting, stuck, two):
        return verdict
    working = [view for view in candidates if view not in stuck]
    if working and all(view.at_a_file_lock for view in stuck):
        return slow(working, [*waiting, *stuck])  # one of them holds it
    special = [view for view in stuck if view.wait is not Wait.LIBRARY or view.reading.own is not None]
    stuck = special or stuck
    kinds = Counter(outside_kind(view) for view in stuck)
    kind = kinds.most_common(1)[0][0]
    culprits = tuple(view.culprit(outside_why(view, outside_kind(view))) for view in stuck)
    against = []
    if not two:
        against.append("one sample only: it cannot be told whether the culprit gets on")
    if len(stuck) > len(waiting):
        against.append(f"{plural(len(stuck), 'rank')} outside, only {len(waiting)} waiting")
    return Verdict(
        kind,
        culprits,
        confidence(0.93 if len(stuck) <= len(waiting) else 0.75, [*waiting, *stuck], two=two),
        f"{they(stuck, 'is')} outside of any collective while {they(waiting, 'waits')} for {it(stuck)}",
        (describe(stuck[0]), describe(waiting[0])),
        tuple(against),
    )
