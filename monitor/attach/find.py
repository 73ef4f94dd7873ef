"""Training processes of a user on this machine, grouped into jobs, by environment and process tree.

A rank is the outermost process with RANK and WORLD_SIZE in its environment: loader workers and compile
workers inherit both and are its children. Ranks belong to one job when they share the rendezvous (or the
Slurm job) that launchers put into their environment. A Python process that has torch mapped and no RANK
is a job of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftdash.monitor import procs
from ftdash.monitor.redact import redact_command

LAUNCHERS = (
    "torchrun",
    "accelerate",
    "deepspeed",
    "mpirun",
    "srun",
    "slurmstepd",
    "torch.distributed",
    "axolotl",
)
_KEYS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's process. `variables` is its environment as it was started with."""

    rank: int
    local_rank: int
    pid: int
    start: int
    command: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks of this machine that train together; `world_size` counts those of other machines too."""

    ranks: tuple[Rank, ...]
    world_size: int
    launcher_pid: int | None
    launcher_command: tuple[str, ...]
    slurm_job_id: str = ""
    run_dir: str = ""  # of a job that ftdash started itself


def find_jobs(uid: int | None = None, pids: Iterable[int] | None = None) -> list[Job]:
    """Jobs of the user `uid` (None: whoever asks; root sees all), or those that contain one of `pids`.

    Processes that may not be read are left out. Nothing is changed or signalled.
    """
    owner = os.geteuid() if uid is None else uid
    readable: dict[int, dict[str, str]] = {}
    for pid in procs.all_pids():
        if pid == os.getpid() or (owner != 0 and _owner(pid) != owner):
            continue
        variables = procs.environ(pid)
        if variables:
            readable[pid] = variables
    stats = {
        pid: stat for pid in readable if (stat := procs.read_stat(pid)) is not None and stat.state not in "ZX"
    }
    ranks = _ranks(stats, readable) + _single_processes(stats, readable)
    groups: dict[tuple[str, ...], list[Rank]] = {}
    for rank in ranks:
        key = tuple(rank.variables.get(name, "") for name in _KEYS)
        if "RANK" not in rank.variables:
            key = ("pid", str(rank.pid))
        groups.setdefault(key, []).append(rank)
    jobs = [_job(members) for members in groups.values()]
    if pids is not None:
        wanted = set(pids)
        jobs = [job for job in jobs if wanted & _family(job)]
    return sorted(jobs, key=lambda job: job.ranks[0].start)


def command_line(pid: int) -> tuple[str, ...]:
    """The process's arguments; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            return tuple(os.fsdecode(part) for part in handle.read().rstrip(b"\0").split(b"\0"))
    except OSError:
        return ()


def shown_command(command: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """A command as it may be shown: one line, secrets hidden."""
    return " ".join(" ".join(redact_command(command, variables)).split())


def _ranks(stats: Mapping[int, procs.Stat], readable: Mapping[int, dict[str, str]]) -> list[Rank]:
    found = []
    for pid, stat in stats.items():
        variables = readable[pid]
        rank, world = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
        if not rank.isdigit() or not world.isdigit():
            continue
        parent = readable.get(stat.ppid, {})
        if parent.get("RANK") == rank and parent.get("MASTER_PORT") == variables.get("MASTER_PORT"):
            continue
        local = variables.get("LOCAL_RANK", "")
        worker = _python_below(pid)
        found.append(
            Rank(
                rank=int(rank),
                local_rank=int(local) if local.isdigit() else int(rank),
                pid=worker,
                start=stat.start,
                command=command_line(worker),
                variables=variables,
            )
        )
    return found


def _python_below(pid: int) -> int:
    """The process itself when it is Python, else the first Python below it (a shell that wraps the rank)."""
    if is_python(pid):
        return pid
    return next((child for child in procs.descendants(pid) if is_python(child)), pid)


def is_python(pid: int) -> bool:
    """True when the process runs a Python interpreter."""
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))


def _single_processes(stats: Mapping[int, procs.Stat], readable: Mapping[int, dict[str, str]]) -> list[Rank]:
    """Python processes with torch mapped that are no rank, no launcher, and no child of such a process."""
    candidates = {
        pid
        for pid in stats
        if not readable[pid].get("RANK", "").isdigit() and is_python(pid) and maps_torch(pid)
    }
    found = []
    for pid in sorted(candidates):
        command = command_line(pid)
        if (
            stats[pid].ppid in candidates
            or _is_launcher(command)
            or any(readable.get(child, {}).get("RANK", "").isdigit() for child in procs.children(pid))
        ):
            continue
        found.append(Rank(0, 0, pid, stats[pid].start, command, readable[pid]))
    return found


def maps_torch(pid: int) -> bool:
    """True when the process has loaded torch's library."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as handle:
            return b"libtorch_cpu.so" in handle.read()
    except OSError:
        return False


def _is_launcher(command: tuple[str, ...]) -> bool:
    head = " ".join(command[:4])
    return any(name in head for name in LAUNCHERS)


def _job(members: list[Rank]) -> Job:
    newest: dict[int, Rank] = {}
    for rank in sorted(members, key=lambda rank: rank.start):
        newest[rank.rank] = rank
    ranks = tuple(newest[number] for number in sorted(newest))
    launcher = _launcher_of(ranks[0].pid)
    world = ranks[0].variables.get("WORLD_SIZE", "") if "RANK" in ranks[0].variables else "1"
    return Job(
        ranks=ranks,
        world_size=int(world) if world.isdigit() else len(ranks),
        launcher_pid=launcher,
        launcher_command=command_line(launcher) if launcher is not None else (),
        slurm_job_id=ranks[0].variables.get("SLURM_JOB_ID", ""),
        run_dir=ranks[0].variables.get("FTDASH_RUN_DIR", ""),
    )


def _launcher_of(pid: int) -> int | None:
    """The nearest ancestor whose command names a launcher."""
    stat = procs.read_stat(pid)
    for _ in range(16):
        if stat is None or stat.ppid <= 1:
            return None
        if _is_launcher(command_line(stat.ppid)):
            return stat.ppid
        stat = procs.read_stat(stat.ppid)
    return None


def _family(job: Job) -> set[int]:
    family = {rank.pid for rank in job.ranks}
    for rank in job.ranks:
        family.update(procs.descendants(rank.pid))
    if job.launcher_pid is not None:
        family.add(job.launcher_pid)
    return family


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
