"""The evidence of a run of ftdash: live ranks here, agents of other hosts, or what a dead run left."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ftdash.monitor import control
from ftdash.monitor.diagnosis import frames, gpus, live, procfs
from ftdash.monitor.diagnosis.deadline import known_timeout
from ftdash.monitor.diagnosis.flight import read_flight
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.incident import kept, read_dump_folder
from ftdash.monitor.diagnosis.logs import read_logs
from ftdash.monitor.diagnosis.model import (
    DumpFailure,
    LogEvidence,
    LogFinding,
    LogKind,
    ProcessEvidence,
    RankEvidence,
    Sample,
)
from ftdash.monitor.diagnosis.pace import add_pace, last_beat
from ftdash.monitor.diagnosis.permission import REMEDIES
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.reach import ANSWER_S, Reach, unanswered
from ftdash.monitor.records import Meta, decoder
from ftdash.monitor.rundir import Manifest, RunDir, RunError
from ftdash.monitor.state import RunPhase

_HEAD_BYTES = 256 << 10
_AGENT_PATIENCE_S = 4.0
_LOOK_EVERY_S = 0.05
_NAMED = 8  # ranks without an answer that are named one by one


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


def sample_run(run: RunDir, *, quick: bool = False, reach: Reach | None = None) -> list[Sample]:
    """Two samples of a live run, or what a dead one left. Raises RunError.

    `reach` gets at nodes of other machines whose agents do not answer.
    """
    manifest = run.read_manifest()
    metas = rank_metas(run)
    host = node_name()
    by_rank = [metas[rank] for rank in sorted(metas)]
    here = [meta for meta in by_rank if meta.host in ("", host) and procfs.state_letter(meta.pid)]
    elsewhere = [meta for meta in metas.values() if meta.host not in ("", host)]
    ended = manifest.state in ("finished", "failed", "stopped")
    limit = known_timeout(run, [meta.pid for meta in here])
    if elsewhere and not ended:
        samples = _ask_agents(run, manifest, metas, quick=quick, reach=reach)
        if here and not quick:
            asked = live.add_rest(samples[-1])
            samples[-1] = replace(samples[-1], ras=asked.ras, kernel=asked.kernel)
        gpus.join(run, samples[-1].ranks)
    elif here and not ended:
        samples = live.sample_processes([meta.pid for meta in here], quick=quick, beats=run.telemetry)
        expected = frozenset(range(manifest.world_size))
        samples = [
            replace(
                sample,
                ranks=_without_impostors(sample.ranks, metas, host),
                expected=expected,
                world_size=manifest.world_size,
            )
            for sample in samples
        ]
        samples[-1] = _with_logs_of_a_teardown(run, manifest, samples[-1])
        gpus.join(run, samples[-1].ranks)
    elif not ended and procfs.state_letter(manifest.launcher_pid or -1):
        samples = live.sample_processes([manifest.launcher_pid], quick=quick, beats=run.telemetry)
    else:
        samples = _left_behind(run, manifest)
    return [replace(sample, timeout_s=limit.seconds, timeout_source=limit.source) for sample in samples]


def _without_impostors(
    ranks: Sequence[RankEvidence], metas: Mapping[int, Meta], host: str
) -> tuple[RankEvidence, ...]:
    """The ranks, without a process that one which has died left behind: it bears the rank and is not it.

    Nor is it a rank that was started anew: that one is beside the others below their launcher.
    """
    pids = {rank: meta.pid for rank, meta in metas.items() if meta.host in ("", host)}
    launchers = {e.process.ppid for e in ranks if e.process and e.pid == pids.get(e.rank)}
    return tuple(
        _died(evidence, pids[evidence.rank])
        if evidence.rank in pids
        and evidence.process is not None
        and evidence.process.ppid not in launchers
        and not procfs.state_letter(pids[evidence.rank])
        else evidence
        for evidence in ranks
    )


def _died(orphan: RankEvidence, pid: int) -> RankEvidence:
    """What is known of a rank of whose processes only one that it had started lives on."""
    text = f"no process {pid}; process {orphan.pid}, which it had started, lives on"
    process = ProcessEvidence(
        pid=pid, host=orphan.host, t=orphan.t, failure=DumpFailure.GONE, failure_text=text
    )
    return RankEvidence(rank=orphan.rank, host=orphan.host, t=orphan.t, process=process)


def _with_logs_of_a_teardown(run: RunDir, manifest: Manifest, sample: Sample) -> Sample:
    """A rank that shuts down while the run goes on has often said why: its exception is in its log."""
    leaves = any(frames.read_threads(e.threads).wait is Wait.TEARDOWN for e in sample.ranks)
    return replace(sample, logs=_logs(run, manifest)) if leaves else sample


def _ask_agents(
    run: RunDir, manifest: Manifest, metas: dict[int, Meta], *, quick: bool, reach: Reach | None
) -> list[Sample]:
    """Two dumps by the agents of all nodes, and by `reach` on those whose agents do not answer."""
    samples = []
    pause_s = live.QUICK_INTERVAL_S if quick else live.CONFIRM_INTERVAL_S
    patience_s = 1.0 if quick else _AGENT_PATIENCE_S
    hosts = {meta.host for meta in metas.values()}
    silent: set[str] = set()
    for number in range(2):
        started = time.monotonic()
        request, folder = control.ask_for_dump(run)
        notices: tuple[str, ...] = ()
        if reach is not None:
            silent = silent or unanswered(request, hosts, ANSWER_S)
        if reach is not None and silent:
            notices = (_dump_silent(reach, silent, folder),)
        found = _wait_for_dumps(folder, manifest.world_size, patience_s)
        for rank, evidence in found.items():
            evidence.beat = last_beat(run.telemetry, rank)
        if number:
            add_pace(run.telemetry, found.values())
        notices += unanswered_ranks(found, manifest.world_size, metas)
        samples.append(replace(_with_silent(found, manifest, metas), notices=notices))
        if number == 0:
            time.sleep(max(0.0, started + pause_s - time.monotonic()))
    return samples


def _dump_silent(reach: Reach, hosts: Collection[str], folder: Path) -> str:
    """What there is to say of nodes without a living agent."""
    names = ", ".join(sorted(hosts))
    try:
        reach.dump(hosts, folder)
    except RunError as error:
        return f"no answer from the agent on {names}, and not reached otherwise: {error}"
    return f"no answer from the agent on {names}: stacks taken without it"


def unanswered_ranks(
    found: Mapping[int, RankEvidence], world_size: int, metas: Mapping[int, Meta]
) -> tuple[str, ...]:
    """How many of all ranks have answered, and who has not; nothing when all have."""
    missing = [rank for rank in range(world_size) if rank not in found]
    if not missing:
        return ()
    names = [f"{rank} on {metas[rank].host}" if rank in metas else str(rank) for rank in missing]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    who = f"missing: {', '.join(names[:_NAMED])}{more}"
    return (f"{world_size - len(missing)} of {world_size} ranks answered; {who}",)


def _wait_for_dumps(folder: Path, wanted: int, patience_s: float) -> dict[int, RankEvidence]:
    deadline = time.monotonic() + patience_s
    found: dict[int, RankEvidence] = {}
    while time.monotonic() < deadline and len(found) < wanted:
        found = read_dump_folder(folder)
        time.sleep(_LOOK_EVERY_S)
    return found


def _with_silent(found: dict[int, RankEvidence], manifest: Manifest, metas: dict[int, Meta]) -> Sample:
    """The ranks of nodes whose agent gave nothing were not looked at: that makes nobody a suspect."""
    now = time.time()
    answered = {evidence.host for evidence in found.values()}
    ranks = dict(found)
    for rank, meta in metas.items():
        if rank not in found and meta.host not in answered:
            ranks[rank] = RankEvidence(
                rank=rank,
                host=meta.host,
                t=now,
                process=ProcessEvidence(
                    pid=meta.pid,
                    host=meta.host,
                    t=now,
                    failure=DumpFailure.NO_ANSWER,
                    failure_text=f"the agent on {meta.host} did not answer in time",
                    remedy=REMEDIES[DumpFailure.NO_ANSWER],
                ),
            )
    return Sample(
        t=now,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        expected=frozenset(range(manifest.world_size)),
        world_size=manifest.world_size,
    )


def _left_behind(run: RunDir, manifest: Manifest) -> list[Sample]:
    """What a dead run left: evidence of a hang, logs, flight recorder dumps, exit codes."""
    known = manifest.state if RunPhase(manifest.state) in FINAL else "its processes are gone"
    notices = [f"the run has ended: {known}"]
    dumps, flight_notices = read_flight(run.flight) if run.flight.is_dir() else ([], [])
    notices += flight_notices
    hang = kept(run, manifest.started)
    if hang is not None and hang.samples and not hang.incident.working:
        seen = time.strftime("%H:%M:%S", time.gmtime(hang.incident.t))
        before = f", {manifest.ended - hang.incident.t:.0f} s before the end" if manifest.ended else ""
        notices.append(
            f"evidence taken at {seen} UTC{before}, after {hang.incident.quiet_s:.0f} s without progress"
        )
        if manifest.reason:
            notices.append(f"how it ended then: {manifest.reason}")
        logs = _logs(run, manifest, hang.incident.log_bytes)
        samples = [replace(sample, world_size=manifest.world_size) for sample in hang.samples]
        flight = tuple(dumps) or samples[-1].flight
        last = replace(samples[-1], flight=flight, logs=logs, notices=tuple(notices), over=True)
        return [*samples[:-1], last]
    logs = _logs(run, manifest)
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
    elif manifest.state == RunPhase.STOPPED:
        logs.findings.append(LogFinding(kind=LogKind.ON_REQUEST, text=manifest.reason))
    return [
        Sample(
            t=manifest.ended or time.time(),
            flight=tuple(dumps),
            logs=logs if logs.findings else None,
            world_size=manifest.world_size,
            notices=tuple(notices),
            over=True,
        )
    ]


def _logs(run: RunDir, manifest: Manifest, up_to: Mapping[str, int] | None = None) -> LogEvidence:
    logs = read_logs(run.logs, up_to) if run.logs.is_dir() else LogEvidence()
    logs.world_size = logs.world_size or manifest.world_size
    logs.hosts.update({rank: meta.host for rank, meta in rank_metas(run).items() if meta.host})
    plan = manifest.plan or {}
    seq_len = plan.get("seq_len") if isinstance(plan, dict) else None
    if isinstance(seq_len, int):
        logs.seq_len = logs.seq_len or seq_len
    return logs
