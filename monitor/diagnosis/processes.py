"""Which processes are the ranks of a job: from any pid of its tree, past shells, launchers and helpers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.collect import is_helper

RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
        "ftdash.tui.cli",
    }
)
_LAUNCHER_NAMES = frozenset(
    {"torchrun", "accelerate", "deepspeed", "accelerate-launch", "ftdash", "srun", "mpirun"}
)
_STARTS_PROCESSES = re.compile(r"torch/multiprocessing/spawn\.py$|(?:^|/)multiprocessing/process\.py$")


@dataclass(frozen=True, slots=True)
class Trainer:
    """A rank's process. `rank` is -1 when neither environment nor command line says it."""

    pid: int
    rank: int
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    job: tuple[str, ...] = ()


def is_launcher(command: Sequence[str]) -> bool:
    """torchrun, accelerate launch, deepspeed and the like, which hold no rank themselves."""
    for position, part in enumerate(command[:4]):
        if part == "-m" and position + 1 < len(command):
            return command[position + 1] in _LAUNCHER_MODULES
        if Path(part).name in _LAUNCHER_NAMES:
            return True
    return False


def _number(environ: dict[str, str], names: Iterable[str]) -> int | None:
    for name in names:
        if (value := environ.get(name, "")).isdigit():
            return int(value)
    return None


def _job(environ: dict[str, str]) -> tuple[str, ...]:
    keys = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    return tuple(environ.get(key, "") for key in keys) if environ.get("MASTER_PORT") else ()


def trainer_of(pid: int) -> Trainer | None:
    """The rank that a process is, by its environment; None when it bears none or is no interpreter."""
    environ = procfs.environment(pid)
    rank = _number(environ, RANK_NAMES)
    if rank is None or is_launcher(procfs.command_line(pid)) or not procfs.is_python(pid):
        return None
    return Trainer(
        pid=pid,
        rank=rank,
        local_rank=_number(environ, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")),
        world_size=_number(environ, ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")),
        local_world_size=_number(environ, ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")),
        job=_job(environ),
    )


def _topmost(candidates: dict[int, Trainer]) -> list[Trainer]:
    """Ranks without their children, which inherit the environment: the first of each rank in its branch."""
    found = []
    for pid, trainer in candidates.items():
        above = procfs.parent_pid(pid)
        while above > 1:
            other = candidates.get(above)
            if other is not None and other.rank == trainer.rank:
                break
            above = procfs.parent_pid(above)
        else:
            found.append(trainer)
    return found


def _rank_above(pid: int) -> int:
    """The topmost ancestor that bears the same rank: a worker's pid stands for its rank."""
    trainer = trainer_of(pid)
    top = pid
    while trainer is not None:
        above = procfs.parent_pid(top)
        other = trainer_of(above) if above > 1 else None
        if other is None or other.rank != trainer.rank:
            break
        top = above
    return top


def siblings(trainer: Trainer, kin: dict[int, list[int]]) -> list[Trainer]:
    """Other local processes of the same job (same rendezvous address, port and world size), same user."""
    if not trainer.job:
        return []
    own = procfs.uid_of(trainer.pid)
    candidates = {}
    for pids in kin.values():
        for pid in pids:
            if procfs.uid_of(pid) != own or pid == os.getpid():
                continue
            other = trainer_of(pid)
            if other is not None and other.job == trainer.job:
                candidates[pid] = other
    return _topmost(candidates)


def find_trainers(pids: Sequence[int]) -> list[Trainer]:
    """The ranks in and below `pids`, sorted by rank. Unranked interpreters count in the order they come."""
    kin = procfs.children_map()
    candidates: dict[int, Trainer] = {}
    plain: list[int] = []
    for root in pids:
        start = _rank_above(root)
        tree = [start, *procfs.descendants(start, kin)]
        ranked = {pid: trainer for pid in tree if (trainer := trainer_of(pid)) is not None}
        candidates.update(ranked)
        if not ranked:
            plain.extend(_plain_interpreters(root, kin))
    found = _topmost(candidates)
    if found:
        known = {trainer.rank for trainer in found}
        launched = _is_launched(found[0].pid)
        for other in siblings(found[0], kin):
            # Beside ranks below a launcher, one that is not has been left behind by a rank that ended.
            if other.rank not in known and _is_launched(other.pid) >= launched:
                known.add(other.rank)
                found.append(other)
    taken = {trainer.rank for trainer in found}
    free = (number for number in range(len(taken) + len(plain) + 1) if number not in taken)
    for pid in dict.fromkeys(plain):
        if pid in {trainer.pid for trainer in found}:
            continue
        said = _said_rank(pid)
        rank = said if said is not None and said not in taken else next(free)
        taken.add(rank)
        found.append(Trainer(pid=pid, rank=rank, local_rank=rank))
    return sorted(found, key=lambda trainer: trainer.rank)


def _is_launched(pid: int) -> bool:
    """Whether a process was started by a launcher that still lives."""
    return is_launcher(procfs.command_line(procfs.parent_pid(pid)))


def _said_rank(pid: int) -> int | None:
    """A rank on the command line: --rank 3, --local_rank=3."""
    match = re.search(r"--(?:local[_-])?rank[= ](\d+)", " ".join(procfs.command_line(pid)))
    return int(match[1]) if match else None


def _plain_interpreters(root: int, kin: dict[int, list[int]]) -> list[int]:
    """Interpreters without a rank: the processes that the topmost one started and waits for, else itself."""
    tree = [root, *procfs.descendants(root, kin)]
    python = [
        pid
        for pid in tree
        if procfs.is_python(pid)
        and not is_helper(procfs.command_line(pid))
        and not is_launcher(procfs.command_line(pid))
    ]
    if not python:
        return [] if any(is_launcher(procfs.command_line(pid)) for pid in tree) else [root]
    top = python[0]
    started = [pid for pid in kin.get(top, ()) if pid in python]
    if len(started) > 1 and _joins_processes(top):
        return started
    return [pid for pid in python if procfs.parent_pid(pid) not in python]


def _joins_processes(pid: int) -> bool:
    """Whether a process only waits until processes that it started end: `spawn` of torch, or their `join`."""
    from ftdash.monitor.diagnosis import frames
    from ftdash.monitor.diagnosis.collect import dump_process

    main = frames.main_thread(dump_process(pid).threads)
    joins = [frame for frame in main.frames if frame.short == "join"] if main else []
    return any(_STARTS_PROCESSES.search(frame.file) for frame in joins)
