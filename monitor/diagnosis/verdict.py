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

from ftdash.monitor.diagnosis import endless
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import SLOW_PHASES, WORKER_POLLS, Phase
from ftdash.monitor.diagnosis.model import Culprit, DumpFailure, Sample, Verdict
from ftdash.monitor.diagnosis.odd import all_waiting, key_not_set
from ftdash.monitor.diagnosis.views import View, blocked_in_lock, child_blocked_in_lock, static_slow
from ftdash.monitor.diagnosis.words import confidence, describe, place_of, rank_list, ranks_of
from ftdash.monitor.wording import plural

_WAITS_FOR_OTHERS = frozenset({Wait.STORE, Wait.RENDEZVOUS})


def stack_verdict(views: Sequence[View], sample: Sample) -> Verdict:
    """The verdict of stacks and process states alone."""
    verdict = _of_seen([view for view in views if not view.not_seen], sample, views)
    missing = [view for view in views if view.not_seen]
    return _without(missing, verdict) if missing else verdict


_MOST_NAMED = 64  # of ranks that have not come
_REASONS = 3  # told in full, of those why ranks could not be looked at
# Verdicts that hold only when every rank was looked at.
_NEEDS_ALL = frozenset({Kind.NETWORK, Kind.RENDEZVOUS, Kind.STORE, Kind.NO_EVIDENCE})


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
        return _before_training(seen, pending, absent, two)
    held = {view.rank for view in waiting}
    outside = [view for view in seen if view.rank not in held and view.has_stack]
    if waiting and any(not view.in_collective for view in outside):
        return _outside(waiting, outside, two)
    if waiting and not outside:
        if working := _computing(waiting):
            return _slow(working, [view for view in waiting if view not in working])
        return all_waiting(waiting, absent, two)
    return _nobody_waits(seen, waiting, two)


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
            f"rank {ranks_of(stopped)} is stopped",
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
        f"rank {ranks_of(leaving)} is in teardown while rank {ranks_of(others)} waits",
        tuple(describe(view) for view in (leaving[0], others[0])),
    )


def _before_training(
    seen: Sequence[View], pending: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict:
    """Nobody is in a collective, somebody waits for the store or for others to start."""
    rest = [view for view in seen if view not in pending and view.has_stack]
    stuck = [view for view in rest if not (view.motion.known and view.progresses)]
    if rest and not stuck and two:
        return _slow(rest, pending)
    if stuck:
        if not two and (slow := [view for view in stuck if static_slow(view)]) and len(slow) == len(stuck):
            return _slow(slow, pending)
        culprits = [
            view.culprit(f"it does not come: {ranks_of(pending)} wait{place_of(pending[0])}")
            for view in stuck
        ]
        kind = _outside_kind(stuck[0])
        if kind is Kind.OUTSIDE and all(view.wait is Wait.RENDEZVOUS for view in pending):
            kind = Kind.RENDEZVOUS
        return Verdict(
            kind,
            tuple(culprits),
            confidence(0.85, seen, two=two),
            f"rank {ranks_of(stuck)} keeps the others waiting before training",
            (describe(stuck[0]), describe(pending[0])),
        )
    if (
        two
        and any(view.motion.moved for view in pending)
        and not any(view.motion.known and not view.motion.moved for view in pending)
    ):
        return Verdict(Kind.HEALTHY, (), 0.6, "all ranks are starting, and move")
    if strangers := _started_otherwise(pending) or _told_otherwise(pending):
        return strangers
    store = all(view.wait is Wait.STORE for view in pending)
    kind = Kind.STORE if store else Kind.RENDEZVOUS
    alone = [view.culprit("it waits for a key that nobody sets") for view in pending] if store else []
    return Verdict(
        kind,
        tuple(alone),
        0.6,
        f"ranks {ranks_of(pending)} wait for the {kind}, and nobody is seen to be missing",
        (describe(pending[0]),),
    )


def _started_otherwise(pending: Sequence[View]) -> Verdict | None:
    """Ranks that were given another address or another world size than the others: they meet nobody."""
    told = {
        view.rank: (view.evidence.process.master, view.evidence.process.world_size)
        for view in pending
        if view.evidence.process is not None and view.evidence.process.master
    }
    counts = Counter(told.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return None
    usual = counts[0][0]
    odd = [view for view in pending if view.rank in told and told[view.rank] != usual]
    where = f"{usual[0]} with {usual[1]} ranks"
    return Verdict(
        Kind.RENDEZVOUS,
        tuple(
            view.culprit(
                f"it looks for {told[view.rank][0]} with {told[view.rank][1]} ranks, the others for {where}"
            )
            for view in odd
        ),
        0.9,
        f"rank {ranks_of(odd)} was started with another address or world size than the others",
        (describe(odd[0]),),
    )


def _told_otherwise(pending: Sequence[View]) -> Verdict | None:
    """The script told torch of ranks that nobody is, or told two processes that they are the same rank."""
    told = {view.rank: view.evidence.call for view in pending if "world_size" in view.evidence.call}
    if len(told) < len(pending):
        return None
    size = max(call["world_size"] for call in told.values())
    nobody = sorted(set(range(size)) - {call["rank"] for call in told.values()})
    twice = [
        view
        for view in pending
        if view.rank != told[view.rank]["rank"]
        and sum(call["rank"] == told[view.rank]["rank"] for call in told.values()) > 1
    ]
    launched = [view.evidence.process.world_size or 0 if view.evidence.process else 0 for view in pending]
    if not nobody or not (twice or 0 < max(launched) < size):
        return None  # the others may well be on another machine
    culprits = tuple(
        view.culprit(
            f"the script told torch that it is rank {told[view.rank]['rank']}, as another process is"
        )
        for view in twice
    ) or tuple(
        Culprit(rank, "", 0, "", f"it has not joined: torch was told of {size} ranks, and nobody is this one")
        for rank in nobody[:_MOST_NAMED]
    )
    here = rank_list(call["rank"] for call in told.values())
    return Verdict(
        Kind.RENDEZVOUS,
        culprits,
        0.9,
        f"the script told torch of {size} ranks, and rank {rank_list(nobody)} is nobody here",
        (f"rank {here} waits: {describe(pending[0])}",),
    )


def _outside_kind(view: View) -> Kind:
    """What a rank outside of collectives is held up by."""
    children = view.evidence.children
    if view.wait is Wait.LOADER or view.reading.names & WORKER_POLLS:
        return Kind.LOCK if any(child_blocked_in_lock(child) for child in children) else Kind.DATA_LOADER
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


def _outside_why(view: View, kind: Kind) -> str:
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


def _outside(waiting: Sequence[View], outside: Sequence[View], two: bool) -> Verdict:
    """Some wait in a collective; others are elsewhere: stuck, or on their way."""
    candidates = [view for view in outside if not view.in_collective]
    if two:
        stuck = [view for view in candidates if not (view.motion.known and view.progresses)]
        if not stuck:
            return _slow(outside, waiting)
    else:
        stuck = [view for view in candidates if not static_slow(view)]
        if not stuck:
            return _slow(candidates, waiting, guess=True)
    if verdict := key_not_set(waiting, stuck, two):
        return verdict
    special = [view for view in stuck if view.wait is not Wait.LIBRARY or view.reading.own is not None]
    stuck = special or stuck
    kinds = Counter(_outside_kind(view) for view in stuck)
    kind = kinds.most_common(1)[0][0]
    culprits = tuple(view.culprit(_outside_why(view, _outside_kind(view))) for view in stuck)
    against = []
    if not two:
        against.append("one sample only: it cannot be told whether the culprit gets on")
    if len(stuck) > len(waiting):
        against.append(f"{plural(len(stuck), 'rank')} outside, only {len(waiting)} waiting")
    return Verdict(
        kind,
        culprits,
        confidence(0.93 if len(stuck) <= len(waiting) else 0.75, [*waiting, *stuck], two=two),
        f"rank {ranks_of(stuck)} is outside of any collective while rank {ranks_of(waiting)} waits for it",
        (describe(stuck[0]), describe(waiting[0])),
        tuple(against),
    )


def _slow(working: Sequence[View], waiting: Sequence[View], *, guess: bool = False) -> Verdict:
    lead = next((view for view in working if view.reading.phase in SLOW_PHASES), working[0])
    phase = lead.reading.phase or static_slow(lead)
    doing = {
        Phase.PREPROCESS: "is preprocessing data",
        Phase.SAVE: "is writing a checkpoint",
        Phase.COMPILE: "is compiling",
        Phase.EVAL: "is evaluating",
        Phase.LOAD: "is loading",
        Phase.INIT: "is starting",
        Phase.GENERATE: "is generating",
        Phase.DATA: "is waiting for data that its workers are making",
    }.get(phase, "is computing")
    moves = lead.motion.words()
    evidence = [describe(lead)]
    if moves:
        evidence.insert(0, f"rank {lead.rank}: {moves} within {lead.motion.interval_s:.1f} s")
    reason = f"slow, not stuck: rank {ranks_of(working)} {doing}"
    if waiting:
        reason += f", rank {ranks_of(waiting)} waits for it"
    next_steps = (
        "watch the time left to the collective timeout (`ddp_timeout`, init_process_group's timeout)",
    )
    return Verdict(
        Kind.SLOW,
        (),
        0.6 if guess else 0.85,
        reason,
        tuple(evidence),
        ("one sample only: take a second one to see whether it gets on",) if guess else (),
        next_steps,
    )


def _not_where_others_poll(readable: Sequence[View]) -> Verdict | None:
    """Most ranks ask again and again at one line, a barrier of the user's own; the others have not come."""
    polls = [(view, own.name, own.file) for view in readable if view.polls and (own := view.reading.own)]
    if not polls:
        return None
    place = Counter(item[1:] for item in polls).most_common(1)[0][0]
    polling = [view for view, *where in polls if tuple(where) == place]
    rest = [view for view in readable if view not in polling]
    if not rest or len(rest) >= len(polling):
        return None
    stuck = [view for view in rest if view.stands]
    if not stuck:
        return _slow(rest, polling)
    why = f"rank {ranks_of(polling)} asks again and again{place_of(polling[0])}, and it does not come there"
    return Verdict(
        _outside_kind(stuck[0]),
        tuple(view.culprit(why) for view in stuck),
        0.7,
        f"rank {ranks_of(stuck)} does not come to where rank {ranks_of(polling)} waits",
        (describe(stuck[0]), describe(polling[0])),
    )


def _all_stand(readable: Sequence[View]) -> Verdict:
    """No rank waits for another one and none moves: all at one place wait for something outside of the job.

    Whether that is a hang only the run's own pace tells: a job that is fed from outside waits in every step.
    """
    evidence = tuple(describe(view) for view in readable[:2])
    places = {(own.name, own.file) if (own := view.reading.own) else None for view in readable}
    paced = [view for view in readable if view.evidence.beat and view.evidence.beat.usual_s]
    late = bool(paced) and all(endless.beyond_its_pace(view.evidence) for view in paced)
    together = len(places) == 1 and None not in places
    if together and paced and not late:
        reason = f"rank {ranks_of(readable)} waits for something outside of the job, as its steps do at times"
        return Verdict(Kind.SLOW, (), 0.7, reason, evidence)
    if together and (late or all(view.polls for view in readable)):
        asks = "asks again and again" if all(view.polls for view in readable) else "waits"
        reason = f"nobody differs: every rank {asks} for something that no rank of the job gives"
        if late:
            return Verdict(
                Kind.NETWORK, (), 0.8, reason, (*evidence, endless.late_words(readable[0].evidence))
            )
        against = ("how long the job's steps take is not known: it may be fed from outside and wait for it",)
        return Verdict(Kind.NETWORK, (), 0.5, reason, evidence, against)
    return Verdict(
        Kind.HEALTHY, (), 0.4, "no rank waits for another; nothing moved between the samples", evidence
    )


def _nobody_waits(seen: Sequence[View], waiting: Sequence[View], two: bool) -> Verdict:
    """No rank is held in a collective throughout (or those that are see others moving in theirs)."""
    readable = [view for view in seen if view.has_stack]
    if two and not waiting and (verdict := _not_where_others_poll(readable)):
        return verdict
    if two and not waiting:
        frozen = [view for view in readable if not view.in_collective and view.stands]
        kinds = {_outside_kind(view) for view in frozen}
        if (
            frozen
            and len(frozen) == len(readable)
            and Kind.OUTSIDE not in kinds
            and Kind.TEARDOWN not in kinds
        ):
            kind = _outside_kind(frozen[0])
            return Verdict(
                kind,
                tuple(view.culprit(_outside_why(view, kind)) for view in frozen),
                0.7,
                f"no rank waits for another: rank {ranks_of(frozen)} is held up by itself",
                (describe(frozen[0]),),
            )
    elif not two:
        slow = [view for view in readable if static_slow(view) in SLOW_PHASES]
        if slow and len(slow) == len(readable):
            return _slow(slow, (), guess=True)
    slow_ones = [
        view for view in readable if view.reading.context in SLOW_PHASES and not view.waits_for_peers
    ]
    if two and slow_ones and waiting:
        return _slow(slow_ones, waiting)
    moving = [view for view in readable if view.motion.known and not view.stands]
    if two and readable and not moving and not waiting:
        return _all_stand(readable)
    reason = "the ranks move" if two else "no rank waits in a collective for one that is elsewhere"
    evidence = tuple(f"rank {view.rank}: {view.motion.words()}" for view in moving[:4] if view.motion.words())
    return Verdict(Kind.HEALTHY, (), 0.85 if two else 0.5, reason, evidence)
