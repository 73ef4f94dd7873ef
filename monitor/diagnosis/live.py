"""How to take one or two samples of a live job: quick dumps of all ranks, native frames where they decide."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ftdash.monitor.diagnosis import frames, knowledge, procfs, ras, source
from ftdash.monitor.diagnosis.arguments import add_calls
from ftdash.monitor.diagnosis.collect import dump_process, dump_ranks
from ftdash.monitor.diagnosis.frames import Origin, Wait
from ftdash.monitor.diagnosis.kernel import RECENT_S, kernel_lines
from ftdash.monitor.diagnosis.model import ProcessEvidence, RankEvidence, Sample
from ftdash.monitor.diagnosis.pace import add_pace, last_beat
from ftdash.monitor.diagnosis.processes import Trainer, find_trainers, is_launcher
from ftdash.monitor.diagnosis.workerserver import flight_dumps

QUICK_INTERVAL_S = 0.5
CONFIRM_INTERVAL_S = 5.0
_NATIVE_LIMIT = 2
_NATIVE_TIMEOUT_S = 2.5


def _expected(trainers: Sequence[Trainer]) -> tuple[frozenset[int], int | None]:
    """The ranks that ought to be on this host, and the world size; all of them when the job is here alone."""
    found = frozenset(trainer.rank for trainer in trainers)
    world = max((trainer.world_size for trainer in trainers if trainer.world_size), default=None)
    if world is None:
        return found, None
    local = max((trainer.local_world_size for trainer in trainers if trainer.local_world_size), default=None)
    loopback = all(
        trainer.job[:1] in (("127.0.0.1",), ("localhost",), ("::1",)) for trainer in trainers if trainer.job
    )
    here_alone = local == world if local else loopback
    return (frozenset(range(world)) if here_alone else found), world


def take_sample(trainers: Sequence[Trainer], *, beats: Path | None = None, timeout_s: float = 3.0) -> Sample:
    """Dump all ranks at once."""
    ranks = dump_ranks([(trainer.rank, trainer.pid) for trainer in trainers], timeout_s=timeout_s)
    if beats is not None:
        for evidence in ranks:
            evidence.beat = last_beat(beats, evidence.rank)
    expected, world = _expected(trainers)
    return Sample(t=time.time(), ranks=tuple(ranks), expected=expected, world_size=world)


def _needs_native(evidence: RankEvidence) -> bool:
    """A rank asleep in C code below the user's own line, whose text does not tell what it waits for."""
    if evidence.proc.state not in ("S", "D") or evidence.proc.syscall == 230:
        return False
    reading = frames.read_threads(evidence.threads)
    if reading.wait is not Wait.OWN or reading.blocked_by is not None or reading.telling is None:
        return False
    if frames.origin(reading.telling) is not Origin.OWN:
        return False
    text = source.line_text(reading.own, evidence.process.started if evidence.process else 0.0)
    return not (source.says_collective(text) or source.says_store(text))


def add_native(sample: Sample) -> Sample:
    """The sample with native frames for the few ranks where they decide; pauses those for 0.6 s each."""
    doubtful = [evidence for evidence in sample.ranks if _needs_native(evidence)][:_NATIVE_LIMIT]
    replaced = {}
    for evidence in doubtful:
        process = dump_process(evidence.pid, native=True, timeout_s=_NATIVE_TIMEOUT_S)
        if process.threads and evidence.process is not None:
            process.children, process.proc = evidence.process.children, evidence.process.proc
            replaced[evidence.rank] = process
    if not replaced:
        return sample
    ranks = []
    for evidence in sample.ranks:
        process_or_none = replaced.get(evidence.rank)
        if process_or_none is not None:
            evidence = RankEvidence(
                rank=evidence.rank,
                host=evidence.host,
                t=evidence.t,
                process=process_or_none,
                beat=evidence.beat,
            )
        ranks.append(evidence)
    return replace(sample, ranks=tuple(ranks))


def sample_processes(
    pids: Sequence[int],
    *,
    quick: bool = False,
    interval_s: float | None = None,
    beats: Path | None = None,
) -> list[Sample]:
    """Two samples of the job that `pids` belong to: 0.5 s apart for a quick verdict, 5 s for a confirmed one.

    Even the quick verdict looks twice: a single look cannot tell waiting from working.
    """
    trainers = find_trainers(pids)
    if not trainers:
        return [Sample(t=time.time(), launchers=tuple(_launchers_below(pids)))]
    started = time.monotonic()
    first = take_sample(trainers, beats=beats, timeout_s=2.0 if quick else 3.0)
    if interval_s is None:
        interval_s = QUICK_INTERVAL_S if quick else CONFIRM_INTERVAL_S
    time.sleep(max(0.0, started + interval_s - time.monotonic()))
    second = take_sample(trainers, beats=beats, timeout_s=2.0 if quick else 3.0)
    if beats is not None:
        add_pace(beats, second.ranks)
    if quick:
        return [first, second]
    second = add_native(second)
    if _all_in_calls(second) or _all_starting(second):
        add_calls(second.ranks)
    return [first, add_rest(second)]


def add_rest(sample: Sample) -> Sample:
    """The sample with what can be asked beside stacks: worker servers, NCCL's RAS, the kernel's log."""
    pids = [(evidence.rank, evidence.pid) for evidence in sample.ranks if evidence.pid]
    started = [one.process.started for one in sample.ranks if one.process and one.process.started]
    lived_s = time.time() - min(started) if started else RECENT_S
    told = {procfs.environment(pid).get(ras.ADDRESS_ENV, "") for _, pid in pids[:8]} - {""}
    return replace(
        sample,
        flight=flight_dumps(pids),
        ras=ras.ask(sorted(told) or [f"localhost:{ras.PORT}"]),
        kernel=kernel_lines(min(lived_s, RECENT_S)),  # what it killed before the job began is not of the job
    )


def _all_in_calls(sample: Sample) -> bool:
    """Whether every rank is in a collective, and one of them in a call with somebody in particular."""
    readings = [frames.read_threads(evidence.threads) for evidence in sample.ranks]
    named = any(reading.op in knowledge.NAMES_A_RANK for reading in readings)
    return named and all(reading.in_collective for reading in readings)


def _all_starting(sample: Sample) -> bool:
    """Whether every rank waits for the others at the rendezvous."""
    readings = [frames.read_threads(evidence.threads) for evidence in sample.ranks]
    return all(reading.wait in (Wait.RENDEZVOUS, Wait.STORE) for reading in readings)


def _launchers_below(pids: Sequence[int]) -> list[ProcessEvidence]:
    kin = procfs.children_map()
    tree = dict.fromkeys(pid for root in pids for pid in (root, *procfs.descendants(root, kin)))
    return [
        dump_process(pid) for pid in tree if is_launcher(procfs.command_line(pid)) and procfs.is_python(pid)
    ]
