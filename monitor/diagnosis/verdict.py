"""From the stacks and states of all ranks to a verdict, in the order of suspicion.

Undumpable or dead; in teardown; outside any collective while others wait; in a save or evaluation of its
own; the odd phase; another collective; the same collective from another place; nobody. A rank that gets
on with work is no culprit: the others are slow, not stuck. An idle rank is not innocent and an active one
not guilty (a spinning wait is active).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from ftdash.monitor.diagnosis import frames, source
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import PHASE_ORDER, SLOW_PHASES, Phase
from ftdash.monitor.diagnosis.model import Culprit, DumpFailure, Sample, Verdict
from ftdash.monitor.diagnosis.views import View, blocked_in_lock, child_blocked_in_lock, static_slow

_WAITS_FOR_OTHERS = frozenset({Wait.STORE, Wait.RENDEZVOUS})


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks for people: "0-3,7"."""
    ordered, parts = sorted(set(ranks)), []
    start = previous = None
    for rank in [*ordered, None]:
        if previous is not None and rank != previous + 1:
            parts.append(f"{start}-{previous}" if start != previous else f"{start}")
            start = None
        start = rank if start is None else start
        previous = rank
    return ",".join(parts)


def _ranks(views: Iterable[View]) -> str:
    return rank_list(view.rank for view in views)


def _at(view: View) -> str:
    frame = view.shown_frame
    return f" at {frame}" if frame else ""


def _confidence(base: float, views: Sequence[View], *, two: bool) -> float:
    """Less with one sample, a little more when many ranks agree."""
    return min(0.97, base - (0.0 if two else 0.15) + (0.03 if len(views) > 4 else 0.0))


def stack_verdict(views: Sequence[View], sample: Sample) -> Verdict:
    """The verdict of stacks and process states alone."""
    seen = [view for view in views if not view.dead]
    two = any(view.motion.known for view in views)
    absent = sample.expected - {view.rank for view in views}
    waiting = [view for view in seen if view.waits_for_peers]
    for stage in (_gone, _unresponsive, _external_peer, _teardown):
        if verdict := stage(seen, views, waiting, absent, two):
            return verdict
    if not any(view.has_stack for view in seen):
        return no_evidence(views)
    pending = [view for view in seen if view.wait in _WAITS_FOR_OTHERS]
    if not waiting and pending:
        return _before_training(seen, pending, absent, two)
    outside = [view for view in seen if view not in waiting and view.has_stack]
    if waiting and any(not view.in_collective for view in outside):
        return _outside(waiting, outside, two)
    if waiting and not outside:
        return _all_waiting(waiting, absent, two)
    return _nobody_waits(seen, waiting, two)


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
    if not (dead or absent) or not held:
        return None
    culprits = [view.culprit("its process is gone: the others wait for it") for view in dead]
    lost = sorted(absent - {view.rank for view in dead})
    example = held[0]
    where = f"{example.shown_frame}" if example.shown_frame else "a collective"
    starting = all(view.wait in _WAITS_FOR_OTHERS or view.reading.context is Phase.INIT for view in held)
    for rank in lost:
        why = (
            f"it has not joined: {_ranks(held)} wait in {where}"
            if starting
            else f"no process of it is left: {_ranks(held)} wait in {where}"
        )
        culprits.append(Culprit(rank, "", 0, "", why))
    if starting:
        owner_gone = any(culprit.rank == 0 for culprit in culprits)
        kind = Kind.STORE if owner_gone and (dead or lost) else Kind.RENDEZVOUS
        reason = (
            "rank 0, which owns the store, is gone: the rendezvous is broken"
            if kind is Kind.STORE
            else f"rank {rank_list(c.rank for c in culprits)} has not come to the rendezvous"
        )
    else:
        kind = Kind.DEAD_RANK
        reason = f"rank {rank_list(c.rank for c in culprits)} is gone, the others wait for it"
    evidence = (
        f"ranks {_ranks(held)} wait: {_describe(held[0])}",
        f"seen {len(seen)} of {len(seen) + len(culprits)}",
    )
    return Verdict(kind, tuple(culprits), _confidence(0.95, held, two=True), reason, evidence)


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
            f"rank {_ranks(stopped)} is stopped",
            (f"state T in /proc of rank {_ranks(stopped)}", *moved),
        )
    asleep = [
        view
        for view in seen
        if (view.evidence.proc.state == "D"
        and not (view.motion.known and view.progresses))
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
            f"rank {_ranks(asleep)} sleeps in the kernel and cannot be woken",
            (f"state D in /proc of rank {_ranks(asleep)}", f"{len(waiting)} ranks wait in a collective"),
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
            f"rank {_ranks(mute)} gives no stack: a missing dump is evidence",
            (f"ranks {_ranks(waiting)} wait: {_describe(waiting[0])}",),
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
        _confidence(0.85, peers, two=two),
        f"rank {_ranks(peers)} waits for a process outside of the job",
        (f"{_describe(peers[0])}",),
    )


def _teardown(
    seen: Sequence[View], views: Sequence[View], waiting: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict | None:
    leaving = [
        view
        for view in seen
        if view.wait is Wait.TEARDOWN or (view.reading.context is Phase.TEARDOWN and not view.waits_for_peers)
    ]
    others = [view for view in waiting if view not in leaving]
    if not leaving or not others:
        return None
    why = "it shuts down while the others still wait: look for the exception in its log, it may be swallowed"
    return Verdict(
        Kind.TEARDOWN,
        tuple(view.culprit(why) for view in leaving),
        _confidence(0.9, seen, two=two),
        f"rank {_ranks(leaving)} is in teardown while rank {_ranks(others)} waits",
        tuple(_describe(view) for view in (leaving[0], others[0])),
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
            view.culprit(f"it does not come: {_ranks(pending)} wait{_at(pending[0])}") for view in stuck
        ]
        kind = _outside_kind(stuck[0])
        if kind is Kind.OUTSIDE and all(view.wait is Wait.RENDEZVOUS for view in pending):
            kind = Kind.RENDEZVOUS
        return Verdict(
            kind,
            tuple(culprits),
            _confidence(0.85, seen, two=two),
            f"rank {_ranks(stuck)} keeps the others waiting before training",
            (_describe(stuck[0]), _describe(pending[0])),
        )
    if (
        two
        and any(view.motion.moved for view in pending)
        and not any(view.motion.known and not view.motion.moved for view in pending)
    ):
        return Verdict(Kind.HEALTHY, (), 0.6, "all ranks are starting, and move")
    store = all(view.wait is Wait.STORE for view in pending)
    kind = Kind.STORE if store else Kind.RENDEZVOUS
    culprits: tuple[Culprit, ...] = ()
    if store:
        culprits = tuple(view.culprit("it waits for a key that nobody sets") for view in pending)
    return Verdict(
        kind,
        culprits,
        0.6,
        f"ranks {_ranks(pending)} wait for the {'store' if store else 'rendezvous'}, and nobody is seen to be missing",
        (_describe(pending[0]),),
    )


def _describe(view: View) -> str:
    reading = view.reading
    frame = view.shown_frame
    inside = reading.telling if reading.telling is not frame else None
    parts = [f"rank {view.rank}"]
    if reading.phase:
        parts.append(f"in {reading.phase}")
    if view.op:
        parts.append(f"waits in {view.op}")
    elif view.wait is not Wait.OWN:
        parts.append(f"in {view.wait}")
    if frame:
        parts.append(f"at {frame}")
    if inside:
        parts.append(f"(inside {inside.name})")
    if view.text:
        parts.append(f"`{view.text[:80]}`")
    return " ".join(parts)


def _outside_kind(view: View) -> Kind:
    """What a rank outside of collectives is held up by."""
    children = view.evidence.children
    if view.wait is Wait.LOADER:
        return Kind.LOCK if any(child_blocked_in_lock(child) for child in children) else Kind.DATA_LOADER
    if view.wait is Wait.FINALIZER:
        return Kind.LOCK
    if view.wait is Wait.STORE:
        return Kind.STORE
    if view.wait is Wait.RENDEZVOUS:
        return Kind.RENDEZVOUS
    if view.wait is Wait.TEARDOWN:
        return Kind.TEARDOWN
    if view.wait is Wait.SAVE_IO:
        return Kind.STORAGE
    if blocked_in_lock(view.reading, view.evidence.proc.syscall):
        return Kind.LOCK
    return Kind.OUTSIDE


def _outside_why(view: View, kind: Kind) -> str:
    held = view.reading.blocked_by
    inside = f" in {held.name}" if held else ""
    dead = [c for c in view.evidence.children if c.failure is DumpFailure.ZOMBIE]
    if kind is Kind.DATA_LOADER:
        tail = f"; {len(dead)} of its workers are dead" if dead else ""
        return f"it waits for its data loader{inside}, which does not deliver{tail}"
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
    special = [view for view in stuck if view.wait is not Wait.LIBRARY or view.reading.own is not None]
    stuck = special or stuck
    kinds = Counter(_outside_kind(view) for view in stuck)
    kind = kinds.most_common(1)[0][0]
    culprits = tuple(view.culprit(_outside_why(view, _outside_kind(view))) for view in stuck)
    against = []
    if not two:
        against.append("one sample only: it cannot be told whether the culprit gets on")
    if len(stuck) > len(waiting):
        against.append(f"{len(stuck)} ranks are outside and only {len(waiting)} wait")
    return Verdict(
        kind,
        culprits,
        _confidence(0.93 if len(stuck) <= len(waiting) else 0.75, [*waiting, *stuck], two=two),
        f"rank {_ranks(stuck)} is outside of any collective while rank {_ranks(waiting)} waits for it",
        (_describe(stuck[0]), _describe(waiting[0])),
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
    evidence = [_describe(lead)]
    if moves:
        evidence.insert(0, f"rank {lead.rank}: {moves} within {lead.motion.interval_s:.1f} s")
    reason = f"slow, not stuck: rank {_ranks(working)} {doing}"
    if waiting:
        reason += f", rank {_ranks(waiting)} waits for it"
    next_steps = (
        "watch the remaining time to the collective timeout: a longer one is `ddp_timeout`, or "
        "`init_process_group(timeout=…)`",
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


def _nobody_waits(seen: Sequence[View], waiting: Sequence[View], two: bool) -> Verdict:
    """No rank is held in a collective throughout (or those that are see others moving in theirs)."""
    readable = [view for view in seen if view.has_stack]
    if two and not waiting:
        frozen = [
            view
            for view in readable
            if not view.in_collective and not view.progresses and not view.motion.moved
        ]
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
                f"no rank waits for another: rank {_ranks(frozen)} is held up by itself",
                (_describe(frozen[0]),),
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
    moving = [view for view in readable if view.motion.known and (view.motion.moved or view.progresses)]
    if two and readable and not moving and not waiting:
        reason = "no rank waits for another; nothing moved between the samples"
        return Verdict(Kind.HEALTHY, (), 0.4, reason, tuple(_describe(view) for view in readable[:2]))
    reason = "the ranks move" if two else "no rank waits in a collective for one that is elsewhere"
    evidence = tuple(f"rank {view.rank}: {view.motion.words()}" for view in moving[:4] if view.motion.words())
    return Verdict(Kind.HEALTHY, (), 0.85 if two else 0.5, reason, evidence)


def _odd_ones(views: Sequence[View], key: Callable[[View], Hashable]) -> tuple[list[View], bool]:
    """Views whose key differs from the most frequent one; with a tie: all of them, and True."""
    counts = Counter(key(view) for view in views).most_common()
    if len(counts) < 2:
        return [], False
    if counts[0][1] == counts[1][1]:
        return list(views), True
    return [view for view in views if key(view) != counts[0][0]], False


def _break_tie(views: Sequence[View], key: Callable[[View], Hashable]) -> list[View]:
    """With no majority: the side that only some ranks are sent to, else the one that is behind."""
    sides: dict[Hashable, list[View]] = {}
    for view in views:
        sides.setdefault(key(view), []).append(view)
    groups = list(sides.values())
    for hint in (source.in_except_block, source.rank_condition):
        marked = [
            group
            for group in groups
            if all(frame is not None and hint(frame) for frame in (view.reading.own for view in group))
        ]
        if len(marked) == 1:
            return marked[0]
    if len(groups) == 2:
        phases = [_phase_number(group[0]) for group in groups]
        if phases[0] != phases[1]:
            return groups[0] if phases[0] < phases[1] else groups[1]
        if behind := _behind(groups[0], groups[1]):
            ahead = groups[1] if behind is groups[0] else groups[0]
            own = behind[0].reading.own
            return ahead if own is not None and source.loop_may_break(own) else behind
    return list(views)


def _behind(first: list[View], second: list[View]) -> list[View] | None:
    """The side that stands at an earlier line of the same function."""
    one, two = first[0].reading.own, second[0].reading.own
    if one is None or two is None or one.file != two.file or one.name != two.name or one.line == two.line:
        return None
    return first if one.line < two.line else second


def _phase_number(view: View) -> int:
    return PHASE_ORDER[view.reading.phase]


def _coarse_phase(view: View) -> str:
    """Phases as far as they must agree between ranks: steps of training count as one unless all are known."""
    reading = view.reading
    if reading.context in (Phase.SAVE, Phase.EVAL, Phase.GENERATE, Phase.TEARDOWN):
        return reading.context
    if reading.step in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA):
        return reading.step
    return ""


def _all_waiting(views: Sequence[View], absent: frozenset[int], two: bool) -> Verdict:
    """Everybody is in a collective: who differs?"""
    for rule in (_generate_left, _one_sided_context, _model_path, _unused_experts):
        if verdict := rule(views, two):
            return verdict
    phase_odd, tied = _odd_ones(views, _coarse_phase)
    if phase_odd and any(_coarse_phase(view) for view in views):
        if tied:
            phase_odd = _break_tie(views, _coarse_phase)
        return _mismatch(
            Kind.PHASE_MISMATCH, phase_odd, views, "stands in another phase than the others", 0.8, two
        )
    for key, kind, text in (
        (lambda view: view.op, Kind.COLLECTIVE_MISMATCH, "calls another collective than the others"),
        (_own_place, Kind.ORDER_MISMATCH, "makes the same call from another place in the program"),
        (_library_place, Kind.ORDER_MISMATCH, "is at another place of the model or library"),
    ):
        odd, tied = _odd_ones(views, key)
        if odd:
            if tied:
                odd = _break_tie(views, key)
            return _mismatch(kind, odd, views, text, 0.85 if not tied else 0.7, two)
    if two and len(views) == 1:
        return Verdict(
            Kind.NETWORK,
            (),
            0.3,
            "one rank only was looked at, and it waits: look at all of them",
            (_describe(views[0]),),
        )
    evidence = [f"all {len(views)} ranks: {_describe(views[0])}"]
    if any(view.motion.counted and view.motion.cpu > 0.8 for view in views):
        evidence.append("all spin in their wait")
    return Verdict(
        Kind.NETWORK,
        (),
        _confidence(0.75, views, two=two),
        "nobody differs: every rank is in the same call at the same place. Suspect the network or the hardware, "
        "or ask the flight recorder for a difference in size or sequence",
        tuple(evidence),
        _power_against(views),
    )


def _power_against(views: Sequence[View]) -> tuple[str, ...]:
    idle = [view for view in views if view.evidence.gpu_util == 0]
    if idle and len(idle) < len(views):
        return (f"GPU of rank {_ranks(idle)} is at 0 %, the others' are not",)
    return ()


def _own_place(view: View) -> Hashable:
    own = view.reading.own
    return (own.short, own.file, own.line) if own else None


def _library_place(view: View) -> Hashable:
    main = frames.main_thread(view.evidence.threads)
    if main is None:
        return None
    return tuple((frame.short, frame.line) for frame in main.frames[:40])


def _mismatch(
    kind: Kind, odd: Sequence[View], views: Sequence[View], text: str, base: float, two: bool
) -> Verdict:
    rest = [view for view in views if view not in odd]
    if not rest:
        pairs = {}
        for view in views:
            pairs.setdefault((view.op, _own_place(view)), view)
        culprits = tuple(view.culprit(f"{text}: {view.op}") for view in views)
        return Verdict(
            kind,
            culprits,
            0.5,
            "the ranks are at odds, and none is in the majority",
            tuple(_describe(view) for view in list(pairs.values())[:4]),
        )
    special = {source.rank_condition(view.reading.own) for view in odd if view.reading.own} - {""}
    evidence = [_describe(odd[0]), _describe(rest[0])]
    if special:
        evidence.append(f"its line runs only `if {sorted(special)[0]}`")
    if any(view.reading.own and source.in_except_block(view.reading.own) for view in odd):
        evidence.append("its line stands in an except block: an error was caught on this rank only")
    op = odd[0].op or str(odd[0].wait)
    return Verdict(
        kind,
        tuple(
            view.culprit(f"{text}: {view.op or view.wait}, the others {rest[0].op or rest[0].wait}")
            for view in odd
        ),
        _confidence(base, views, two=two),
        f"rank {_ranks(odd)} {text} ({op} against {rest[0].op or rest[0].wait})",
        tuple(evidence),
    )


def _one_sided_context(views: Sequence[View], two: bool) -> Verdict | None:
    """Only some ranks are in a save or an evaluation that gathers: the others never join."""
    for phase, kind in ((Phase.SAVE, Kind.SAVE_ON_ONE), (Phase.EVAL, Kind.EVAL_ON_ONE)):
        inside = [view for view in views if view.reading.context is phase]
        rest = [view for view in views if view.reading.context is not phase]
        if not inside or not rest:
            continue
        if len(inside) < len(rest) or (len(inside) == len(rest) and inside[0].op != "barrier"):
            what = "save" if phase is Phase.SAVE else "evaluation"
            why = f"it is in a {what} that needs every rank, and the others are not in it"
            verdict = _mismatch(kind, inside, views, f"is alone in a {what}", 0.9, two)
            culprits = tuple(view.culprit(why) for view in inside)
            return Verdict(
                kind, culprits, verdict.confidence, verdict.reason, verdict.evidence, verdict.against
            )
    return None


def _generate_left(views: Sequence[View], two: bool) -> Verdict | None:
    """ZeRO-3 fetches parameters in generate: ranks that stopped earlier have left the loop."""
    inside = [
        view
        for view in views
        if view.reading.context is Phase.GENERATE and view.reading.names & {"fetch_sub_module", "pre_forward"}
    ]
    rest = [view for view in views if view.reading.context is not Phase.GENERATE]
    if not inside or not rest:
        return None
    return _mismatch(
        Kind.PHASE_MISMATCH,
        rest,
        views,
        "has left generate, where the others still gather parameters",
        0.85,
        two,
    )


_VISUAL = frozenset(
    {"visual", "vision_tower", "get_image_features", "encode_image", "vision_model", "image_encoder"}
)


def _visual(view: View) -> bool:
    if view.reading.names & _VISUAL:
        return True
    main = frames.main_thread(view.evidence.threads)
    return bool(main) and any("visi" in frame.file.lower() or "Vision" in frame.name for frame in main.frames)


def _model_path(views: Sequence[View], two: bool) -> Verdict | None:
    """Ranks that skip a part of the model (a vision tower) which the others gather."""
    seeing = [view for view in views if _visual(view)]
    blind = [view for view in views if not _visual(view)]
    if not seeing or not blind or not all(view.reading.step is Phase.FORWARD for view in blind):
        return None
    return _mismatch(
        Kind.COLLECTIVE_MISMATCH,
        blind,
        views,
        "skips the vision part of the model that the others run",
        0.85,
        two,
    )


_ZERO_REDUCE = frozenset(
    {
        "reduce_and_partition_ipg_grads",
        "__reduce_and_partition_ipg_grads",
        "__avg_scatter_grads",
        "reduce_scatter_fn",
    }
)


def _unused_experts(views: Sequence[View], two: bool) -> Verdict | None:
    """ZeRO-3 with experts: the reduce-scatter of an expert never comes on ranks where it had no token."""
    reducing = [view for view in views if view.reading.names & _ZERO_REDUCE or view.op == "reduce_scatter"]
    rest = [view for view in views if view not in reducing]
    deepspeed = any(
        "deepspeed" in frame.file or frame.short in _ZERO_REDUCE
        for view in views[:64]
        for thread in view.evidence.threads
        for frame in thread.frames
    )
    if not reducing or not rest or not deepspeed:
        return None
    if not all(view.op in ("all_gather", "backward", "wait") for view in rest):
        return None
    return _mismatch(
        Kind.COLLECTIVE_MISMATCH, rest, views, "is past the reduction that the others wait in", 0.8, two
    )
