"""Collective timeouts in the logs: the rank that is behind, calls something else, or says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from ftdash.monitor.diagnosis.cascade import culprits_of
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import LogEvidence, LogFinding, LogKind, Verdict
from ftdash.monitor.wording import plural, rank_list

_ENQUEUED = "last enqueued"
_MOST_CALLS = 6  # told one by one
_OTHER_WEIGHTS = (
    "ranks that gather tensors of other sizes run other modules (a batch without images, an expert without "
    "tokens) or are at another step: send every rank through the same modules"
)


def watchdog_verdict(logs: LogEvidence, world: int) -> Verdict | None:
    """What NCCL's watchdogs say together; None when they are quiet. `world` is 0 when it is not known."""
    timeouts = _by_rank(logs, timed_out=True)
    if not timeouts:
        return _from_enqueued(logs)
    group, members = _largest_group(timeouts)
    world = max(world, max(timeouts) + 1)
    sample = next(iter(members.values()))
    reason = _what(sample)
    said = f"the timeout is reported by {plural(len(timeouts), 'rank')}: {rank_list(timeouts)}"
    evidence = (said, *_calls_told(members))
    if verdict := _at_odds(members, logs, reason, evidence):
        return verdict
    if verdict := _from_enqueued(logs, reason, evidence):
        return verdict
    quiet = set(range(world)) - set(timeouts)
    if quiet and len(quiet) < len(timeouts):
        why = f"{rank_list(members)} timed out waiting; it says nothing"
        return Verdict(Kind.RANK_MISSING, culprits_of(quiet, logs, why), 0.7, reason, evidence)
    if quiet:
        where = f" of group {group}" if group else ""
        return Verdict(
            Kind.RANK_MISSING,
            (),
            0.5,
            f"{reason}: {rank_list(timeouts)} waited{where}; the logs do not tell who did not come",
            evidence,
            (f"{rank_list(timeouts)} reported the timeout: who waits is seldom who is at fault",),
            ("ftdash diagnose --flight DIR on the flight recorder dumps (TORCH_FR_BUFFER_SIZE)",),
        )
    return Verdict(
        Kind.NETWORK, (), 0.6, f"{reason}: every rank reports the same call, nobody differs", evidence
    )


def _by_rank(logs: LogEvidence, *, timed_out: bool) -> dict[int, LogFinding]:
    """The first timeout of each rank, or its last word on what it had enqueued."""
    found: dict[int, LogFinding] = {}
    for finding in logs.findings:
        if finding.kind is not LogKind.WATCHDOG or finding.rank is None:
            continue
        if timed_out and finding.op != _ENQUEUED:
            found.setdefault(finding.rank, finding)
        elif not timed_out and finding.op == _ENQUEUED and finding.seq:
            found[finding.rank] = finding
    return found


def _largest_group(timeouts: Mapping[int, LogFinding]) -> tuple[str, dict[int, LogFinding]]:
    groups: dict[str, dict[int, LogFinding]] = defaultdict(dict)
    for rank, finding in timeouts.items():
        groups[finding.group][rank] = finding
    return max(groups.items(), key=lambda item: len(item[1]))


def _what(finding: LogFinding) -> str:
    at = f" at sequence {finding.seq}" if finding.seq is not None else ""
    after = f" after {finding.timeout_ms / 1000:.0f} s" if finding.timeout_ms else ""
    return f"{finding.op}{at} timed out{after}"


def _call(finding: LogFinding) -> tuple[int | None, str, int | None]:
    return finding.seq, finding.op, finding.numel


def _calls_told(members: Mapping[int, LogFinding]) -> tuple[str, ...]:
    """What each rank waited in, where they differ."""
    told: dict[tuple[int | None, str, int | None], list[int]] = defaultdict(list)
    for rank, finding in members.items():
        told[_call(finding)].append(rank)
    if len(told) < 2:
        return ()
    lines = []
    for (seq, op, numel), ranks in list(told.items())[:_MOST_CALLS]:
        of = f" of {plural(numel, 'element')}" if numel is not None else ""
        at = f" at sequence {seq}" if seq is not None else ""
        lines.append(f"{rank_list(ranks)} waited in {op}{of}{at}")
    return tuple(lines)


def _at_odds(
    members: Mapping[int, LogFinding], logs: LogEvidence, reason: str, evidence: tuple[str, ...]
) -> Verdict | None:
    """Ranks of one group that waited in different calls."""
    calls = Counter(map(_call, members.values()))
    if len(calls) < 2:
        return None
    usual, count = calls.most_common(1)[0]
    odd = {rank for rank, finding in members.items() if _call(finding) != usual}
    others = [_call(members[rank]) for rank in odd]
    fix = ""
    if any(call[1] != usual[1] for call in others):
        kind, why = Kind.COLLECTIVE_MISMATCH, "it makes another call than the others"
    elif all(call[0] == usual[0] for call in others):
        kind, why = Kind.SIZE_MISMATCH, "it makes the call with another size"
        fix = _OTHER_WEIGHTS if "allgather" in usual[1] else ""
    elif any(call[2] != usual[2] for call in others):
        kind, why = Kind.COLLECTIVE_MISMATCH, "it is at another call of another size than the others"
    else:
        kind, why = Kind.RANK_MISSING, "it is behind the others, or ahead of them"
    if count <= len(odd):
        named, confidence = set(members), 0.6
        why = "the ranks wait in different calls, and none is in the majority"
        reason = f"{reason}: the ranks are out of step with one another"
    else:
        named, confidence = odd, 0.7
        if kind is Kind.RANK_MISSING:
            why = "it has not made the call that the others wait in"
    return Verdict(kind, culprits_of(named, logs, why), confidence, reason, evidence, fix=fix)


def _from_enqueued(logs: LogEvidence, reason: str = "", evidence: tuple[str, ...] = ()) -> Verdict | None:
    """Ranks that have enqueued less than others of the same group."""
    enqueued = _by_rank(logs, timed_out=False)
    _, members = _largest_group(enqueued) if enqueued else ("", {})
    counts = {rank: finding.seq or 0 for rank, finding in members.items()}
    if len(set(counts.values())) < 2:
        return None
    top = max(counts.values())
    behind = {rank for rank, seq in counts.items() if seq < top}
    told = ", ".join(f"rank {rank}: {seq}" for rank, seq in sorted(counts.items())[:16])
    why = "it has not made the call that the others wait in"
    return Verdict(
        Kind.RANK_MISSING,
        culprits_of(behind, logs, why),
        0.7,
        reason or "a collective timed out",
        (*evidence, f"last enqueued: {told}"),
    )
