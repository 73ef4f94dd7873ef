"""The evidence of a run of ftdash: live ranks here, agents of other hosts, or what a dead run left."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from ftdash.monitor import control
from ftdash.monitor.diagnosis import live, procfs
from ftdash.monitor.diagnosis.flight import read_flight
from ftdash.monitor.diagnosis.logs import read_logs
from ftdash.monitor.diagnosis.model import LogEvidence, LogFinding, LogKind, RankEvidence, Sample, decode_rank
from ftdash.monitor.records import Meta, decoder
from ftdash.monitor.rundir import Manifest, RunDir

_HEAD_BYTES = 256 << 10
_MAX_DUMP_BYTES = 32 << 20
_AGENT_PATIENCE_S = 4.0
_LOOK_EVERY_S = 0.05


def rank_metas(run: RunDir) -> dict[int, Meta]:
    """The latest meta record of each rank, from the head of its file."""
    found: dict[int, Meta] = {}
    for path in sorted(run.telemetry.glob("rank-*.jsonl")):
        try:
            with path.open("rb") as handle:
                head = handle.read(_HEAD_BYTES)
        except OSError:
            continue
        for line in head.split(b"\n"):
            if b'"meta"' not in line:
                continue
            try:
                record = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(record, Meta):
                found[record.rank] = record
    return found


def sample_run(run: RunDir, *, quick: bool = False) -> list[Sample]:
    """Two samples of a live run, or one of what a dead one left. Raises RunError."""
    manifest = run.read_manifest()
    metas = rank_metas(run)
    host = socket.gethostname()
    here = [meta for meta in metas.values() if meta.host in ("", host) and procfs.state_letter(meta.pid)]
    elsewhere = [meta for meta in metas.values() if meta.host not in ("", host)]
    ended = manifest.state in ("finished", "failed", "stopped")
    if elsewhere and not ended:
        return _ask_agents(run, manifest, quick=quick)
    if here:
        samples = live.sample_processes([meta.pid for meta in here], quick=quick, beats=run.telemetry)
        expected = frozenset(range(manifest.world_size))
        return [replace(sample, expected=expected, world_size=manifest.world_size) for sample in samples]
    if not ended and procfs.state_letter(manifest.launcher_pid or -1):
        return live.sample_processes([manifest.launcher_pid], quick=quick, beats=run.telemetry)
    return [_left_behind(run, manifest)]


def _ask_agents(run: RunDir, manifest: Manifest, *, quick: bool) -> list[Sample]:
    """Two dumps by the agents of all nodes."""
    samples = []
    pause_s = live.QUICK_INTERVAL_S if quick else live.CONFIRM_INTERVAL_S
    for number in range(2):
        started = time.monotonic()
        folder = control.request_dump(run)
        samples.append(_wait_for_dumps(folder, manifest, 1.0 if quick else _AGENT_PATIENCE_S))
        if number == 0:
            time.sleep(max(0.0, started + pause_s - time.monotonic()))
    return samples


def _wait_for_dumps(folder: Path, manifest: Manifest, patience_s: float) -> Sample:
    deadline = time.monotonic() + patience_s
    found: dict[int, RankEvidence] = {}
    while time.monotonic() < deadline and len(found) < manifest.world_size:
        found = read_dump_folder(folder)
        time.sleep(_LOOK_EVERY_S)
    expected = frozenset(range(manifest.world_size))
    ranks = tuple(found[rank] for rank in sorted(found))
    return Sample(t=time.time(), ranks=ranks, expected=expected, world_size=manifest.world_size)


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


def _left_behind(run: RunDir, manifest: Manifest) -> Sample:
    """What a dead run left: logs, flight recorder dumps, exit codes."""
    notices = [f"the run has ended: {manifest.state}"]
    dumps, flight_notices = read_flight(run.flight) if run.flight.is_dir() else ([], [])
    notices += flight_notices
    logs = read_logs(run.logs) if run.logs.is_dir() else LogEvidence()
    logs.world_size = logs.world_size or manifest.world_size
    plan = manifest.plan or {}
    seq_len = plan.get("seq_len") if isinstance(plan, dict) else None
    if isinstance(seq_len, int):
        logs.seq_len = logs.seq_len or seq_len
    if manifest.first_failing_rank is not None:
        rank = manifest.first_failing_rank
        code = next((item.code for item in manifest.exits if item.rank == rank), None)
        logs.findings.append(
            LogFinding(
                kind=LogKind.ELASTIC,
                text=manifest.reason or "first failing rank",
                rank=rank,
                t=manifest.ended,
                order=1 << 30,
                path="run.json",
                exit_code=code,
            )
        )
    return Sample(
        t=manifest.ended or time.time(),
        flight=tuple(dumps),
        logs=logs if logs.findings else None,
        world_size=manifest.world_size,
        notices=tuple(notices),
    )
