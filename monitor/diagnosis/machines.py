"""What GPUs, NCCL's RAS and the kernel's log add to a verdict of stacks, flight recorder and logs."""

from __future__ import annotations

from dataclasses import replace

from ftdash.monitor.diagnosis import gpus
from ftdash.monitor.diagnosis.kernel import killed_pid
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, Sample, Verdict


def with_machines(verdict: Verdict, sample: Sample) -> Verdict:
    """The verdict with that evidence; where nobody differed, a rank that RAS shows behind is the culprit."""
    if verdict.kind in (Kind.HEALTHY, Kind.SLOW):
        return verdict
    kernel = [line for line in sample.kernel if _concerns(line, verdict, sample)]
    said = (*gpus.words(sample.ranks), *(sample.ras.words if sample.ras else ()), *kernel)
    if verdict.kind in (Kind.NETWORK, Kind.NO_EVIDENCE) and (behind := _behind(sample)):
        return Verdict(
            Kind.RANK_MISSING,
            behind,
            0.8,
            "NCCL counts fewer operations of it than of the others",
            (*said, verdict.reason),
            verdict.against,
            verdict.next,
        )
    return replace(verdict, evidence=(*verdict.evidence, *said)) if said else verdict


# Verdicts on a process that is gone: it may be one that the kernel killed before anybody knew its pid.
_SOMEBODY_GONE = frozenset(
    {
        Kind.DEAD_RANK,
        Kind.DATA_LOADER,
        Kind.LOCK,
        Kind.RENDEZVOUS,
        Kind.STORE,
        Kind.CRASH,
        Kind.HOST_OUT_OF_MEMORY,
        Kind.NO_EVIDENCE,
    }
)


def _concerns(line: str, verdict: Verdict, sample: Sample) -> bool:
    """Whether a line of the kernel's log may be of this job: others run on the same machine."""
    pid = killed_pid(line)
    if pid is None or verdict.kind in _SOMEBODY_GONE:
        return True
    return any(pid in (one.pid, *(child.pid for child in one.children)) for one in sample.ranks)


def _behind(sample: Sample) -> tuple[Culprit, ...]:
    """Ranks that RAS shows behind, or cannot reach, known by their process."""
    if sample.ras is None:
        return ()
    pids = {one.pid for one in sample.ras.behind} | {one.pid for one in sample.ras.lost}
    found = [evidence for evidence in sample.ranks if evidence.pid in pids]
    if len(found) > len(sample.ranks) / 2:
        return ()
    why = "it has launched fewer NCCL operations than the others of its communicator"
    return tuple(Culprit(one.rank, one.host, one.pid, "", why) for one in found)
