"""What /proc says of a process without touching it: state, where it sleeps, counters, environment, kin."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ftdash.monitor.diagnosis.model import ProcState

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SIGUSR2_BIT = 1 << (12 - 1)
_SEND_SYSCALLS = ("1", "20", "40", "44", "46")  # write, writev, sendfile, sendto, sendmsg of x86-64
_TRANSPORT = "gloo_tcp_loop"  # thread of gloo/transport/tcp/loop.cc


def text(path: str) -> str:
    try:
        with open(path, "rb") as handle:
            return handle.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; the command name in parentheses may hold anything."""
    return text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _status(path: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text(path).splitlines() if ":" in line)


def state_letter(pid: int) -> str:
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def start_time(pid: int) -> float:
    """When the process began, UTC seconds; 0 when it is gone."""
    fields = _stat_fields(pid)
    boot = re.search(r"^btime (\d+)", text("/proc/stat"), re.M)
    return int(boot[1]) + int(fields[19]) / _TICKS_PER_S if boot and len(fields) > 19 else 0.0


def parent_pid(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def _sleeps(status: dict[str, str]) -> int:
    return int(status.get("voluntary_ctxt_switches", "0"))


def thread_counters(pid: int, tid: int) -> tuple[int, float]:
    """How often one thread went to sleep, and the seconds that it ran or was ready to run."""
    task = f"/proc/{pid}/task/{tid}"
    return _sleeps(_status(f"{task}/status")), _wanted_s(task)


def _wanted_s(task: str) -> float:
    """Seconds that a thread ran or was ready to run: tells busy from asleep on a crowded machine."""
    fields = text(f"{task}/schedstat").split()
    return (int(fields[0]) + int(fields[1])) / 1e9 if len(fields) == 3 else 0.0


def _transport_wanted_s(pid: int, threads: Sequence[str]) -> float:
    tasks = [f"/proc/{pid}/task/{tid}" for tid in threads]
    return sum(_wanted_s(task) for task in tasks if text(f"{task}/comm").strip() == _TRANSPORT)


def _unsent(pid: int, syscall: Sequence[str]) -> int:
    """Bytes that the other side of a TCP connection has not taken, while the main thread waits to send more.

    `syscall` is /proc/PID/syscall: its number and arguments, the file descriptor first.
    """
    if len(syscall) < 2 or syscall[0] not in _SEND_SYSCALLS:
        return 0
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(syscall[1], 16)}")
    except (OSError, ValueError):
        return 0
    inode = target.removeprefix("socket:[").removesuffix("]")
    for family in ("tcp", "tcp6"):
        for line in text(f"/proc/{pid}/net/{family}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                return int(fields[4].partition(":")[0], 16)
    return 0


def proc_state(pid: int) -> ProcState:
    """State and counters of a process; all empty when it is gone."""
    fields = _stat_fields(pid)
    if not fields:
        return ProcState()
    status = _status(f"/proc/{pid}/status")
    io = {key: int(value) for key, value in _status(f"/proc/{pid}/io").items()}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    syscall = text(f"/proc/{pid}/syscall").split()
    wchan = text(f"/proc/{pid}/wchan").strip()
    return ProcState(
        state=fields[0],
        wchan="" if wchan == "0" else wchan,
        syscall=int(syscall[0]) if syscall and syscall[0].lstrip("-").isdigit() else None,
        main_sleeps=_sleeps(status),
        sleeps=sum(_sleeps(_status(f"/proc/{pid}/task/{tid}/status")) for tid in threads),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        main_wanted_s=_wanted_s(f"/proc/{pid}"),
        transport_wanted_s=_transport_wanted_s(pid, threads),
        unsent=_unsent(pid, syscall),
        rss=int(fields[21]) * _PAGE_BYTES,
        read_chars=io.get("rchar", 0),
        write_chars=io.get("wchar", 0),
        read_bytes=io.get("read_bytes", 0),
        write_bytes=io.get("write_bytes", 0),
        threads=len(threads),
        tracer_pid=int(status.get("TracerPid", "0")),
        catches_sigusr2=bool(int(status.get("SigCgt", "0").strip() or "0", 16) & _SIGUSR2_BIT),
    )


def uid_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def command_line(pid: int) -> list[str]:
    return [part for part in text(f"/proc/{pid}/cmdline").split("\0") if part]


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with (later changes inside it are not visible)."""
    pairs = (item.partition("=") for item in text(f"/proc/{pid}/environ").split("\0"))
    return {key: value for key, equals, value in pairs if equals}


def executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def is_python(pid: int) -> bool:
    """Whether the process runs a Python interpreter, by its executable or a mapped libpython."""
    if Path(executable(pid).removesuffix(" (deleted)")).name.startswith(("python", "pypy")):
        return True
    return "libpython" in text(f"/proc/{pid}/maps")


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children_map() -> dict[int, list[int]]:
    """Children of every process, in the order of their pids."""
    kin: dict[int, list[int]] = {}
    for pid in sorted(all_pids()):
        kin.setdefault(parent_pid(pid), []).append(pid)
    return kin


def descendants(pid: int, kin: dict[int, list[int]] | None = None) -> list[int]:
    """All processes below `pid`, parents before their children."""
    kin = children_map() if kin is None else kin
    found: list[int] = []
    queue = list(kin.get(pid, ()))
    while queue:
        child = queue.pop(0)
        found.append(child)
        queue.extend(kin.get(child, ()))
    return found
