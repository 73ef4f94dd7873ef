"""From what the logs say to a verdict: the first failure, apart from the cascade that it caused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ftdash.monitor.diagnosis import endings
from ftdash.monitor.diagnosis.cascade import cascade_verdict, where_others_stood, world_of
from ftdash.monitor.diagnosis.errorlines import KnownError, known_error
from ftdash.monitor.diagnosis.frames import Origin, origin
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.loglines import NO_HOST_MEMORY, NODE_FAILED
from ftdash.monitor.diagnosis.mismatches import mismatch_verdict
from ftdash.monitor.diagnosis.model import Culprit, Frame, LogEvidence, LogFinding, LogKind, Verdict
from ftdash.monitor.diagnosis.oomtext import out_of_memory_fix
from ftdash.monitor.diagnosis.raised import known_exception
from ftdash.monitor.diagnosis.watchdogs import watchdog_verdict
from ftdash.monitor.wording import plural, rank_list

_FIRST_KINDS = frozenset({LogKind.EXCEPTION, LogKind.OOM, LogKind.HOST_OOM})
_LOGITS_WORDS = ("logits", "cross_entropy", "loss_function", "lm_head", ".float()")
_FP32_BYTES = 4
_BESIDE_LINES = 100
_WENT_ON_LINES = 10  # of progress after an exception: it was caught, and did not end its rank
_WENT_ON_EACH = 4  # the same, for each rank that may have written them
_COMMAND = re.compile(r"/bin/[\w\-]+$")  # an installed command: torchrun, accelerate
_OF_LAUNCHER = re.compile(r"ChildFailedError|SignalException|CalledProcessError")
_MARKS = re.compile(
    r"^(?:\[[EWIF]\d* ?[\d: .]*[\w.]+:\d+\] ?|\[(?:PG[^\]]*)?\s?Rank \d+\] ?"
    r"|(?:NCCL |Process group )?watchdog thread terminated with exception: )+",
    re.I,
)
_VARIES = re.compile(r"0x[0-9a-f]+|\d+", re.I)


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


def _of_kind(logs: LogEvidence, *kinds: LogKind) -> list[LogFinding]:
    return _sorted([finding for finding in logs.findings if finding.kind in kinds])


def _culprit(finding: LogFinding, rank: int, why: str, logs: LogEvidence) -> Culprit:
    """A rank at its own line: that of its error, else of a traceback that it printed beside it."""
    others = (
        f.frames for f in logs.findings if f.rank == rank and f.frames and not _OF_LAUNCHER.search(f.text)
    )
    with_own = (frames for frames in (finding.frames, *others) if _own_line(frames))
    shown = _own_line(next(with_own, [])) or next(iter(finding.frames), None)
    return Culprit(rank, logs.hosts.get(rank, "") or finding.host, 0, str(shown or ""), why)


def _own_line(frames: Sequence[Frame]) -> Frame | None:
    own = (frame for frame in frames if origin(frame) is Origin.OWN)
    return next((frame for frame in own if not _COMMAND.search(frame.file)), None)


def _plain(text: str) -> str:
    """An error without the marks that torch puts before it: time, source file, group and rank."""
    return _MARKS.sub("", text).strip() or text


def _cascade(logs: LogEvidence, first: LogFinding) -> tuple[str, ...]:
    later = [finding for finding in logs.findings if finding is not first]
    counts = Counter(str(finding.kind) for finding in later)
    if not counts:
        return ()
    said = ", ".join(f"{count} x {kind}" for kind, count in counts.most_common(4))
    return (f"the rest is the cascade: {said}",)


def _ended(logs: LogEvidence) -> LogFinding | None:
    """The process that the launchers saw end first."""
    ended = [f for f in logs.findings if f.kind is LogKind.ELASTIC and f.rank is not None]
    placed = [finding for finding in ended if finding.host]
    return next(iter(_sorted(placed or ended)), None)


def _last_failures(logs: LogEvidence, world: int) -> list[LogFinding]:
    """Errors of the first kinds in their order, without those after which the job trained on."""
    many = max(_WENT_ON_LINES, _WENT_ON_EACH * world)
    first = _of_kind(logs, *_FIRST_KINDS)
    return [finding for finding in first if logs.trained.get(finding.path, 0) - finding.trained < many]


def log_verdict(logs: LogEvidence) -> Verdict | None:
    """The verdict of the logs alone; None when nothing notable is in them."""
    if not logs.findings:
        return None
    world = world_of(logs)
    root = _ended(logs)
    first = _last_failures(logs, world)
    if verdict := _memory_of_the_host(logs, first, root):
        return verdict
    differing = _of_kind(logs, LogKind.MISMATCH, LogKind.MISSED_BARRIER)
    if first and not (differing and differing[0].order < first[0].order):
        return _first_failure(logs, first, root)
    if addresses := _of_kind(logs, LogKind.ADDRESS_IN_USE):
        lead = addresses[0]
        rank = lead.rank if lead.rank is not None else 0
        culprit = _culprit(lead, rank, "its port is taken: EADDRINUSE", logs)
        return Verdict(Kind.ADDRESS_IN_USE, (culprit,), 0.9, lead.text, _cascade(logs, lead))
    return (
        mismatch_verdict(logs)
        or watchdog_verdict(logs, world)
        or _start_waits(logs)
        or _from_outside(logs, root)
        or cascade_verdict(logs, root)
        or _transport(logs)
        or _of_the_launcher(logs, root)
    )


def _memory_of_the_host(
    logs: LogEvidence, first: Sequence[LogFinding], root: LogFinding | None
) -> Verdict | None:
    """Somebody was killed, or could not get memory of the host; SIGKILL alone is only a hint."""
    short = [finding for finding in first if finding.kind is LogKind.HOST_OOM]
    told = min(short, key=lambda f: (f.rank is None, not f.host), default=None)
    killed = root if root is not None and root.exit_code == endings.SIGKILL else None
    if root is None:
        signals = (f for f in logs.findings if f.kind is LogKind.SIGNAL and f.exit_code == endings.SIGKILL)
        killed = next(signals, None) if not first else None
    lead = told or killed
    if lead is None or (told is None and _of_kind(logs, LogKind.ON_REQUEST)):
        return None
    rank = lead.rank
    if rank is None and root is not None and (root.exit_code == endings.SIGKILL or len(first) == len(short)):
        rank = root.rank if root.exit_code != endings.SIGTERM else None
    if told is not None and NO_HOST_MEMORY.search(told.text):
        why = "it could not get host memory (RAM); this is not the GPU's"
    elif told is not None:
        why = "killed (SIGKILL): the host ran out of memory, not the GPU"
    else:
        why = "killed (SIGKILL), most often by the kernel because the host ran out of memory"
    culprits = (_culprit(lead, rank, why, logs),) if rank is not None else ()
    if rank is None and lead.host:
        why += f", on {lead.host}"
    evidence = [lead.text or endings.words(lead.exit_code)]
    if logs.loading:
        evidence.append("it was loading the model: every local rank holds a copy in host memory")
    evidence += [*where_others_stood(logs, {rank} if rank is not None else ()), *_cascade(logs, lead)]
    against = () if told else ("SIGKILL can also come from a person or the scheduler: look into dmesg",)
    confidence = 0.9 if told else 0.7 if logs.loading or lead.kind is LogKind.ELASTIC else 0.6
    look = (
        ()
        if told
        else ("dmesg -T | grep -iE 'oom|killed process'; sacct -j JOB -o State,MaxRSS under Slurm",)
    )
    return Verdict(Kind.HOST_OUT_OF_MEMORY, culprits, confidence, why, tuple(evidence), against, look)


def _first_failure(logs: LogEvidence, first: Sequence[LogFinding], root: LogFinding | None) -> Verdict:
    lead = first[0]
    if root is not None and root.rank is not None and not all(finding.t for finding in first):
        lead = next((finding for finding in first if finding.rank == root.rank), lead)
    if lead.rank is None and lead.kind is LogKind.EXCEPTION:
        # Of a thread or a helper: a rank that ended says so itself.
        lead = next((finding for finding in first if finding.rank is not None and finding.frames), lead)
    alike = _VARIES.sub("", lead.text)
    same = {f.rank for f in first if f.rank is not None and f.kind is lead.kind} & {
        f.rank for f in first if _VARIES.sub("", f.text) == alike
    }
    rank = lead.rank
    if rank is None and root is not None and lead.copies == 1:
        rank = root.rank
    evidence = [f"{lead.path}:{lead.line}: {lead.text[:300]}" if lead.path else lead.text[:300]]
    if rank is None and (raised_at := _own_line(lead.frames)):
        evidence.append(f"raised at {raised_at}")
    everybody = len(same) > 1 and len(same) >= world_of(logs)
    if len(same) > 1:
        first_was = "" if everybody else f"; rank {rank} was first"
        evidence.append(f"the same error on {rank_list(same)}{first_was}")
    if lead.copies > 1:
        evidence.append(f"{lead.copies} processes raised it at once: the same error on several ranks")
    if lead.kind is LogKind.OOM:
        kind, why = Kind.OUT_OF_MEMORY, "it ran out of GPU memory"
        if line := logits_line(lead, logs.vocab_size, logs.seq_len):
            evidence.append(line)
        elif lead.wanted_bytes:
            evidence.append(f"the failed allocation was {lead.wanted_bytes / (1 << 30):.2f} GiB")
    else:
        kind, why = Kind.CRASH, f"it raised first: {_plain(lead.text)[:160]}"
    known = _known(lead, first)
    if known is not None:
        evidence.append(f"known: {known.cause} ({known.source})")
    evidence += [*where_others_stood(logs, same | {rank or 0}), *_cascade(logs, lead)]
    named = sorted(same) if everybody else [rank] if rank is not None else []
    if everybody:
        why = why.replace("it raised first", "it raised what all ranks did")
    culprits = tuple(_culprit(lead, one, why, logs) for one in named)
    timed = all(finding.t for finding in first) or root is not None
    said = _plain(lead.text)[:200]
    reason = f"rank {rank} failed first: {said}" if rank is not None else said
    if everybody:
        reason = f"every rank failed alike: {said}"
    confidence = 0.9 if timed or len(first) == 1 or everybody else 0.75
    if known is not None:
        fix = known.fix
    elif lead.kind is LogKind.OOM:
        fix = out_of_memory_fix(lead.frames)
    elif not named:
        fix = ""
    else:
        whose = "any rank's" if everybody else f"rank {rank}'s"
        fix = f"reproduce it in one process with {whose} arguments and data; the other errors go away with it"
    return Verdict(kind, culprits, confidence, reason, tuple(evidence), fix=fix)


def _known(lead: LogFinding, first: Sequence[LogFinding]) -> KnownError | None:
    """What is known of an error, or of what was said of the same rank right beside it."""
    beside = (
        known
        for other in first
        if other.rank in (lead.rank, None) and abs(other.order - lead.order) < _BESIDE_LINES
        if (known := known_error(other.text))
    )
    return known_error(lead.text) or next(beside, None) or known_exception(lead.text)


def _start_waits(logs: LogEvidence) -> Verdict | None:
    """The job has not begun: somebody has not joined, or the store's address does not answer."""
    joined = {finding.rank for finding in logs.findings if finding.kind is LogKind.STORE}
    if joined and logs.world_size:
        missing = sorted(set(range(logs.world_size)) - joined)
        culprits = tuple(Culprit(rank, "", 0, "", "it has not joined") for rank in missing)
        return Verdict(Kind.RENDEZVOUS, culprits, 0.7, f"the start waits: {logs.waiting_for}")
    met = _of_kind(logs, LogKind.RENDEZVOUS)
    if not met or logs.trained:
        return None
    if verdict := _not_all_joined(met, logs):
        return verdict
    lead = met[-1]
    address = next((m for finding in met if (m := _ADDRESS.search(finding.text))), None)
    reason = f"no rank started: nobody answers at {address[1]}:{address[2]}" if address else lead.text[:200]
    fix = (
        "start the node that hosts the rendezvous (node 0, or MASTER_ADDR) first, and look that name, port "
        "and firewall let the others reach it; --rdzv-endpoint and --rdzv-id must be alike on all nodes"
    )
    return Verdict(
        Kind.RENDEZVOUS, (), 0.8 if address else 0.6, reason, tuple(f.text[:200] for f in met[:2]), fix=fix
    )


def _not_all_joined(met: Sequence[LogFinding], logs: LogEvidence) -> Verdict | None:
    """The store's owner counted who came."""
    for finding in met:
        if count := _JOINED.search(finding.text):
            missing = int(count[2]) - int(count[1])
            owner = f"{finding.rank}" if finding.rank is not None else "0"
            reason = f"{plural(missing, 'rank')} of {count[2]} never joined the store that rank {owner} keeps"
            where = _own_line(finding.frames)
            evidence = (finding.text[:300], *([f"rank {owner} waited at {where}"] if where else []))
            fix = (
                "look in the logs of the other ranks: not started, ended before (an import, a "
                "model that is not there), or another MASTER_ADDR, MASTER_PORT or WORLD_SIZE"
            )
            return Verdict(Kind.RENDEZVOUS, (), 0.85, reason, evidence, fix=fix)
    return None


_JOINED = re.compile(r"(\d+)/(\d+) clients joined")
_ADDRESS = re.compile(r"connect to (?:any network address of )?\(?\[?([\w.\-:]+?)\]?(?:, |:)(\d+)")
_ASK_WHO = (
    "ask who ended it: the scheduler (sacct -j JOB -o State: TIMEOUT, PREEMPTED, CANCELLED), a person, the "
    "end of a login session; then resume from the last checkpoint"
)
_SLURM_ENDS = re.compile(r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAIL\w*|JOB REQUEUE)", re.I)


def _from_outside(logs: LogEvidence, root: LogFinding | None) -> Verdict | None:
    """A request, a signal to the launcher, or Slurm's end of the job, before which nobody had failed."""
    asked, ends = _of_kind(logs, LogKind.ON_REQUEST), _of_kind(logs, LogKind.FROM_OUTSIDE)
    late = any("imed out" in f.text or "timeout" in f.text for f in _of_kind(logs, LogKind.PEER_CLOSED))
    by_itself = root is not None and root.exit_code not in (None, 0, endings.SIGTERM, endings.SIGKILL, -2)
    if not (asked or ends) or late or by_itself:
        return None
    if asked:
        return Verdict(Kind.FROM_OUTSIDE, (), 0.9, f"{asked[0].text or 'stopped'}; no rank had failed before")
    told = next((finding for finding in ends if _SLURM_ENDS.search(finding.text)), ends[0])
    known = known_error(told.text)
    evidence = [told.text[:300]]
    fix = known.fix if known else _ASK_WHO
    failed = next((match for f in ends if (match := NODE_FAILED.search(f.text))), None)
    if known is not None:
        reason = known.cause
        evidence.append(f"known: {known.cause} ({known.source})")
    if failed is not None:
        node = failed["host"] or failed["node"]
        reason = f"node {node} failed, and Slurm ended the job"
        fix = (
            f"sbatch --exclude={node} --requeue and resume from the last checkpoint; `sinfo -R` and the "
            f"kernel's log of {node} tell why it failed"
        )
    elif known is None and "KeyboardInterrupt" in told.text:
        reason = "the job was interrupted (Ctrl-C, SIGINT); no rank had failed before"
    elif known is None:
        reason = "the launcher was told to end by a signal from outside; no rank had failed before"
    return Verdict(Kind.FROM_OUTSIDE, (), 0.8, reason, tuple(evidence), fix=fix)


def _transport(logs: LogEvidence) -> Verdict | None:
    """NCCL could not reach a peer over the network."""
    met = _of_kind(logs, LogKind.TRANSPORT)
    if not met:
        return None
    ranks = {finding.rank for finding in met if finding.rank is not None}
    who = f" by {rank_list(ranks)}" if ranks else ""
    reason = f"NCCL's network layer failed, reported{who}: {met[0].text[:160]}"
    return Verdict(Kind.NETWORK, (), 0.7, reason, tuple(finding.text[:200] for finding in met[:3]))


def _of_the_launcher(logs: LogEvidence, root: LogFinding | None) -> Verdict | None:
    if root is None or root.rank is None:
        return _unexplained(logs)
    how = endings.words(root.exit_code)
    culprit = _culprit(root, root.rank, f"it ended first, {how}", logs)
    reason = f"rank {root.rank} ended first ({how}); its own error is not in these logs"
    evidence = (*where_others_stood(logs), *_cascade(logs, root))
    return Verdict(Kind.CRASH, (culprit,), 0.6, reason, evidence, fix=endings.fix(root.exit_code))


def _unexplained(logs: LogEvidence) -> Verdict | None:
    """Errors, none of which says who failed: the first one is better told than nothing."""
    raised = [f for f in _of_kind(logs, *_FIRST_KINDS, LogKind.PEER_CLOSED) if f.frames]
    if not raised:
        return None
    lead = raised[0]
    who = f"rank {lead.rank}" if lead.rank is not None else "a process"
    where = _own_line(lead.frames)
    evidence = (lead.text[:300], *([f"{who} stood at {where}"] if where else []))
    against = ("who failed is not in these logs: look for those of the other ranks and of the launcher",)
    return Verdict(Kind.CRASH, (), 0.4, f"{who} reported first: {_plain(lead.text)[:200]}", evidence, against)


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
