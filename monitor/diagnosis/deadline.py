"""How long a collective may take in this job, who says so, and how much of that time is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.model import FlightDump, Sample
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.wording import duration

# torch.distributed.constants: default_pg_nccl_timeout and default_pg_timeout.
_DEFAULTS_S = {"nccl": 600.0, "gloo": 1800.0}
_FLAG = re.compile(r"--ddp[-_]timeout[= ](\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class CollectiveTimeout:
    """`seconds` is 0 when nothing says it; `source` is who says it."""

    seconds: float = 0.0
    source: str = ""

    def words(self) -> str:
        if not self.seconds:
            return ""
        return f"collectives time out after {self.seconds:.0f} s ({self.source})"


def known_timeout(run: RunDir | None, pids: Sequence[int] = ()) -> CollectiveTimeout:
    """The timeout of the default process group: of the hook, a rank's own flag, or torch's default."""
    metas = []
    if run is not None:
        from ftdash.monitor.diagnosis.rundata import rank_metas

        metas = list(rank_metas(run).values())
    if told := [meta.collective_timeout_s for meta in metas if meta.collective_timeout_s > 0]:
        return CollectiveTimeout(min(told), "the process group says so")
    for pid in pids[:1]:
        if match := _FLAG.search(" ".join(procfs.command_line(pid))):
            return CollectiveTimeout(float(match[1]), "--ddp_timeout")
        minutes = procfs.environment(pid).get("DEEPSPEED_TIMEOUT", "")
        if minutes.isdigit() and int(minutes) > 0:
            return CollectiveTimeout(60.0 * int(minutes), "DEEPSPEED_TIMEOUT")
    for meta in metas:
        for backend, seconds in _DEFAULTS_S.items():
            if backend in meta.backend:
                return CollectiveTimeout(seconds, f"assumed: the default of {backend}")
    return CollectiveTimeout()


def flight_timeout(dumps: Sequence[FlightDump]) -> CollectiveTimeout:
    """The timeout of the newest unfinished call that the flight recorder holds."""
    for dump in dumps:
        for entry in reversed(dump.entries):
            if entry.timeout_ms > 0 and not entry.retired and entry.state != "completed":
                return CollectiveTimeout(entry.timeout_ms / 1000, "the flight recorder says so")
    return CollectiveTimeout()


def time_left(sample: Sample, waiting: Sequence[int]) -> str:
    """The sentence on what is left for the ranks that wait, "" when timeout or heartbeats are not known.

    A rank's call began after its last beat, so this is the least that may be left.
    """
    limit = flight_timeout(sample.flight)
    if not limit.seconds:
        limit = CollectiveTimeout(sample.timeout_s, sample.timeout_source)
    since = [e.beat.t for e in sample.ranks if e.beat is not None and e.beat.t > 0 and e.rank in set(waiting)]
    if not limit.seconds or not since or not sample.t:
        return ""
    quiet_s = max(0.0, sample.t - min(since))
    left_s = limit.seconds - quiet_s
    if left_s <= 0:
        return f"the timeout of collectives, {duration(limit.seconds)} ({limit.source}), is over"
    left, whole, quiet = map(duration, (left_s, limit.seconds, quiet_s))
    return (
        f"{left} left of the {whole} that a collective may take ({limit.source}): "
        f"the waiting ranks made their last sign {quiet} ago"
    )
