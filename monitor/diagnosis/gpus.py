"""How busy each rank's GPU is and what it draws: together they tell a spinning wait from work.

A kernel of NCCL that waits shows 100 % utilisation at little power; a rank whose GPU is idle has launched no
kernel at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis.model import RankEvidence
from ftdash.monitor.diagnosis.words import rank_list
from ftdash.monitor.records import GpuSample, RankSample, decoder
from ftdash.monitor.rundir import RunDir

_TAIL_BYTES = 256 << 10
SPINNING_UTIL, IDLE_UTIL = 90, 10  # percent
LITTLE_POWER = 0.4  # of the limit: field reports of waiting jobs name 85 to 120 W of 400 and more


def join(run: RunDir, ranks: Sequence[RankEvidence]) -> None:
    """Give each rank the newest utilisation and power that its node's agent has written."""
    for path in run.telemetry.glob("node-*.jsonl"):
        gpus, uuids = _newest(path)
        for evidence in ranks:
            gpu = gpus.get(uuids.get((evidence.rank, evidence.pid), ""))
            if gpu is not None:
                evidence.gpu_util, evidence.gpu_power_w = gpu.util, gpu.power_w
                evidence.gpu_power_limit_w = gpu.power_limit_w


def _newest(path: Path) -> tuple[dict[str, GpuSample], dict[tuple[int, int], str]]:
    """GPUs by UUID, and the UUID of each (rank, pid), of the end of a node's telemetry."""
    gpus: dict[str, GpuSample] = {}
    uuids: dict[tuple[int, int], str] = {}
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
            lines = handle.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return gpus, uuids
    for line in lines:
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, GpuSample) and record.uuid:
            gpus[record.uuid] = record
        elif isinstance(record, RankSample) and record.gpu_uuid:
            uuids[record.rank, record.pid] = record.gpu_uuid
    return gpus, uuids


def words(ranks: Sequence[RankEvidence]) -> tuple[str, ...]:
    """Sentences on GPUs that spin in a wait, and on those that are idle meanwhile."""
    known = [evidence for evidence in ranks if evidence.gpu_util is not None]
    spinning = [evidence for evidence in known if _spins(evidence)]
    idle = [evidence for evidence in known if (evidence.gpu_util or 0) <= IDLE_UTIL]
    said = []
    if spinning:
        watts = [evidence.gpu_power_w for evidence in spinning if evidence.gpu_power_w is not None]
        said.append(
            f"GPU of rank {rank_list(e.rank for e in spinning)}: busy at {min(watts):.0f} to "
            f"{max(watts):.0f} W, a kernel that waits, as NCCL's do"
        )
    if idle and len(idle) < len(known):
        said.append(f"GPU of rank {rank_list(e.rank for e in idle)} is idle: it is in no kernel")
    return tuple(said)


def _spins(evidence: RankEvidence) -> bool:
    if (evidence.gpu_util or 0) < SPINNING_UTIL or evidence.gpu_power_w is None:
        return False
    limit_w = evidence.gpu_power_limit_w
    return limit_w is not None and limit_w > 0 and evidence.gpu_power_w < LITTLE_POWER * limit_w
