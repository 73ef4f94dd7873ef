"""Why a process cannot be dumped, told apart, each with the one remedy that fits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.model import DumpFailure

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_CAP_SYS_PTRACE = 1 << 19
_ALL_IDS = "4294967295"  # length of the map of the first user namespace

REMEDIES = {
    DumpFailure.GONE: "the process has ended: look at its log and exit code",
    DumpFailure.ZOMBIE: "the process is dead and not yet reaped: look at its log and exit code",
    DumpFailure.NOT_PYTHON: "give the pid of the training process, or of its launcher",
    DumpFailure.D_STATE: "the process sleeps in the kernel (driver, storage): check dmesg and the mounts of "
    "that node, exclude the node; only a reboot may help",
    DumpFailure.TIMEOUT: "the dump did not end in time: try again, or ask the hook with SIGUSR2",
    DumpFailure.MOVING: "it runs, and moved in every try: look again, or ask the hook with SIGUSR2",
    DumpFailure.NO_ANSWER: "look whether that node and its agent are alive",
    DumpFailure.NO_PYSPY: "py-spy is not installed here: pip install py-spy",
    DumpFailure.UNREADABLE: "look again, or ask the hook with SIGUSR2",
}


@dataclass(frozen=True, slots=True)
class Access:
    """What decides whether one process may read another's memory."""

    own_uid: int
    target_uid: int
    yama_scope: int | None  # None: Yama is absent
    has_cap: bool  # CAP_SYS_PTRACE in the effective set
    in_container: bool
    same_pid_namespace: bool
    same_user_namespace: bool
    inside_user_namespace: bool = False  # this process itself lives in one (a rootless container)
    memory_opens: bool = False  # tracing is allowed: what was refused is something else


@dataclass(frozen=True, slots=True)
class Failure:
    kind: DumpFailure
    text: str
    remedy: str


def _namespace(pid: int | str, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}")
    except OSError:
        return ""


# The links in /proc/PID/ns cannot be read where tracing is forbidden, which is just when they are needed;
# these files can: the user ids that a namespace maps, and the pids of a process in each nested namespace.
def _same_user_namespace(pid: int) -> bool:
    other = _namespace(pid, "user")
    if other:
        return other == _namespace("self", "user")
    theirs = procfs.text(f"/proc/{pid}/uid_map").split()
    return not theirs or theirs == procfs.text("/proc/self/uid_map").split()


def _same_pid_namespace(pid: int) -> bool:
    other = _namespace(pid, "pid")
    if other:
        return other == _namespace("self", "pid")
    return not (depth := _pid_depth(pid)) or depth == _pid_depth("self")


def _pid_depth(pid: int | str) -> int:
    """In how many pid namespaces, seen from this /proc, the process has a number; 0 when not known."""
    found = re.search(r"^NSpid:(.*)$", procfs.text(f"/proc/{pid}/status"), re.M)
    return len(found[1].split()) if found else 0


def _memory_opens(pid: int) -> bool:
    """The kernel's own check of the right to trace, without a pause of the process."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except OSError:
        return False
    return True


def read_access(pid: int) -> Access:
    """Ask the system what stands between this process and `pid`."""
    try:
        yama: int | None = int(Path(_YAMA).read_text())
    except (OSError, ValueError):
        yama = None
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.M)
    marks = ("/.dockerenv", "/run/.containerenv", "/singularity")
    return Access(
        own_uid=os.geteuid(),
        target_uid=procfs.uid_of(pid),
        yama_scope=yama,
        has_cap=bool(effective and int(effective[1], 16) & _CAP_SYS_PTRACE),
        in_container=any(Path(mark).exists() for mark in marks) or "container" in os.environ,
        same_pid_namespace=_same_pid_namespace(pid),
        same_user_namespace=_same_user_namespace(pid),
        inside_user_namespace=procfs.text("/proc/self/uid_map").split()[2:] != [_ALL_IDS],
        memory_opens=_memory_opens(pid),
    )


def explain_denied(access: Access) -> Failure:
    """The one reason, and the one remedy, for "permission denied"."""
    if access.memory_opens:
        return Failure(
            DumpFailure.UNREADABLE,
            "it may be traced, but its Python's own files cannot be opened by you",
            "make its interpreter and libraries readable for you, or ask the hook with SIGUSR2",
        )
    if access.inside_user_namespace and not access.same_user_namespace:
        return Failure(
            DumpFailure.OTHER_NAMESPACE,
            "this shell lives in a user namespace (a rootless container), the process outside of it",
            "run ftdash outside of this container",
        )
    if not access.same_user_namespace or not access.same_pid_namespace:
        return Failure(
            DumpFailure.OTHER_NAMESPACE,
            "the process lives in another namespace (a container)",
            "run ftdash inside that container, or enter it: nsenter -t PID -m -p -U --preserve-credentials",
        )
    if access.own_uid not in (0, access.target_uid):
        return Failure(
            DumpFailure.OTHER_USER,
            f"the process belongs to uid {access.target_uid}, you are uid {access.own_uid}",
            f"run as that user: sudo -u '#{access.target_uid}' ftdash diagnose …",
        )
    if access.yama_scope and not access.has_cap:
        if access.yama_scope >= 3:
            remedy = (
                "ptrace is off until reboot (scope 3): start the job with ftdash's hook and ask it by SIGUSR2"
            )
        elif access.yama_scope == 2:
            remedy = "only administrators may trace (scope 2): sudo ftdash diagnose …"
        else:
            remedy = "sudo sysctl kernel.yama.ptrace_scope=0, or sudo ftdash diagnose …"
        return Failure(DumpFailure.YAMA, f"Yama forbids it: ptrace_scope is {access.yama_scope}", remedy)
    where = "this container" if access.in_container else "this process"
    return Failure(
        DumpFailure.NO_PTRACE,
        f"{where} lacks CAP_SYS_PTRACE, or seccomp forbids ptrace",
        "start the container with --cap-add=SYS_PTRACE (Kubernetes: securityContext.capabilities.add)",
    )


def target_python(pid: int) -> tuple[int, int] | None:
    """The Python version of a process, from its executable's name and the libraries it mapped."""
    texts = [procfs.executable(pid), procfs.text(f"/proc/{pid}/maps")]
    for text in texts:
        if match := re.search(r"(?:lib)?python(3)\.(\d+)", text):
            return int(match[1]), int(match[2])
    return None


def explain(pid: int, stderr: str, pyspy_version: str = "") -> Failure:
    """Turn py-spy's message into the cause. Its words alone are ambiguous: /proc decides first."""
    state = procfs.state_letter(pid)
    if not state or state == "X":
        return Failure(DumpFailure.GONE, f"no process {pid}", REMEDIES[DumpFailure.GONE])
    if state == "Z":
        return Failure(DumpFailure.ZOMBIE, f"process {pid} is a zombie", REMEDIES[DumpFailure.ZOMBIE])
    lowered = stderr.lower()
    if state == "D":
        return Failure(DumpFailure.D_STATE, "uninterruptible sleep", REMEDIES[DumpFailure.D_STATE])
    if any(
        word in lowered for word in ("permission denied", "operation not permitted", "os error 13", "eperm")
    ):
        return explain_denied(read_access(pid))
    if not procfs.is_python(pid):
        name = Path(procfs.executable(pid)).name or "it"
        return Failure(DumpFailure.NOT_PYTHON, f"{name} is not Python", REMEDIES[DumpFailure.NOT_PYTHON])
    if "failed to find python version" in lowered or "unsupported version" in lowered:
        version = target_python(pid)
        name = f"Python {version[0]}.{version[1]}" if version else "this Python build"
        tool = f"py-spy {pyspy_version}".strip()
        return Failure(
            DumpFailure.UNSUPPORTED_PYTHON,
            f"{tool} does not know {name}",
            "pip install -U py-spy; until then ask the hook with SIGUSR2",
        )
    first = next((line for line in stderr.splitlines() if line.strip()), "no message")
    return Failure(DumpFailure.UNREADABLE, first.strip(), REMEDIES[DumpFailure.UNREADABLE])
