"""Evidence that an agent took by itself when a run stopped moving, and what of it holds later.

stacks/watch-<time>-<host>/first/rank-<R>.json
stacks/watch-<time>-<host>/second/rank-<R>.json   some seconds later
stacks/watch-<time>-<host>/flight.json            flight recorders, where ranks have a worker server
stacks/watch-<time>-<host>/incident.json          what the agent knew; `over` once the run moved again
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis import live, weigh
from ftdash.monitor.diagnosis.collect import dump_ranks, save_ranks
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import (
    FlightDump,
    RankEvidence,
    Sample,
    Verdict,
    decode_rank,
)
from ftdash.monitor.diagnosis.pace import add_pace, last_beat
from ftdash.monitor.diagnosis.ras import RasReport
from ftdash.monitor.rundir import RunDir, decode_json, safe_name, write_atomic

AT_WORK = frozenset({Kind.SLOW, Kind.HEALTHY})
_PREFIX = "watch-"
_NOTE = "incident.json"
_FLIGHT = "flight.json"
_LOOKS = ("first", "second")
_TOGETHER_S = 180.0  # the agents of all nodes notice one hang within this time
_MAX_DUMP_BYTES = 32 << 20
_WORTH_KEEPING = 5  # incidents; the oldest go


class Incident(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What one node's agent knew when it took evidence. Times are UTC seconds."""

    t: float
    host: str
    quiet_s: float = 0.0  # how long no rank of the node had made progress
    timeout_s: float = 0.0  # of collectives, 0 when not known
    kind: str = ""
    reason: str = ""
    over: bool = False  # the run moved again
    log_bytes: dict[str, int] = {}  # size of each log then: what came later is the cascade
    ras: RasReport | None = None
    kernel: tuple[str, ...] = ()

    @property
    def working(self) -> bool:
        """Somebody was at work: slow, not stuck."""
        return self.kind in AT_WORK


@dataclass(frozen=True, slots=True)
class Kept:
    """The evidence of one hang, joined over the nodes that took some."""

    incident: Incident
    samples: tuple[Sample, ...]


def take(
    run: RunDir,
    ranks: Sequence[tuple[int, int]],
    *,
    host: str,
    quiet_s: float,
    timeout_s: float,
    interval_s: float = live.CONFIRM_INTERVAL_S,
) -> tuple[Path, Verdict]:
    """Two looks at this node's (rank, pid), written into a new folder, and what they say alone.

    Raises OSError when the run directory cannot be written.
    """
    started = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    folder = run.stacks / f"{_PREFIX}{stamp}-{safe_name(host)}"
    samples = []
    for number, name in enumerate(_LOOKS):
        before = time.monotonic()
        found = dump_ranks(ranks)
        for evidence in found:
            evidence.beat = last_beat(run.telemetry, evidence.rank)
        if number:
            add_pace(run.telemetry, found)
        (folder / name).mkdir(mode=0o700, parents=True)
        save_ranks(folder / name, found)
        samples.append(Sample(t=time.time(), ranks=tuple(found), expected=frozenset(r for r, _ in ranks)))
        if number == 0:
            time.sleep(max(0.0, before + interval_s - time.monotonic()))
    samples[-1] = last = live.add_rest(samples[-1])
    if last.flight:
        write_atomic(folder / _FLIGHT, msgspec.json.encode(last.flight))
    verdict = weigh.diagnose(samples).verdict
    _write(
        folder,
        Incident(
            t=started,
            host=host,
            quiet_s=quiet_s,
            timeout_s=timeout_s,
            kind=str(verdict.kind),
            reason=verdict.reason,
            log_bytes=_log_sizes(run),
            ras=last.ras,
            kernel=last.kernel,
        ),
    )
    return folder, verdict


def drop(folder: Path) -> None:
    """Evidence of a run that was at work after all."""
    shutil.rmtree(folder, ignore_errors=True)


def mark_over(folder: Path) -> None:
    """The run moved again: what was seen explains nothing that comes later. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        incident = decode_json((folder / _NOTE).read_bytes(), Incident)
        incident.over = True
        _write(folder, incident)


def forget_old(run: RunDir) -> None:
    """Keep the newest few incidents of a long run."""
    for folder in _folders(run)[:-_WORTH_KEEPING]:
        drop(folder)


def _write(folder: Path, incident: Incident) -> None:
    write_atomic(folder / _NOTE, msgspec.json.encode(incident))


def _folders(run: RunDir) -> list[Path]:
    return sorted(run.stacks.glob(f"{_PREFIX}*")) if run.stacks.is_dir() else []


def _log_sizes(run: RunDir) -> dict[str, int]:
    sizes = {}
    for path in run.logs.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                sizes[str(path.relative_to(run.logs))] = path.stat().st_size
    return sizes


def incidents(run: RunDir, since: float = 0.0) -> list[tuple[Path, Incident]]:
    """Incidents that nothing came after, oldest first; broken folders are left out."""
    found = []
    for folder in _folders(run):
        try:
            incident = decode_json((folder / _NOTE).read_bytes(), Incident)
        except (OSError, msgspec.DecodeError):
            continue
        if not incident.over and incident.t >= since:
            found.append((folder, incident))
    return sorted(found, key=lambda item: item[1].t)


def read_dump_folder(folder: Path) -> dict[int, RankEvidence]:
    """The ranks' evidence in one folder below stacks/; broken and oversized files are left out."""
    found = {}
    for path in folder.glob("rank-*.json"):
        try:
            if path.stat().st_size <= _MAX_DUMP_BYTES:
                evidence = decode_rank(path.read_bytes())
                found[evidence.rank] = evidence
        except (OSError, msgspec.DecodeError):
            continue
    return found


def kept(run: RunDir, since: float = 0.0) -> Kept | None:
    """The last hang's evidence since `since` (UTC seconds), of all nodes; None when none was kept."""
    found = incidents(run, since)
    if not found:
        return None
    last = found[-1][1]
    together = [(folder, item) for folder, item in found if last.t - item.t <= _TOGETHER_S]
    samples = [_joined(folder / name for folder, _ in together) for name in _LOOKS]
    samples = [sample for sample in samples if sample.ranks]
    lead = next((item for _, item in together if not item.working), last)
    if samples:
        samples[-1] = replace(
            samples[-1],
            flight=tuple(dump for folder, _ in together for dump in _flight(folder)),
            ras=next((item.ras for _, item in together if item.ras), None),
            kernel=tuple(dict.fromkeys(line for _, item in together for line in item.kernel)),
        )
    return Kept(lead, tuple(samples))


def _flight(folder: Path) -> list[FlightDump]:
    path = folder / _FLIGHT
    try:
        if path.stat().st_size > _MAX_DUMP_BYTES:
            return []
        return decode_json(path.read_bytes(), list[FlightDump])
    except (OSError, msgspec.DecodeError):
        return []


def _joined(folders: Iterable[Path]) -> Sample:
    ranks: dict[int, RankEvidence] = {}
    for folder in folders:
        ranks.update(read_dump_folder(folder))
    ordered = tuple(ranks[rank] for rank in sorted(ranks))
    return Sample(
        t=max((evidence.t for evidence in ordered), default=0.0), ranks=ordered, expected=frozenset(ranks)
    )
