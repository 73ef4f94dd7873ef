"""When every rank waits in a collective: who differs from the others, and in what."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ftdash.monitor.diagnosis import frames, guards, source
from ftdash.monitor.diagnosis.arguments import root_of, stuck_in_the_ring
from ftdash.monitor.diagnosis.frames import Origin, Wait
from ftdash.monitor.diagnosis.groups import made_by_some
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import PHASE_ORDER, POINT_TO_POINT, Phase
from ftdash.monitor.diagnosis.model import Frame, Verdict
from ftdash.monitor.diagnosis.threads import two_collectives_at_once
from ftdash.monitor.diagnosis.ties import (
    break_tie,
    odd_ones,
    own_stack,
    singled_out,
    where_they_part,
)
from ftdash.monitor.diagnosis.views import View
from ftdash.monitor.diagnosis.words import confidence, describe, ranks_of

_OF_A_STEP = frozenset({Phase.FORWARD, Phase.BACKWARD})
_SURE_AFTER_S = 2.0  # what a healthy step shows as well is only odd when it was seen for so long


def key_not_set(waiting: Sequence[View], outside: Sequence[View], two: bool) -> Verdict | None:
    """Most ranks wait for a key of the store: the few in a collective went there instead of setting it."""
    if len(outside) <= len(waiting) or any(view.wait is not Wait.STORE for view in outside):
        return None
    where = waiting[0].op or waiting[0].wait
    why = f"it is in {where}, and rank {ranks_of(outside)} waits for a key of the store"
    return Verdict(
        Kind.STORE,
        tuple(view.culprit(why) for view in waiting),
        confidence(0.75, outside, two=two),
        f"rank {ranks_of(waiting)} is in {where}, the others wait for a key that somebody ought to set",
        (describe(waiting[0]), describe(outside[0])),
    )


def _coarse_phase(view: View) -> str:
    """Phases as far as they must agree between ranks: steps of training count as one unless all are known."""
    reading = view.reading
    if view.context in (Phase.SAVE, Phase.EVAL, Phase.GENERATE, Phase.TEARDOWN):
        return view.context
    if reading.step in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA):
        return reading.step
    return ""


def _coarse_number(view: View) -> int:
    return PHASE_ORDER[Phase(_coarse_phase(view))]


def all_waiting(views: Sequence[View], absent: frozenset[int], two: bool) -> Verdict:
    """Everybody is in a collective: who differs?"""
    for rule in (
        _point_to_point,
        _other_root,
        made_by_some,
        _generate_left,
        _one_sided_context,
        _model_path,
        _unused_experts,
    ):
        if verdict := rule(views, two):
            return verdict
    phase_odd, tied = odd_ones(views, _coarse_phase)
    if phase_odd and any(_coarse_phase(view) for view in views):
        if tied and (verdict := two_collectives_at_once(views, two, saving=True)):
            return verdict
        if tied:
            phase_odd = break_tie(views, _coarse_phase)
        elif len({_coarse_phase(view) for view in phase_odd}) > 1:
            first = min(_coarse_number(view) for view in phase_odd)
            phase_odd = [view for view in phase_odd if _coarse_number(view) == first]
        return _mismatch(
            Kind.PHASE_MISMATCH, phase_odd, views, "stands in another phase than the others", 0.8, two
        )
    for key, kind, text in (
        (lambda view: view.op, Kind.COLLECTIVE_MISMATCH, "calls another collective than the others"),
        (_own_place, Kind.ORDER_MISMATCH, "makes the same call from another place in the program"),
        (_library_place, Kind.ORDER_MISMATCH, "is at another place of the model or library"),
    ):
        odd, tied = odd_ones(views, key)
        if tied and (verdict := two_collectives_at_once(views, two, saving=True)):
            return verdict
        if odd:
            odd = break_tie(views, key) if tied else singled_out(odd, views, key)
            return _mismatch(kind, odd, views, text, 0.85 if not tied else 0.7, two)
    if verdict := two_collectives_at_once(views, two):
        return verdict
    if len({_inner_lines(view) for view in views}) > 1:
        return Verdict(
            Kind.NETWORK,
            (),
            confidence(0.5, views, two=two),
            "every rank is in the same call at the same place, but not at the same step inside of it: its "
            "arguments (source, group, sizes) may differ between the ranks",
            tuple(describe(view) for view in views[:4]),
            _power_against(views),
        )
    if len(views) == 1:
        return Verdict(
            Kind.NETWORK,
            (),
            0.3,
            "one rank only was looked at, and it waits: look at all of them",
            (describe(views[0]),),
            fix=_LONE_SAVE if views[0].context is Phase.SAVE else "",
        )
    evidence = [f"all {len(views)} ranks: {describe(views[0])}"]
    if any(view.motion.counted and view.motion.cpu > 0.8 for view in views):
        evidence.append("all spin in their wait")
    sure, against = confidence(0.75, views, two=two), _power_against(views)
    if two and all(view.motion.counted and view.motion.interval_s < _SURE_AFTER_S for view in views):
        sure = min(sure, 0.4)
        against = ("a large transfer of a healthy step looks the same for so short: look again", *against)
    return Verdict(
        Kind.NETWORK,
        (),
        sure,
        "nobody differs: every rank is in the same call at the same place. Suspect the network or the "
        "hardware, or ask the flight recorder for a difference in size or sequence",
        tuple(evidence),
        against,
    )


_LONE_SAVE = (
    "a save that gathers needs every rank: where the others have passed it or ended normally, call it on all "
    "of them, outside `if is_main_process` (huggingface/transformers#10596)"
)


def _point_to_point(views: Sequence[View], two: bool) -> Verdict | None:
    """Sends and receives wait for one rank each: a ring of them, or the rank at the end of the chain."""
    calls = {
        view.rank: root
        for view in views
        if view.op in POINT_TO_POINT and (root := root_of(view.evidence.call)) is not None
    }
    if not calls:
        return None
    by_rank = {view.rank: view for view in views}
    chain = ", ".join(f"rank {rank} waits for rank {peer}" for rank, peer in sorted(calls.items()))
    if ring := stuck_in_the_ring(calls):
        named = [by_rank[rank] for rank in sorted(ring) if rank in by_rank]
        odd, tied = odd_ones(named, lambda view: view.op)
        if odd and not tied:
            rest = next(view for view in named if view not in odd)
            why = f"it is in {odd[0].op}, and all others of the ring in {rest.op}: it has to serve them first"
            return Verdict(
                Kind.ORDER_MISMATCH,
                tuple(view.culprit(why) for view in odd),
                confidence(0.85, views, two=two),
                f"the ranks wait for one another in a ring, and rank {ranks_of(odd)} alone is in {odd[0].op}",
                (chain, *(describe(view) for view in (odd[0], rest))),
            )
        if len(named) == len(views):
            reason = "nobody differs: the ranks wait for one another in a ring, and nobody serves the others"
            return Verdict(Kind.NETWORK, (), confidence(0.8, views, two=two), reason, (chain,))
        why = "it waits for a rank that waits for it: one of them has to send first"
        kind, reason = Kind.ORDER_MISMATCH, f"rank {ranks_of(named)} wait for one another"
    else:
        ends = {peer for peer in calls.values() if peer not in calls and peer in by_rank}
        if len(ends) != 1:
            return None
        named = [by_rank[rank] for rank in ends]
        peer_of = [by_rank[rank] for rank, peer in calls.items() if peer in ends]
        why = (
            f"rank {ranks_of(peer_of)} waits for a message of it, and it is in {named[0].op or named[0].wait}"
        )
        kind = Kind.COLLECTIVE_MISMATCH
        reason = f"rank {ranks_of(named)} calls another collective than the others wait for"
    return Verdict(
        kind,
        tuple(view.culprit(why) for view in named),
        confidence(0.88, views, two=two),
        reason,
        (chain, *(describe(view) for view in named[:2])),
    )


def _other_root(views: Sequence[View], two: bool) -> Verdict | None:
    """The same call, and a few ranks name another source or destination."""
    roots = {
        view.rank: root
        for view in views
        if view.op not in POINT_TO_POINT and (root := root_of(view.evidence.call)) is not None
    }
    if len({view.op for view in views}) > 1 or len(roots) < len(views):
        return None
    odd, tied = odd_ones(views, lambda view: roots[view.rank])
    if not odd or tied or len({_own_place(view) for view in views}) > 1:
        return None
    usual = next(root for rank, root in roots.items() if rank not in {view.rank for view in odd})
    return Verdict(
        Kind.COLLECTIVE_MISMATCH,
        tuple(
            view.culprit(f"it names rank {roots[view.rank]} as the source or target, the others rank {usual}")
            for view in odd
        ),
        confidence(0.9, views, two=two),
        f"rank {ranks_of(odd)} makes the {odd[0].op} with another root than the others",
        (", ".join(f"rank {rank}: root {root}" for rank, root in sorted(roots.items())[:16]),),
    )


def _power_against(views: Sequence[View]) -> tuple[str, ...]:
    idle = [view for view in views if view.evidence.gpu_util == 0]
    if idle and len(idle) < len(views):
        return (f"GPU of rank {ranks_of(idle)} is at 0 %, the others' are not",)
    return ()


def _own_place(view: View) -> Hashable:
    own = view.reading.own
    return (own.short, own.file, own.line) if own else None


def _library_place(view: View) -> Hashable:
    main = frames.main_thread(view.evidence.threads)
    if main is None:
        return None
    kept, inside = main.frames[:40], 0
    while inside < len(kept) and _part_of_a_call(kept[inside]):
        inside += 1
    call = next((f.short for f in reversed(kept[:inside]) if frames.collective_of(f)), "")
    return call, tuple((frame.short, frame.line) for frame in kept[inside:])


def _part_of_a_call(frame: Frame) -> bool:
    """Inside torch's own code of one collective call: how far each rank is there blames nobody."""
    native = frames.origin(frame) is Origin.NATIVE
    return native or frame.file.endswith(("distributed_c10d.py", "c10d_logger.py"))


def _inner_lines(view: View) -> Hashable:
    main = frames.main_thread(view.evidence.threads)
    if main is None:
        return None
    return tuple((f.short, f.line) for f in main.frames if f.file.endswith("distributed_c10d.py"))


def _mismatch(
    kind: Kind, odd: Sequence[View], views: Sequence[View], text: str, base: float, two: bool
) -> Verdict:
    rest = [view for view in views if view not in odd]
    if not rest:
        pairs: dict[tuple[str, Hashable], View] = {}
        for view in views:
            pairs.setdefault((view.op, _own_place(view)), view)
        culprits = tuple(view.culprit(f"{text}: {view.op}") for view in views)
        return Verdict(
            kind,
            culprits,
            0.5,
            "the ranks are at odds, and none is in the majority",
            tuple(describe(view) for view in list(pairs.values())[:4]),
        )
    special = {guards.rank_condition(view.reading.own) for view in odd if view.reading.own} - {""}
    evidence = [describe(odd[0]), describe(rest[0])]
    if special:
        evidence.append(f"its line runs only `if {sorted(special)[0]}`")
    if any(view.reading.own and source.in_except_block(view.reading.own) for view in odd):
        evidence.append("its line stands in an except block: an error was caught on this rank only")
    op = odd[0].op or str(odd[0].wait)
    sure = confidence(base, views, two=two)
    against: tuple[str, ...] = ()
    looked_s = max(view.motion.interval_s for view in odd)
    if looked_s < _SURE_AFTER_S and _may_compute(odd[0], rest[0]):
        sure = min(sure, 0.4)
        against = ("backward shows no collective: it may be computing; look again over some seconds",)
    named = []
    for view in odd:
        culprit = view.culprit(f"{text}: {view.op or view.wait}, the others {rest[0].op or rest[0].wait}")
        parted = where_they_part(view.reading, rest[0].reading)
        if parted and _own_place(view) == _own_place(rest[0]):
            culprit = replace(culprit, frame=f"{culprit.frame}; called by {parted[0]}")
        elif passed := _deeper_line(view, rest[0]):
            culprit = replace(culprit, frame=f"{culprit.frame}; it is not in {passed}, where the others wait")
        named.append(culprit)
    return Verdict(
        kind,
        tuple(named),
        sure,
        f"rank {ranks_of(odd)} {text} ({op} against {rest[0].op or rest[0].wait})",
        tuple(evidence),
        against,
    )


def _deeper_line(view: View, other: View) -> Frame | None:
    """The user's line of another rank, where a library called it from below all the lines of this one."""
    mine, theirs = own_stack(view.reading), own_stack(other.reading)
    return theirs[-1] if mine and len(mine) < len(theirs) and theirs[: len(mine)] == mine else None


def _may_compute(odd: View, other: View) -> bool:
    """Whether one side is in a backward that shows no collective, as in any healthy step."""
    one, two = odd.reading.own, other.reading.own
    together = one is not None and two is not None and (one.name, one.file) == (two.name, two.file)
    return odd.op == "backward" or (other.op == "backward" and together)


def _one_sided_context(views: Sequence[View], two: bool) -> Verdict | None:
    """Only some ranks are in a save or an evaluation that gathers: the others never join."""
    for phase, kind in ((Phase.SAVE, Kind.SAVE_ON_ONE), (Phase.EVAL, Kind.EVAL_ON_ONE)):
        inside = [
            view for view in views if view.context is phase and not _came_from_nowhere(view, phase, views)
        ]
        rest = [view for view in views if view.context is not phase]
        if not inside or not rest:
            continue
        if phase is Phase.EVAL and min(view.rank for view in views) not in {view.rank for view in inside}:
            continue  # not an evaluation for the main process alone: these ranks ran out of batches first
        barrier = inside[0].op == "barrier"
        if barrier and len({view.op for view in rest}) > 1:
            continue  # a barrier is downstream: innocent when the others are not at one place themselves
        # Who takes part in a step has passed the save: no rank is in a step that another has not begun.
        passed = phase is Phase.SAVE and all(view.reading.step in _OF_A_STEP for view in rest)
        if len(inside) < len(rest) or (len(inside) == len(rest) and (passed or not barrier)):
            what = "a save" if phase is Phase.SAVE else "an evaluation"
            why = f"it is in {what} that needs every rank, and the others are not in it"
            verdict = _mismatch(kind, inside, views, f"is alone in {what}", 0.9, two)
            culprits = tuple(view.culprit(why) for view in inside)
            return Verdict(
                kind, culprits, verdict.confidence, verdict.reason, verdict.evidence, verdict.against
            )
    return None


def _came_from_nowhere(view: View, phase: Phase, views: Sequence[View]) -> bool:
    """Whether no line of the user's calls the function that names the phase: a signal handler's name, say."""
    stack = own_stack(view.reading)
    shared = set.intersection(*({(f.name, f.file) for f in own_stack(other.reading)} for other in views))
    named = [
        number
        for number, frame in enumerate(stack)
        if frames.phase_of(frame) is phase and (frame.name, frame.file) not in shared
    ]
    main = frames.main_thread(view.evidence.threads)
    said = main is not None and any(
        frames.phase_of(frame) is phase and frames.origin(frame) is not Origin.OWN for frame in main.frames
    )
    if said or not named or named[0] == 0:
        return False
    callers = [source.statement(frame) for frame in stack[: named[0]]]
    return all(callers) and not any(stack[named[0]].short in text for text in callers)


def _generate_left(views: Sequence[View], two: bool) -> Verdict | None:
    """ZeRO-3 fetches parameters in generate: ranks that stopped earlier have left the loop."""
    inside = [
        view
        for view in views
        if view.context is Phase.GENERATE and view.reading.names & {"fetch_sub_module", "pre_forward"}
    ]
    rest = [view for view in views if view.context is not Phase.GENERATE]
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
    if main is None:
        return False
    return any("visi" in frame.file.lower() or "Vision" in frame.name for frame in main.frames)


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
    if len(reducing) < len(rest):
        text = "reduces where the others still gather an expert's parameters"
        return _mismatch(Kind.COLLECTIVE_MISMATCH, reducing, views, text, 0.8, two)
    return _mismatch(
        Kind.COLLECTIVE_MISMATCH, rest, views, "is past the reduction that the others wait in", 0.8, two
    )
