"""From what the logs say to a verdict: the first failure, apart from the cascade that it caused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ftdash.monitor.diagnosis.errorlines import known_error
from ftdash.monitor.diagnosis.frames import Origin, origin
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, LogEvidence, LogFinding, LogKind, Verdict
from ftdash.monitor.wording import plural

_SIGKILL = -9
_FIRST_KINDS = frozenset({LogKind.EXCEPTION, LogKind.OOM, LogKind.HOST_OOM})
_LOGITS_WORDS = ("logits", "cross_entropy", "loss_function", "lm_head", ".float()")
_FP32_BYTES = 4


def implied_tokens(wanted_bytes: int, vocab_size: int, element_bytes: int = _FP32_BYTES) -> int:
    """Tokens whose logits fill an allocation: bytes / (vocabulary x bytes per element)."""
    return round(wanted_bytes / (vocab_size * element_bytes))


def logits_line(finding: LogFinding, vocab_size: int | None, seq_len: int | None) -> str:
    """What a failed allocation would be as fp32 logits, "" when it cannot be said."""
    if not finding.wanted_bytes or not vocab_size:
        return ""
    tokens = implied_tokens(finding.wanted_bytes, vocab_size)
    told = " ".join((finding.text, *(f"{frame.name} {frame.file}" for frame in finding.frames[:6]))).lower()
    sure = any(word in told for word in _LOGITS_WORDS)
    gib = finding.wanted_bytes / (1 << 30)
    text = f"{gib:.2f} GiB are the fp32 logits of about {tokens / 1000:.1f}k tokens"
    text += f" with a vocabulary of {vocab_size:,}"
    if seq_len:
        text += f", {tokens / seq_len:.1f}x the configured {seq_len:,}"
    return text if sure else f"if these are logits: {text}"


def _sorted(findings: Sequence[LogFinding]) -> list[LogFinding]:
    """By time where all have one, else by position."""
    if all(finding.t for finding in findings):
        return sorted(findings, key=lambda finding: (finding.t, finding.order))
    return sorted(findings, key=lambda finding: finding.order)


def _frame_text(finding: LogFinding) -> str:
    own = next((frame for frame in finding.frames if origin(frame) is Origin.OWN), None)
    shown = own or (finding.frames[0] if finding.frames else None)
    return str(shown) if shown else ""


def _culprit(finding: LogFinding, rank: int, why: str) -> Culprit:
    return Culprit(rank, finding.host, 0, _frame_text(finding), why)


def _cascade(logs: LogEvidence, first: LogFinding) -> tuple[str, ...]:
    later = [finding for finding in logs.findings if finding is not first]
    counts = Counter(str(finding.kind) for finding in later)
    if not counts:
        return ()
    said = ", ".join(f"{count} x {kind}" for kind, count in counts.most_common(4))
    return (f"the rest is the cascade: {said}",)


def log_verdict(logs: LogEvidence) -> Verdict | None:
    """The verdict of the logs alone; None when nothing notable is in them."""
    if not logs.findings:
        return None
    ended = [f for f in logs.findings if f.kind is LogKind.ELASTIC and f.rank is not None]
    root = max(ended, key=lambda finding: bool(finding.host), default=None)
    first = _sorted([finding for finding in logs.findings if finding.kind in _FIRST_KINDS])
    if (root is not None and root.exit_code == _SIGKILL) or any(f.kind is LogKind.HOST_OOM for f in first):
        return _host_oom(logs, first, root)
    if first:
        return _first_failure(logs, first, root)
    addresses = _sorted([finding for finding in logs.findings if finding.kind is LogKind.ADDRESS_IN_USE])
    if addresses:
        lead = addresses[0]
        rank = lead.rank if lead.rank is not None else 0
        why = "its port is taken: EADDRINUSE"
        return Verdict(
            Kind.ADDRESS_IN_USE, (_culprit(lead, rank, why),), 0.9, lead.text, _cascade(logs, lead)
        )
    if verdict := _watchdogs(logs):
        return verdict
    killed = next((f for f in logs.findings if f.kind is LogKind.SIGNAL and f.exit_code == _SIGKILL), None)
    if killed is not None and root is None:
        return _host_oom(logs, [], killed)
    if root is not None and root.rank is not None:
        code = f"exit code {root.exit_code}"
        return Verdict(
            Kind.CRASH,
            (_culprit(root, root.rank, f"it ended first, {code}"),),
            0.7,
            f"rank {root.rank} ended first ({code}); its own error is not in these logs",
            _cascade(logs, root),
        )
    return _waiting(logs)


def _waiting(logs: LogEvidence) -> Verdict | None:
    joined = {finding.rank for finding in logs.findings if finding.kind is LogKind.STORE}
    if joined and logs.world_size:
        missing = sorted(set(range(logs.world_size)) - joined)
        culprits = tuple(Culprit(rank, "", 0, "", "it has not joined") for rank in missing)
        return Verdict(Kind.RENDEZVOUS, culprits, 0.7, f"the start waits: {logs.waiting_for}")
    if any(finding.kind is LogKind.RENDEZVOUS for finding in logs.findings):
        text = next(finding.text for finding in logs.findings if finding.kind is LogKind.RENDEZVOUS)
        return Verdict(Kind.RENDEZVOUS, (), 0.6, text)
    peers = [
        finding
        for finding in logs.findings
        if finding.kind is LogKind.PEER_CLOSED and finding.rank is not None
    ]
    if peers and logs.world_size:
        quiet = set(range(logs.world_size)) - {finding.rank for finding in peers}
        if quiet and len(quiet) <= logs.world_size / 2:
            culprits = tuple(
                Culprit(r, "", 0, "", "the others lost it; it says nothing itself") for r in sorted(quiet)
            )
            return Verdict(Kind.DEAD_RANK, culprits, 0.6, "the others report a closed connection")
    return None


def _host_oom(logs: LogEvidence, first: Sequence[LogFinding], root: LogFinding | None) -> Verdict:
    lead = next((finding for finding in first if finding.kind is LogKind.HOST_OOM), None) or root
    assert lead is not None
    said = lead.rank if lead.rank is not None else (root.rank if root else None)
    why = "killed (SIGKILL): the host ran out of memory, not the GPU"
    culprits = (_culprit(lead, said, why),) if said is not None else ()
    evidence = [lead.text, *_cascade(logs, lead)]
    if logs.loading:
        evidence.append("it was loading the model: every local rank holds a copy in host memory")
    sure = any(finding.kind is LogKind.HOST_OOM for finding in first)
    against = () if sure else ("SIGKILL can also come from a person or the scheduler: look into dmesg",)
    confidence = 0.9 if sure else 0.7 if logs.loading or lead.kind is LogKind.ELASTIC else 0.6
    return Verdict(Kind.HOST_OUT_OF_MEMORY, culprits, confidence, why, tuple(evidence), against)


def _first_failure(logs: LogEvidence, first: Sequence[LogFinding], root: LogFinding | None) -> Verdict:
    lead = first[0]
    if root is not None and root.rank is not None and not all(finding.t for finding in first):
        lead = next((finding for finding in first if finding.rank == root.rank), lead)
    same = [f for f in first if f.text == lead.text and f.rank is not None and f.kind is lead.kind]
    rank = lead.rank
    if rank is None and root is not None:
        rank = root.rank
    evidence = [f"{lead.path}:{lead.line}: {lead.text[:300]}" if lead.path else lead.text[:300]]
    if len({finding.rank for finding in same}) > 1:
        ranks = sorted({finding.rank for finding in same if finding.rank is not None})
        evidence.append(f"the same error on ranks {', '.join(map(str, ranks))}; rank {rank} was first")
    if lead.kind is LogKind.OOM:
        kind, why = Kind.OUT_OF_MEMORY, "it ran out of GPU memory"
        if line := logits_line(lead, logs.vocab_size, logs.seq_len):
            evidence.append(line)
        elif lead.wanted_bytes:
            evidence.append(f"the failed allocation was {lead.wanted_bytes / (1 << 30):.2f} GiB")
    else:
        kind, why = Kind.CRASH, f"it raised first: {lead.text[:160]}"
    known = known_error(lead.text)
    if known is not None:
        evidence.append(f"known: {known.cause} ({known.source})")
    evidence += _cascade(logs, lead)
    culprits = (_culprit(lead, rank, why),) if rank is not None else ()
    timed = all(finding.t for finding in first) or root is not None
    reason = f"rank {rank} failed first: {lead.text[:200]}" if rank is not None else lead.text[:200]
    confidence = 0.9 if timed or len(first) == 1 else 0.75
    fix = known.fix if known is not None else ""
    return Verdict(kind, culprits, confidence, reason, tuple(evidence), fix=fix)


def _watchdogs(logs: LogEvidence) -> Verdict | None:
    """Collective timeouts: the rank that is behind, calls something else, or says nothing."""
    enqueued = {
        f.rank: f.seq for f in logs.findings if f.op == "last enqueued" and f.rank is not None and f.seq
    }
    timeouts = {
        f.rank: f
        for f in logs.findings
        if f.kind is LogKind.WATCHDOG and f.op != "last enqueued" and f.rank is not None
    }
    if not timeouts and not enqueued:
        return None
    world = logs.world_size or (max([*timeouts, *enqueued]) + 1)
    reason = "a collective timed out"
    sample = next(iter(timeouts.values()), None)
    if sample:
        reason = (
            f"{sample.op} at sequence {sample.seq} timed out after {(sample.timeout_ms or 0) / 1000:.0f} s"
        )
    culprits: set[int] = set()
    kind, why = Kind.RANK_MISSING, "it has not made the call that the others wait in"
    if len(set(enqueued.values())) > 1:
        top = max(value for value in enqueued.values() if value is not None)
        culprits = {rank for rank, seq in enqueued.items() if seq is not None and seq < top}
    if not culprits and timeouts:
        calls = {rank: (finding.seq, finding.op, finding.numel) for rank, finding in timeouts.items()}
        usual, count = Counter(calls.values()).most_common(1)[0]
        odd = {rank for rank, call in calls.items() if call != usual}
        quiet = set(range(world)) - set(timeouts)
        if odd and count > len(odd):
            culprits = odd
            differing = [calls[rank] for rank in odd]
            if all(call[0] == usual[0] and call[1] != usual[1] for call in differing):
                kind, why = Kind.COLLECTIVE_MISMATCH, "it makes another call than the others"
            elif all(call[:2] == usual[:2] for call in differing):
                kind, why = Kind.SIZE_MISMATCH, "it makes the call with another size"
        elif quiet and len(quiet) < len(timeouts):
            culprits, why = quiet, "the others timed out waiting; it says nothing"
    if not culprits:
        kind = Kind.NETWORK
        reason += ": every rank reports the same call, nobody differs"
    named = tuple(Culprit(rank, logs.hosts.get(rank, ""), 0, "", why) for rank in sorted(culprits))
    return Verdict(
        kind,
        named,
        0.7 if culprits else 0.6,
        reason,
        (f"the timeout is reported by {plural(len(timeouts), 'rank')}",),
    )


def log_evidence_for(logs: LogEvidence, chosen: Verdict) -> tuple[str, ...]:
    """Lines of the logs that bear on a verdict from other evidence: errors of its culprits, timeouts."""
    named = {culprit.rank for culprit in chosen.culprits}
    lines = []
    for finding in logs.findings:
        if finding.rank in named and finding.kind in (*_FIRST_KINDS, LogKind.ADDRESS_IN_USE):
            lines.append(f"log of rank {finding.rank}: {finding.text[:200]}")
        elif finding.kind is LogKind.WATCHDOG and finding.op != "last enqueued" and len(lines) < 3:
            lines.append(f"watchdog of rank {finding.rank}: {finding.op} at sequence {finding.seq}")
    return tuple(dict.fromkeys(lines))[:5]
