"""All evidence of an incident, weighed: stacks and states, flight recorder, logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.align import GroupFault
from ftdash.monitor.diagnosis.deadline import time_left
from ftdash.monitor.diagnosis.flightverdict import flight_verdict
from ftdash.monitor.diagnosis.frames import Origin
from ftdash.monitor.diagnosis.kinds import NO_CULPRIT, Kind
from ftdash.monitor.diagnosis.logverdict import log_evidence_for, log_verdict
from ftdash.monitor.diagnosis.machines import with_machines
from ftdash.monitor.diagnosis.model import (
    Culprit,
    Diagnosis,
    FlightDump,
    Group,
    LogEvidence,
    LogKind,
    Sample,
    Verdict,
)
from ftdash.monitor.diagnosis.patterns import with_advice
from ftdash.monitor.diagnosis.verdict import stack_verdict
from ftdash.monitor.diagnosis.views import View, make_views

# What stacks alone decide: a process state or a place outside of any collective needs no sequence number.
_DECIDED_BY_STACKS = frozenset(
    {
        Kind.DEAD_RANK,
        Kind.STOPPED_RANK,
        Kind.D_STATE,
        Kind.TEARDOWN,
        Kind.DATA_LOADER,
        Kind.LOCK,
        Kind.STORE,
        Kind.RENDEZVOUS,
        Kind.STORAGE,
        Kind.OUTSIDE,
        Kind.SAVE_ON_ONE,
        Kind.EVAL_ON_ONE,
        Kind.EXTERNAL_PEER,
        Kind.ALL_OUTSIDE,
        Kind.SLOW,
        Kind.HEALTHY,
    }
)

MOST_RANKS = 1_000_000  # a stored world size is input: a mad one must not fill the memory


def diagnose(samples: Sequence[Sample]) -> Diagnosis:
    """Weigh the evidence of one or two samples (two are better) of the same incident."""
    if not samples:
        return Diagnosis(Verdict(Kind.NO_EVIDENCE, (), 0.0, "no evidence was given"))
    last = samples[-1]
    views = make_views(samples)
    dumps = next((sample.flight for sample in reversed(samples) if sample.flight), ())
    logs = next((sample.logs for sample in reversed(samples) if sample.logs), None)
    notices = tuple(dict.fromkeys(notice for sample in samples for notice in sample.notices))
    by_stack = stack_verdict(views, last) if views or last.launchers else None
    if by_stack is not None and by_stack.kind is Kind.NO_EVIDENCE and last.launchers and not views:
        from ftdash.monitor.diagnosis.launchers import launcher_verdict

        by_stack = launcher_verdict(last) or by_stack
    world = frozenset(range(min(last.world_size or 0, MOST_RANKS)))
    joined = frozenset(view.rank for view in views if view.joins_its_thread)
    by_flight, alignment = flight_verdict(dumps, world, joined) if dumps else (None, None)
    if by_flight is not None and alignment is not None and alignment.decisive is not None:
        by_flight = _with_missed_call(by_flight, alignment.decisive, views)
    told_apart = alignment is not None and alignment.tells_apart
    suspects = alignment.suspects if alignment is not None else frozenset()
    if by_flight is not None and by_stack is not None and _ranks(by_stack) and _ranks(by_stack) <= suspects:
        by_flight = replace(by_flight, culprits=by_stack.culprits)  # stacks tell which of them
    seen = {view.rank for view in views if view.has_stack}
    if by_flight is not None and by_flight.kind is Kind.UNDUMPABLE and _ranks(by_flight) <= seen:
        by_flight = None  # a recorder that does not answer says nothing of a rank whose stack was read
    by_logs = log_verdict(logs) if logs else None
    verdict = _weigh(by_stack, by_flight, by_logs, views, dumps, logs, told_apart=told_apart, over=last.over)
    verdict = with_machines(verdict, last)
    verdict = with_advice(_with_hosts(verdict, views, dumps, logs), views, over=last.over)
    waiting = [view.rank for view in views if view.waits_for_peers]
    if verdict.kind is not Kind.HEALTHY and not last.over and (left := time_left(last, waiting)):
        verdict = replace(verdict, evidence=(*verdict.evidence, left))
    return Diagnosis(verdict, group(views), notices + (tuple(logs.notices) if logs else ()))


def _weigh(
    by_stack: Verdict | None,
    by_flight: Verdict | None,
    by_logs: Verdict | None,
    views: Sequence[View],
    dumps: Sequence[FlightDump],
    logs: LogEvidence | None,
    *,
    told_apart: bool,
    over: bool,
) -> Verdict:
    usable_stack = by_stack if by_stack and by_stack.kind is not Kind.NO_EVIDENCE else None
    if usable_stack is None and by_flight is None:
        if dumps:
            fallback = "nothing in the flight recorder is unfinished"
        elif over:
            fallback = "the run is over, and nothing that it left tells of a fault"
        else:
            fallback = "nothing notable was found"
        empty = Verdict(Kind.HEALTHY if dumps else Kind.NO_EVIDENCE, (), 0.4 if dumps else 0.0, fallback)
        return by_logs or by_stack or empty
    if usable_stack is None:
        chosen = by_flight
    elif by_flight is None or usable_stack.kind in _DECIDED_BY_STACKS or by_flight.kind is Kind.UNDUMPABLE:
        chosen = usable_stack
    elif usable_stack.kind is Kind.NETWORK or told_apart:
        chosen = by_flight
    else:
        chosen = usable_stack  # in one group stacks show who differs as well, and where
    assert chosen is not None
    other = by_flight if chosen is usable_stack else usable_stack
    chosen = _agree(chosen, other, views)
    if by_logs is not None and logs is not None:
        if _log_overrides(by_logs, chosen):
            extra = (f"stacks or flight recorder: {chosen.kind}: {chosen.reason}",)
            return replace(by_logs, evidence=by_logs.evidence + extra)
        chosen = replace(chosen, evidence=chosen.evidence + log_evidence_for(logs, chosen))
    if chosen.kind is Kind.TEARDOWN and logs is not None:
        chosen = replace(
            chosen, culprits=tuple(_with_exception(culprit, logs) for culprit in chosen.culprits)
        )
    return chosen


def _ranks(verdict: Verdict) -> set[int]:
    return {culprit.rank for culprit in verdict.culprits}


def _with_missed_call(verdict: Verdict, fault: GroupFault, views: Sequence[View]) -> Verdict:
    """A missing rank's own line, and the one where the others make the call that it has not made."""
    if verdict.kind is not Kind.RANK_MISSING:
        return verdict
    by_rank = {view.rank: view for view in views}
    waiting = [by_rank[rank] for rank in sorted(fault.waiting) if rank in by_rank]
    there = {reading.own for view in waiting for reading in view.in_call(fault.op) if reading.own is not None}
    filled = []
    for culprit in verdict.culprits:
        view = by_rank.get(culprit.rank)
        if view is not None and (missed := sorted(map(str, there - {view.shown_frame}))):
            filled.append(
                replace(view.culprit(culprit.why), frame=f"{view.shown_frame}; the others are at {missed[0]}")
            )
        else:
            filled.append(culprit)
    return replace(verdict, culprits=tuple(filled))


def _with_exception(culprit: Culprit, logs: LogEvidence) -> Culprit:
    """A rank in teardown, with the user's line that raised what its log tells."""
    for finding in logs.findings:
        if finding.kind is LogKind.EXCEPTION and finding.rank == culprit.rank:
            own = next((frame for frame in finding.frames if frames.origin(frame) is Origin.OWN), None)
            raised = f"{own}; now in {culprit.frame}" if own else culprit.frame
            why = f"it raised {finding.text[:80]} and shuts down while the others still wait"
            return replace(culprit, frame=raised, why=why)
    return culprit


def _log_overrides(by_logs: Verdict, chosen: Verdict) -> bool:
    """Whether a rank's logged first failure explains the hang that the other evidence shows."""
    if by_logs.kind not in (Kind.OUT_OF_MEMORY, Kind.HOST_OUT_OF_MEMORY, Kind.CRASH):
        return False
    if chosen.kind in (Kind.SLOW, Kind.HEALTHY, Kind.ALL_OUTSIDE, Kind.NETWORK, Kind.UNDUMPABLE):
        return bool(by_logs.culprits)
    blamed = {culprit.rank for culprit in by_logs.culprits}
    named = {culprit.rank for culprit in chosen.culprits}
    return chosen.kind in (Kind.DEAD_RANK, Kind.RANK_MISSING) and bool(blamed & named)


def _agree(chosen: Verdict, other: Verdict | None, views: Sequence[View]) -> Verdict:
    """Confidence after hearing the second source; a flight recorder's culprit gets its stack's own line."""
    culprits = chosen.culprits
    by_rank = {view.rank: view for view in views}
    filled = []
    for culprit in culprits:
        view = by_rank.get(culprit.rank)
        if view is not None and view.shown_frame is not None and culprit.pid == 0:
            culprit = replace(
                culprit,
                frame=str(view.shown_frame),
                pid=view.evidence.pid,
                host=culprit.host or view.evidence.host,
            )
        filled.append(culprit)
    chosen = replace(chosen, culprits=tuple(filled))
    if other is None or {chosen.kind, other.kind} & {Kind.HEALTHY, Kind.SLOW}:
        return chosen
    mine, theirs = {c.rank for c in chosen.culprits}, {c.rank for c in other.culprits}
    if mine and mine == theirs:
        line = f"agrees: {other.kind}: {other.reason}"
        return replace(
            chosen,
            confidence=min(0.98, chosen.confidence + 0.08),
            evidence=(*chosen.evidence, line, *other.evidence[:2]),
        )
    if other.kind in NO_CULPRIT and not mine:
        return replace(
            chosen, confidence=min(0.95, chosen.confidence + 0.1), evidence=(*chosen.evidence, other.reason)
        )
    line = f"{other.kind}: {other.reason}"
    lowered = chosen.confidence - (0.1 if theirs and theirs.isdisjoint(mine) else 0.0)
    return replace(chosen, confidence=max(0.2, lowered), against=(*chosen.against, line))


def _with_hosts(
    verdict: Verdict, views: Sequence[View], dumps: Sequence[FlightDump], logs: LogEvidence | None
) -> Verdict:
    hosts = {dump.rank: dump.host for dump in dumps if dump.host}
    if logs:
        hosts.update(logs.hosts)
    hosts.update({view.rank: view.evidence.host for view in views if view.evidence.host})
    culprits: tuple[Culprit, ...] = tuple(
        replace(culprit, host=culprit.host or hosts.get(culprit.rank, "")) for culprit in verdict.culprits
    )
    return replace(verdict, culprits=culprits)


def group(views: Sequence[View]) -> tuple[Group, ...]:
    """Ranks that do the same, the largest group last: by phase and collective, then by the user's line."""
    buckets: dict[tuple[object, ...], list[View]] = {}
    for view in views:
        frame = view.shown_frame
        where = (frame.short, frame.file, frame.line) if frame else ()
        buckets.setdefault((view.reading.phase, view.op or view.wait, where), []).append(view)
    groups = []
    for members in buckets.values():
        view = members[0]
        main = frames.main_thread(view.evidence.threads)
        shown = [frame for frame in main.frames if frames.origin(frame) is not Origin.NATIVE] if main else []
        groups.append(
            Group(
                ranks=tuple(sorted(member.rank for member in members)),
                phase=str(view.reading.phase),
                collective=view.op if view.in_collective else "",
                frames=tuple(str(frame) for frame in shown[:40]),
            )
        )
    return tuple(sorted(groups, key=lambda item: (len(item.ranks), item.ranks)))
