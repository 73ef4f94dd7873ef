"""When no rank is held in a collective: who has not come to where the others poll, or what all wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ftdash.monitor.diagnosis import endless
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import SLOW_PHASES
from ftdash.monitor.diagnosis.model import Verdict
from ftdash.monitor.diagnosis.outside import outside_kind, outside_why, slow
from ftdash.monitor.diagnosis.views import View, static_slow
from ftdash.monitor.diagnosis.words import describe, place_of, ranks_of


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
        return slow(rest, polling)
    why = f"rank {ranks_of(polling)} asks again and again{place_of(polling[0])}, and it does not come there"
    return Verdict(
        outside_kind(stuck[0]),
        tuple(view.culprit(why) for view in stuck),
        0.7,
        f"rank {ranks_of(stuck)} does not come to where rank {ranks_of(polling)} waits",
        (describe(stuck[0]), describe(polling[0])),
    )


_ASKED_FOR = (
    "see what the line asks for (a file, a socket, a counter) and who ought to give it; a limit on the wait "
    "turns the hang into an error that says so"
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
            late_words = endless.late_words(readable[0].evidence)
            return Verdict(Kind.ALL_OUTSIDE, (), 0.8, reason, (*evidence, late_words), fix=_ASKED_FOR)
        against = ("how long the job's steps take is not known: it may be fed from outside and wait for it",)
        return Verdict(Kind.ALL_OUTSIDE, (), 0.5, reason, evidence, against, fix=_ASKED_FOR)
    return Verdict(
        Kind.HEALTHY, (), 0.4, "no rank waits for another; nothing moved between the samples", evidence
    )


def nobody_waits(seen: Sequence[View], waiting: Sequence[View], two: bool) -> Verdict:
    """No rank is held in a collective throughout (or those that are see others moving in theirs)."""
    readable = [view for view in seen if view.has_stack]
    if two and not waiting and (verdict := _not_where_others_poll(readable)):
        return verdict
    if two and not waiting:
        frozen = [view for view in readable if not view.in_collective and view.stands]
        kinds = {outside_kind(view) for view in frozen}
        if (
            frozen
            and len(frozen) == len(readable)
            and Kind.OUTSIDE not in kinds
            and Kind.TEARDOWN not in kinds
        ):
            kind = outside_kind(frozen[0])
            return Verdict(
                kind,
                tuple(view.culprit(outside_why(view, kind)) for view in frozen),
                0.7,
                f"no rank waits for another: rank {ranks_of(frozen)} is held up by itself",
                (describe(frozen[0]),),
            )
    elif not two and readable and all(static_slow(view) in SLOW_PHASES for view in readable):
        return slow(readable, (), guess=True)
    slow_ones = [
        view for view in readable if view.reading.context in SLOW_PHASES and not view.waits_for_peers
    ]
    if two and slow_ones and waiting:
        return slow(slow_ones, waiting)
    moving = [view for view in readable if view.motion.known and not view.stands]
    if two and readable and not moving and not waiting:
        return _all_stand(readable)
    reason = "the ranks move" if two else "no rank waits in a collective for one that is elsewhere"
    evidence = tuple(f"rank {view.rank}: {view.motion.words()}" for view in moving[:4] if view.motion.words())
    return Verdict(Kind.HEALTHY, (), 0.85 if two else 0.5, reason, evidence)
