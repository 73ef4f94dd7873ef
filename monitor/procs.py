"""Processes of this machine as /proc tells them: trees, ranks, counters, and which run one belongs to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ftdash.monitor.rundir import RUN_DIR_ENV

AGENT_ENV = "FTDASH_AGENT_OF"  # set in an agent's own environment; its children have RUN_DIR_ENV instead
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    """What /proc/PID/stat says (proc(5)). `start` (ticks since boot) with `pid` names a process for ever."""

    pid: int
    ppid: int
    state: str
    start: int
    cpu_s: float
    threads: int
    rss: int
    exit_status: int  # as wait(2) would give it; only meaningful for a zombie


def read_stat(pid: int) -> Stat | None:
    """The process's stat, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            text = handle.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 50:
        return None
    return Stat(
        pid=pid,
        ppid=int(fields[1]),
        state=fields[0].decode(),
        start=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / CLOCK_TICKS,
        threads=int(fields[17]),
        rss=int(fields[21]) * PAGE_BYTES,
        exit_status=int(fields[49]),
    )


def alive(pid: int, start: int | None = None) -> bool:
    """True for a process that runs: a zombie does not, nor does a later process with the same number."""
    stat = read_stat(pid) if pid > 0 else None
    return stat is not None and stat.state not in "ZX" and (start is None or stat.start == start)


def environ(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty when it cannot be read."""
    pairs = (entry.partition(b"=") for entry in _environ_bytes(pid).split(b"\0"))
    return {os.fsdecode(key): os.fsdecode(value) for key, eq, value in pairs if eq}


def _environ_bytes(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            return handle.read()
    except OSError:
        return b""


def all_pids() -> Iterator[int]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def pids_of_run(run: Path, variable: str = RUN_DIR_ENV) -> set[int]:
    """Living processes whose environment names this run, whatever group, session or parent they have."""
    needle = f"{variable}={run}".encode()
    found = set()
    for pid in all_pids():
        block = _environ_bytes(pid)
        if needle in block and needle in block.split(b"\0") and alive(pid):
            found.add(pid)
    return found


def agent_alive(run: Path, pid: int) -> bool:
    """True when `pid` is an agent of this run on this machine."""
    return alive(pid) and f"{AGENT_ENV}={run}".encode() in _environ_bytes(pid).split(b"\0")


def children(pid: int) -> list[int]:
    """Direct children by /proc/PID/task/*/children, which costs no scan of all processes."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as handle:
                found.extend(map(int, handle.read().split()))
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """All children of children, nearest first."""
    found: list[int] = []
    queue = children(pid)
    seen = {pid}
    while queue:
        nearest = queue.pop(0)
        if nearest in seen:
            continue
        seen.add(nearest)
        found.append(nearest)
        queue.extend(children(nearest))
    return found


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that is a rank: the outermost below the launcher that has RANK in its environment."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    start: int
    cuda_visible_devices: str | None = None


def find_ranks(pids: Iterable[int]) -> dict[int, RankProcess]:
    """Ranks among these processes, by rank. A rank's own children inherit RANK and are not ranks.

    Of several outermost processes with one rank, the one started first is taken.
    """
    candidates: dict[int, RankProcess] = {}
    ranked: dict[int, int] = {}  # pid: rank
    stats: dict[int, Stat] = {}
    variables: dict[int, dict[str, str]] = {}
    for pid in pids:
        stat = read_stat(pid)
        if stat is None or stat.state in "ZX":
            continue
        values = environ(pid)
        if (text := values.get("RANK", "")).isdigit():
            ranked[pid], stats[pid], variables[pid] = int(text), stat, values
    for pid, rank in ranked.items():
        if ranked.get(stats[pid].ppid) == rank:
            continue
        known = candidates.get(rank)
        if known is None or stats[pid].start < known.start:
            local_rank = variables[pid].get("LOCAL_RANK", "")
            world_size = variables[pid].get("WORLD_SIZE", "")
            candidates[rank] = RankProcess(
                rank=rank,
                local_rank=int(local_rank) if local_rank.isdigit() else rank,
                world_size=int(world_size) if world_size.isdigit() else 0,
                pid=pid,
                start=stats[pid].start,
                cuda_visible_devices=variables[pid].get("CUDA_VISIBLE_DEVICES"),
            )
    return candidates


@dataclass(frozen=True, slots=True)
class Counters:
    """I/O through read(2) and write(2) in bytes, and context switches of the main thread."""

    read_bytes: int = 0
    write_bytes: int = 0
    ctx_switches: int = 0


def read_counters(pid: int) -> Counters:
    """What /proc/PID/io and /proc/PID/status count; zeros where they may not be read."""
    read_bytes = write_bytes = switches = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", "rb") as handle:
        for line in handle:
            if line.startswith(b"rchar:"):
                read_bytes = int(line[6:])
            elif line.startswith(b"wchar:"):
                write_bytes = int(line[6:])
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as handle:
        for line in handle:
            if b"ctxt_switches:" in line:
                switches += int(line.rpartition(b":")[2])
    return Counters(read_bytes, write_bytes, switches)


def cpus_allowed(pid: int) -> int:
    """Processors that the process may run on; 0 when it is gone."""
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return 0


def is_loader_worker(pid: int) -> bool:
    """A torch data loader's worker, by the name that torch gives it, or as a child of multiprocessing.

    A forked worker has its parent's command line; a spawned one and those of a fork server say so in theirs.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb") as handle:
            if handle.read().startswith(b"pt_data_worker"):
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            command = handle.read()
    except OSError:
        return False
    if b"resource_tracker" in command or b"compile_worker" in command or not command:
        return False
    if b"multiprocessing.spawn" in command:
        return True
    stat = read_stat(pid)
    if stat is None:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{stat.ppid}/cmdline", "rb") as handle:
        return handle.read() == command
    return False


def catches(pid: int, number: int) -> bool:
    """True when the process has a handler for this signal (SigCgt in /proc/PID/status)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as handle:
        for line in handle:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(pids: Iterable[int], signum: int) -> None:
    """Signal these processes; those already gone, or not ours, are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def host_memory() -> tuple[int, int]:
    """MemTotal and MemAvailable in bytes."""
    total = available = 0
    with contextlib.suppress(OSError), open("/proc/meminfo", "rb") as handle:
        for line in handle:
            if line.startswith(b"MemTotal:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith(b"MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return total, available


def exit_code(status: int) -> int:
    """A wait(2) status as Python's subprocess gives it: negative for a signal."""
    return os.waitstatus_to_exitcode(status)


# include/uapi/linux/pidfd.h: struct pidfd_info begins with its mask and has exit_code as 16th 32-bit word.
_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = 0xC000FF0B | _PIDFD_INFO_BYTES << 16
_PIDFD_INFO_EXIT = 1 << 3


def reaped_exit_code(pidfd: int) -> int | None:
    """The exit code of a process that its parent has already collected; None before Linux 6.15."""
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("=Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    return exit_code(struct.unpack_from("=i", info, 60)[0])


def signal_name(code: int) -> str:
    """An exit code in words: "exit code 3" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
