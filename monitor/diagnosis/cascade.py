"""What the cascade alone tells: who complains of lost or late peers, in which call, and who says nothing.

A rank that died without a word, ended early or never came has no error of its own; the others' errors say
where they waited for it, and the launcher how each process ended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ftdash.monitor.diagnosis import endings
from ftdash.monitor.diagnosis.frames import Reading, Wait, read_frames
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, LogEvidence, LogFinding, LogKind, Verdict
from ftdash.monitor.wording import rank_list

_TIMED_OUT = re.compile(r"Timed out waiting|wait timeout after|Socket Timeout|collective operation timeout")
_NO_CALL = frozenset({Wait.OWN, Wait.LIBRARY, Wait.NOTHING})
_LEFT_EARLY = (
    "every rank must take the same number of steps: see why this one left its loop (fewer batches, a "
    "condition that only it met), and let all ranks decide together (all_reduce the flag)"
)
_CAME_LATE = (
    "see what this rank did instead: work that only it does belongs before the process group's timeout "
    "(a longer timeout, or the work done ahead of the job); py-spy while it waits, or "
    "ftdash launch, shows its line"
)
_SAME_CALLS = (
    "every rank must make the same collectives in the same order and of the same sizes; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL names the first call that differs"
)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """A rank's error about its peers, and the call that it was in."""

    finding: LogFinding
    reading: Reading

    @property
    def timed_out(self) -> bool:
        return bool(_TIMED_OUT.search(self.finding.text))

    @property
    def op(self) -> str:
        return self.reading.op or ("" if self.reading.wait in _NO_CALL else str(self.reading.wait))

    @property
    def place(self) -> str:
        return str(self.reading.own or self.reading.telling or "")

    @property
    def words(self) -> str:
        """The call and the user's line that made it."""
        where = f"at {self.place}" if self.place else ""
        return f"in {self.op} {where}".strip() if self.op else where or "waiting"


def exit_codes(logs: LogEvidence) -> dict[int, int]:
    """How each rank ended, by the launcher's word."""
    ended = [f for f in logs.findings if f.kind in (LogKind.ELASTIC, LogKind.EXITED, LogKind.HOST_OOM)]
    known = [f for f in ended if f.rank is not None and f.exit_code is not None]
    sure = [finding for finding in known if finding.host] or known  # elastic's first line has the local rank
    codes: dict[int, int] = {}
    for finding in sure:
        codes.setdefault(finding.rank or 0, finding.exit_code or 0)
    return codes


def world_of(logs: LogEvidence) -> int:
    """How many ranks there were: said, else as many as are spoken of. 0 when nobody is."""
    seen = {finding.rank for finding in logs.findings if finding.rank is not None} | set(logs.last_lines)
    return max(logs.world_size or 0, max(seen, default=-1) + 1)


def _complaints(logs: LogEvidence) -> dict[int, _Complaint]:
    """The first complaint of each rank, one with a stack before one without."""
    chosen: dict[int, LogFinding] = {}
    for finding in logs.findings:
        if finding.kind is not LogKind.PEER_CLOSED or finding.rank is None:
            continue
        if finding.rank not in chosen or (finding.frames and not chosen[finding.rank].frames):
            chosen[finding.rank] = finding
    return {rank: _Complaint(f, read_frames(f.frames)) for rank, f in chosen.items()}


def where_others_stood(logs: LogEvidence, but: Collection[int] = ()) -> tuple[str, ...]:
    """One line for each call that ranks complained from, the most common first."""
    calls: dict[str, list[int]] = {}
    for rank, complaint in _complaints(logs).items():
        if rank not in but and complaint.finding.frames:
            calls.setdefault(complaint.words, []).append(rank)
    ordered = sorted(calls.items(), key=lambda item: -len(item[1]))
    return tuple(f"{rank_list(ranks)} stood {words}" for words, ranks in ordered[:4])


def cascade_verdict(logs: LogEvidence, root: LogFinding | None) -> Verdict | None:
    """Who failed, where no rank has an error of its own."""
    heard = _complaints(logs)
    codes = exit_codes(logs)
    by_itself = {r: c for r, c in codes.items() if r not in heard and c not in (0, endings.SIGTERM)}
    if root is not None and root.rank in by_itself:
        return _ended_first(root.rank, by_itself[root.rank], logs)
    if by_itself:
        rank = min(by_itself)
        return _ended_first(rank, by_itself[rank], logs)
    if not heard:
        return None
    quiet = set(range(world_of(logs))) - set(heard)
    if len(heard) == 1 and not logs.world_size and not set(codes) - set(heard):
        return _alone(quiet, heard, codes, logs)  # how many others there were is not told
    if quiet and (len(quiet) < len(heard) or len(quiet) == len(heard) == 1):
        return _said_nothing(quiet, heard, codes, logs)
    return _at_odds(heard, logs) or _alone(quiet, heard, codes, logs)


def _ended_first(rank: int | None, code: int, logs: LogEvidence) -> Verdict:
    assert rank is not None
    how = endings.words(code)
    evidence = list(where_others_stood(logs, {rank}))
    if last := logs.last_lines.get(rank):
        evidence.append(f"the last line of rank {rank}: {last[:160]}")
    return Verdict(
        Kind.CRASH,
        culprits_of({rank}, logs, f"it ended first, {how}"),
        0.75,
        f"rank {rank} ended first ({how}), without an error of its own in these logs",
        tuple(evidence),
        fix=endings.fix(code)
        or "a process that ends without a traceback called sys.exit or os._exit: "
        "look for what it printed last, and give it its own log (torchrun --redirects 3 --log-dir DIR)",
    )


def _said_nothing(
    quiet: set[int], heard: Mapping[int, _Complaint], codes: Mapping[int, int], logs: LogEvidence
) -> Verdict:
    """Most ranks complain, a few do not: they had ended, or were elsewhere until the launcher ended them."""
    late = {rank for rank in quiet if rank in codes}
    left = quiet - late if codes else set()
    waited = next(iter(heard.values()))
    evidence = where_others_stood(logs)
    evidence += tuple(
        f"the last line of rank {rank}: {logs.last_lines[rank][:160]}"
        for rank in sorted(quiet)[:4]
        if rank in logs.last_lines
    )
    if left and not any(complaint.timed_out for complaint in heard.values()):
        why = f"it had ended without an error while {rank_list(heard)} stood {waited.words}"
        reason = f"{rank_list(left)} ended early: {rank_list(heard)} lost the connection {waited.words}"
        return Verdict(Kind.DEAD_RANK, culprits_of(left, logs, why), 0.7, reason, evidence, fix=_LEFT_EARLY)
    named = late or quiet
    if any(complaint.timed_out for complaint in heard.values()):
        why = f"it has not come to where {rank_list(heard)} waited"
        reason = f"{rank_list(named)} did not come: {rank_list(heard)} timed out {waited.words}"
        return Verdict(
            Kind.RANK_MISSING, culprits_of(named, logs, why), 0.75, reason, evidence, fix=_CAME_LATE
        )
    why = "the others lost it; it says nothing itself"
    reason = f"{rank_list(heard)} reports a closed connection, {rank_list(named)} says nothing"
    return Verdict(Kind.DEAD_RANK, culprits_of(named, logs, why), 0.6, reason, evidence)


def _at_odds(heard: Mapping[int, _Complaint], logs: LogEvidence) -> Verdict | None:
    """Ranks whose errors come from different calls."""
    told = {rank: complaint for rank, complaint in heard.items() if complaint.finding.frames}
    calls = Counter((complaint.op, complaint.place) for complaint in told.values())
    if len(calls) < 2:
        return None
    usual, count = calls.most_common(1)[0]
    odd = {rank for rank, complaint in told.items() if (complaint.op, complaint.place) != usual}
    other_op = any(told[rank].op != usual[0] for rank in odd)
    kind = Kind.COLLECTIVE_MISMATCH if other_op else Kind.ORDER_MISMATCH
    text = "made another call" if other_op else "made the call from another place"
    if count <= len(odd):
        odd, text = set(told), "were in different calls"
    why = f"it was in another call than the others, which stood in {usual[0]} at {usual[1]}"
    culprits = tuple(
        Culprit(rank, logs.hosts.get(rank, ""), 0, told[rank].place, why if len(odd) < len(told) else text)
        for rank in sorted(odd)
    )
    return Verdict(
        kind,
        culprits,
        0.75 if len(odd) < len(told) else 0.6,
        f"{rank_list(odd)} {text}, and no rank has an error of its own",
        where_others_stood(logs),
        fix=_SAME_CALLS,
    )


def _alone(
    quiet: set[int], heard: Mapping[int, _Complaint], codes: Mapping[int, int], logs: LogEvidence
) -> Verdict | None:
    """All complaints come from one call: of ranks that stayed behind alone, or of all of them."""
    evidence = where_others_stood(logs)
    waited = next(iter(heard.values()))
    if quiet.isdisjoint(codes) and codes and len(heard) < max(2, len(quiet)):
        others = rank_list(quiet) if logs.world_size else "the others"
        why = f"it was still {waited.words} when {others} had ended without an error"
        culprits = tuple(
            Culprit(rank, logs.hosts.get(rank, ""), 0, heard[rank].place, why) for rank in sorted(heard)
        )
        return Verdict(
            Kind.COLLECTIVE_MISMATCH,
            culprits,
            0.6,
            f"{rank_list(heard)} stood alone {waited.words}: more calls than the others make, or of "
            "another size",
            evidence,
            fix=_SAME_CALLS,
        )
    if not quiet and all(complaint.timed_out for complaint in heard.values()):
        reason = f"nobody differs: every rank timed out {waited.words}"
        return Verdict(Kind.NETWORK, (), 0.6, reason, evidence)
    return None


def culprits_of(ranks: Collection[int], logs: LogEvidence, why: str) -> tuple[Culprit, ...]:
    """These ranks, of which the logs tell no line."""
    return tuple(Culprit(rank, logs.hosts.get(rank, ""), 0, "", why) for rank in sorted(ranks))
