"""Ranks that wait for the store or for others to start: who has not come, and who looks elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, Verdict
from ftdash.monitor.diagnosis.outside import outside_kind, slow
from ftdash.monitor.diagnosis.views import View, static_slow
from ftdash.monitor.diagnosis.words import confidence, describe, place_of, rank_list, ranks_of

_MOST_NAMED = 64  # of ranks that have not come


def before_training(
    seen: Sequence[View], pending: Sequence[View], absent: frozenset[int], two: bool
) -> Verdict:
    """Nobody is in a collective, somebody waits for the store or for others to start."""
    rest = [view for view in seen if view not in pending and view.has_stack]
    stuck = [view for view in rest if not (view.motion.known and view.progresses)]
    if rest and not stuck and two:
        return slow(rest, pending)
    if stuck:
        if not two and all(map(static_slow, stuck)):
            return slow(stuck, pending)
        culprits = [
            view.culprit(f"it does not come: {ranks_of(pending)} wait{place_of(pending[0])}")
            for view in stuck
        ]
        kind = outside_kind(stuck[0])
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
