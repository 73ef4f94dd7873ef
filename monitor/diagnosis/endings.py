"""How processes ended, as launchers say it: torch's elastic agent, mp.spawn, DeepSpeed, srun, the shell."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

SIGKILL = -signal.SIGKILL
SIGTERM = -signal.SIGTERM

_ELASTIC = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\)(?: local_rank: (?P<rank>\d+))?")
_DEEPSPEED = re.compile(r"sigkill_handler\] (?P<command>\[.*\]) exits with return code = (?P<code>-?\d+)")
_CALLED = re.compile(
    r"CalledProcessError: Command '(?P<command>\[.*\])' (?:died with <Signals\.(?P<name>SIG\w+)"
    r"|returned non-zero exit status (?P<code>\d+))"
)
_LOCAL_RANK = re.compile(r"--local_rank[= ',]+(\d+)")
_SPAWN = re.compile(
    r"process (?P<rank>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+))"
)
_CHILD = re.compile(r"^Child process with PID \d+ terminated with code (?P<code>-?\d+)")
_SRUN = re.compile(r"srun: error: (?P<host>[\w.\-]+): tasks? (?P<tasks>\d[\d,\-]*): (?P<how>\S.*)$")
_SIGNAL = re.compile(
    r"Signal (?P<number>\d+) \((?P<name>SIG\w+)\) received by PID (?P<pid>\d+)|(?P<killed>^|\s)Killed\s*$"
    r"|(?P<shell>: line \d+: +\d+ Killed\b)"
)
_SRUN_SIGNALS: dict[str, int] = {
    "killed": signal.SIGKILL,
    "out of memory": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "illegal instruction": signal.SIGILL,
}
_MOST_TASKS = 100_000
_CAUSES: dict[int, str] = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "a page of a mapped file or of shared memory could not be had",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGFPE: "an integer division by zero in native code",
}
_FIXES: dict[int, str] = {
    signal.SIGSEGV: "PYTHONFAULTHANDLER=1 shows the Python line; suspect compiled extensions (of another "
    "torch, CUDA or glibc) and forked workers",
    signal.SIGABRT: "what native code said stands above (`terminate called`, `what()`); PYTHONFAULTHANDLER=1 "
    "shows the Python line",
    signal.SIGBUS: "a larger /dev/shm (docker --shm-size or --ipc=host); a file that was cut while it was "
    "mapped, or a full disk, does the same",
    signal.SIGILL: "build or install the packages for this node's processor",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """One process: `code` is negative for a signal. `rank` is what its launcher counts by."""

    rank: int | None
    code: int
    host: str = ""


def endings(text: str) -> Iterator[Ending]:
    """How processes ended, by one line of a launcher."""
    if match := _ELASTIC.search(text):
        yield Ending(int(match["rank"]) if match["rank"] else None, int(match["code"]))
    elif match := _DEEPSPEED.search(text):
        local = _LOCAL_RANK.search(match["command"])
        yield Ending(int(local[1]) if local else None, int(match["code"]))
    elif match := _SPAWN.search(text):
        yield Ending(int(match["rank"]), _code(match["name"], match["code"]))
    elif (match := _CALLED.search(text)) and (local := _LOCAL_RANK.search(match["command"])):
        yield Ending(int(local[1]), _code(match["name"], match["code"]))
    elif match := _CHILD.search(text):
        yield Ending(None, int(match["code"]))  # of the rank that the line's prefix names
    elif match := _SRUN.search(text):
        how = _srun_code(match["how"].strip().lower())
        if how is not None:
            yield from (Ending(task, how, match["host"]) for task in _tasks(match["tasks"]))


def signalled(text: str) -> int | None:
    """The signal, negative, that ended a process of which the line does not tell the rank."""
    match = _SIGNAL.search(text)
    return -int(match["number"] or signal.SIGKILL) if match else None


def _code(name: str | None, code: str | None) -> int:
    """An exit code, from the name of a signal or from digits."""
    if name is not None and name in signal.Signals.__members__:
        return -signal.Signals[name]
    return int(code or 1)


def _srun_code(how: str) -> int | None:
    if match := re.match(r"exited with exit code (\d+)", how):
        return int(match[1])
    return next((-number for words, number in _SRUN_SIGNALS.items() if how.startswith(words)), None)


def _tasks(text: str) -> Iterator[int]:
    for part in text.strip(",").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), min(int(last or first), int(first) + _MOST_TASKS) + 1)


def words(code: int | None) -> str:
    """An exit code for people."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    cause = _CAUSES.get(name, "")
    return f"{name.name}, {cause}" if cause else name.name


def fix(code: int | None) -> str:
    """What helps against a death by a signal, "" where the code says nothing."""
    return _FIXES.get(-code, "") if code is not None and code < 0 else ""
