"""From aligned flight recorder dumps to a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftdash.monitor.diagnosis import guards, source
from ftdash.monitor.diagnosis.align import Alignment, Fault, GroupFault, align
from ftdash.monitor.diagnosis.flight import user_frame
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, FlightDump, Frame, Verdict
from ftdash.monitor.wording import rank_list, they

_KINDS = {
    Fault.MISSING: Kind.RANK_MISSING,
    Fault.TYPE: Kind.COLLECTIVE_MISMATCH,
    Fault.ORDER: Kind.ORDER_MISMATCH,
    Fault.SIZE: Kind.SIZE_MISMATCH,
    Fault.DTYPE: Kind.SIZE_MISMATCH,
    Fault.NO_DUMP: Kind.UNDUMPABLE,
    Fault.EQUAL: Kind.NETWORK,
}
_CONFIDENCE = {
    Fault.MISSING: 0.9,
    Fault.TYPE: 0.9,
    Fault.ORDER: 0.85,
    Fault.SIZE: 0.9,
    Fault.DTYPE: 0.85,
    Fault.NO_DUMP: 0.6,
    Fault.EQUAL: 0.8,
}
_CAST = "cast to one dtype before the call: autocast, a loss or a metric gave this rank another one"


def _frame_at(dump: FlightDump, fault: GroupFault) -> Frame | None:
    """The user's line of the call at the fault, else of the rank's last call."""
    at = [e for e in dump.entries if e.group == fault.group and e.seq == fault.seq and not e.p2p]
    return user_frame(at) or user_frame(dump.entries)


def _why(rank: int, dump: FlightDump | None, alignment: Alignment, fault: GroupFault) -> str:
    calls = dict(fault.found)
    if alignment.strayed is not None:
        return (
            f"it calls in {alignment.strayed.title}, which has had no such call of it before: the wrong "
            f"process group; {they(fault.waiting, 'waits')} for its call in {fault.title}"
        )
    if dump is None:
        return f"it left no flight recorder dump, and the others wait in {fault.title}"
    if rank in calls and fault.fault is not Fault.MISSING:
        made = f"it calls {calls[rank]} at {fault.title}"
        if fault.usual:
            made += f", where {they(fault.waiting, 'calls')} {fault.usual}"
        meant = _meant_group(rank, calls[rank], alignment, fault)
        if meant is None:
            return made
        waits = they(meant.waiting, "waits")
        return f"{made}, and {waits} for that call of it in {meant.title}: the wrong process group"
    last = dump.entries[-1] if dump.entries else None
    done = f"; its last call was {last.op}, sequence {last.seq}" if last else "; it recorded no call at all"
    return f"it has not made the call that the others wait in: {fault.title}{done}"


def _meant_group(rank: int, call: str, alignment: Alignment, fault: GroupFault) -> GroupFault | None:
    """Another group in which the others wait for the very operation that a rank makes here."""
    for other in alignment.faults:
        missing = other.fault is Fault.MISSING and rank in other.culprits
        if missing and other.group != fault.group and call.split()[0] == other.op:
            return other
    return None


def _untie(fault: GroupFault, dumps: Mapping[int, FlightDump]) -> frozenset[int]:
    """With no majority, the side whose line runs only on some ranks or in an except block, else all."""
    sides: dict[str, set[int]] = {}
    for rank, call in fault.found:
        sides.setdefault(call, set()).add(rank)
    for hint in (source.in_except_block, guards.rank_condition):
        marked = [
            ranks
            for ranks in sides.values()
            if all((frame := _frame_at(dumps[rank], fault)) is not None and hint(frame) for rank in ranks)
        ]
        if len(marked) == 1:
            return frozenset(marked[0])
    return fault.culprits


def flight_verdict(
    dumps: Sequence[FlightDump],
    expected: frozenset[int] = frozenset(),
    joined: frozenset[int] = frozenset(),
) -> tuple[Verdict | None, Alignment]:
    """The verdict of the dumps alone; None when nothing in them is unfinished. Arguments as of `align`."""
    alignment = align(dumps, expected, joined)
    fault = alignment.decisive
    if fault is None or alignment.fault is Fault.NONE:
        return None, alignment
    by_rank = {dump.rank: dump for dump in dumps}
    ranks = _untie(fault, by_rank) if fault.tied else alignment.culprits
    culprits = []
    for rank in sorted(ranks):
        dump = by_rank.get(rank)
        frame = _frame_at(dump, fault) if dump else None
        culprits.append(
            Culprit(
                rank,
                dump.host if dump else "",
                0,
                str(frame) if frame else "",
                _why(rank, dump, alignment, fault),
            )
        )
    kind = _KINDS[alignment.fault]
    confidence = _CONFIDENCE[alignment.fault] - (
        0.3 if fault.tied and len(ranks) == len(fault.found) else 0.0
    )
    if alignment.strayed is not None:
        reason = f"{rank_list(ranks)} calls in the wrong process group: {alignment.strayed.title}"
    elif kind is Kind.NETWORK:
        reason = f"every rank has made the same call, with the same sizes, and it does not end: {fault.title}"
    else:
        reason = f"{alignment.fault} in {fault.title}"
    evidence = [
        f"flight recorder: {item.title}: {item.fault}"
        for item in alignment.faults
        if item.fault is not Fault.NONE
    ]
    evidence += alignment.chain
    if alignment.absent:
        evidence.append(f"no dump from rank {', '.join(map(str, sorted(alignment.absent)))}")
    fix = _CAST if alignment.fault is Fault.DTYPE else ""
    return Verdict(kind, tuple(culprits), confidence, reason, tuple(evidence[:8]), fix=fix), alignment
