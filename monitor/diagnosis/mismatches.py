"""Errors with which a process group itself says that ranks made different calls, or did not come."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ftdash.monitor.diagnosis.cascade import exit_codes, where_others_stood
from ftdash.monitor.diagnosis.frames import Origin, origin
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.loglines import MISSED_BARRIER
from ftdash.monitor.diagnosis.model import Culprit, LogEvidence, LogFinding, LogKind, Verdict
from ftdash.monitor.wording import rank_list

_ABORTED = -6
_PREAMBLE = re.compile(r"op\.preamble\.length <= op\.nbytes\.? *(?P<came>\d+) vs\.? (?P<held>\d+)")
_TRUNCATED = re.compile(r"Message truncated ?: received (?P<came>\d+) bytes instead of (?P<held>\d+)")
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?P<call>.*?)\)"
    r"(?=, but Rank|\.|,? ?Collectives|$)"
)
_OPERATION = re.compile(r"OpType=(\w+)")
_SHAPE = re.compile(r"TensorShape=\[([\d, ]*)\]")


def mismatch_verdict(logs: LogEvidence) -> Verdict | None:
    """The verdict of such errors, None when there is none."""
    found = [finding for finding in logs.findings if finding.kind is LogKind.MISMATCH]
    if found:
        return _fingerprints(found, logs) or _sizes(found[0], logs)
    missed = [finding for finding in logs.findings if finding.kind is LogKind.MISSED_BARRIER]
    return _missed_barrier(missed, logs) if missed else None


def _fingerprints(found: Sequence[LogFinding], logs: LogEvidence) -> Verdict | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: each error compares the call of its rank with that of one other."""
    calls: dict[int, tuple[str, str]] = {}
    for finding in found:
        for match in _FINGERPRINT.finditer(finding.text):
            operation, shape = _OPERATION.search(match["call"]), _SHAPE.search(match["call"])
            calls[int(match["rank"])] = (operation[1] if operation else "", shape[1] if shape else "")
    if len(calls) < 2:
        return None
    usual, count = Counter(calls.values()).most_common(1)[0]
    odd = {rank for rank, call in calls.items() if call != usual}
    same_operation = all(calls[rank][0] == usual[0] for rank in odd)
    tied = count <= len(odd)
    named = set(calls) if tied else odd
    told = tuple(
        f"rank {rank}: {operation} of shape [{shape}]"
        for rank, (operation, shape) in sorted(calls.items())[:8]
    )
    what = "the same collective with another shape" if same_operation else "another collective"
    return Verdict(
        Kind.SIZE_MISMATCH if same_operation else Kind.COLLECTIVE_MISMATCH,
        _culprits(named, logs, f"it makes {what}" if not tied else f"one of them makes {what}"),
        0.7 if tied else 0.9,
        f"the ranks do not make the same call: {rank_list(named)}",
        (*told, *where_others_stood(logs)),
    )


def _sizes(lead: LogFinding, logs: LogEvidence) -> Verdict:
    """More bytes came than the receiver's tensor holds: it, or who sends to it, has another size."""
    said = _PREAMBLE.search(lead.text) or _TRUNCATED.search(lead.text)
    codes = exit_codes(logs)
    aborted = {rank for rank, code in codes.items() if code == _ABORTED}
    ranks = {lead.rank} if lead.rank is not None else aborted
    sizes = f"{said['came']} bytes came where its tensor has {said['held']}" if said else "more bytes came"
    who = f"{rank_list(ranks)}: {sizes}" if ranks else sizes
    return Verdict(
        Kind.SIZE_MISMATCH,
        _culprits(ranks, logs, f"{sizes}: it, or a rank that sends to it, has a tensor of another size"),
        0.75,
        f"ranks made one collective with tensors of different sizes; {who}",
        (lead.text[:300], *where_others_stood(logs)),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL at the next start names each rank's size",),
    )


def _missed_barrier(missed: Sequence[LogFinding], logs: LogEvidence) -> Verdict:
    ranks: set[int] = set()
    for finding in missed:
        if match := MISSED_BARRIER.search(finding.text):
            ranks |= {int(number) for number in match["ranks"].replace(",", " ").split()}
    return Verdict(
        Kind.RANK_MISSING,
        _culprits(ranks, logs, "it did not come to the barrier that the others waited in"),
        0.9,
        f"{rank_list(ranks)} did not come to the monitored barrier",
        (missed[0].text[:300], *where_others_stood(logs)),
    )


def _culprits(ranks: set[int], logs: LogEvidence, why: str) -> tuple[Culprit, ...]:
    """Ranks, each with the user's line of a traceback that it printed."""
    return tuple(
        Culprit(rank, logs.hosts.get(rank, ""), 0, _line_of(rank, logs), why) for rank in sorted(ranks)
    )


def _line_of(rank: int, logs: LogEvidence) -> str:
    for finding in logs.findings:
        if finding.rank == rank:
            for frame in finding.frames:
                if origin(frame) is Origin.OWN:
                    return str(frame)
    return ""
