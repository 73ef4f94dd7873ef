"""How to take evidence of a live process while changing it as little as possible.

py-spy reads the memory of the process without pausing it (`--nonblocking`): a ptrace pause, like a
signal, can cut a blocked system call short and move the very rank that is looked at. State before and
after are compared, and a process that the dump left stopped is continued.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis import permission, procfs
from ftdash.monitor.diagnosis.model import (
    NOT_SEEN,
    DumpFailure,
    Frame,
    ProcessEvidence,
    RankEvidence,
    Thread,
    encode_rank,
)
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import RUN_DIR_ENV, write_atomic

MAX_CHILDREN = 32
MAX_DUMP_BYTES = 32 << 20
MOVED_BY_SIGNAL = "was sent SIGUSR2, which can cut a blocked system call short"
_NONBLOCKING_TRIES = 6
_SECOND_TIMEOUT_S = 8.0  # for ranks that a burdened machine did not show in time
_STOPPED = "T"


class _PySpyFrame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _PySpyThread(msgspec.Struct):
    thread_name: str | None = None
    thread_id: int | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[_PySpyFrame] = []


_pyspy_decoder = msgspec.json.Decoder(list[_PySpyThread])


@cache
def pyspy_path() -> str | None:
    """The py-spy beside this interpreter, else the one in PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


@cache
def pyspy_version() -> str:
    tool = pyspy_path()
    if tool is None:
        return ""
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else ""


def parse_pyspy_json(data: bytes) -> list[Thread]:
    """Threads of `py-spy dump --json`. Raises msgspec.DecodeError when it is something else."""
    return [
        Thread(
            name=thread.thread_name or "",
            os_tid=thread.os_thread_id or 0,
            active=thread.active,
            owns_gil=thread.owns_gil,
            frames=[Frame(frame.name, frame.filename, frame.line) for frame in thread.frames],
        )
        for thread in _pyspy_decoder.decode(data)
    ]


def run_pyspy(pid: int, flags: Sequence[str], timeout_s: float) -> tuple[bytes, str, bool]:
    """Output, message, and whether the time was over. py-spy is asked to end, never killed while it may
    hold the process stopped."""
    environ = {key: value for key, value in os.environ.items() if key != "RUST_BACKTRACE"}
    command = [pyspy_path() or "py-spy", "dump", "--json", *flags, "--pid", str(pid)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.terminate()
        return b"", "", True
    return out[:MAX_DUMP_BYTES], err.decode("utf-8", "replace"), False


def _undo_stop(pid: int, before: str) -> str:
    """Continue a process that was not stopped before the dump and is now; say so."""
    if before == _STOPPED or procfs.state_letter(pid) != _STOPPED:
        return ""
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError as error:
        return f"left stopped by the dump, and SIGCONT failed: {error.strerror}"
    return "left stopped by the dump, continued with SIGCONT"


def _optional_int(environ: dict[str, str], *names: str) -> int | None:
    for name in names:
        if (value := environ.get(name, "")).isdigit():
            return int(value)
    return None


def bare_evidence(pid: int) -> ProcessEvidence:
    """What /proc alone says: identity, state, counters."""
    environ = procfs.environment(pid)
    return ProcessEvidence(
        pid=pid,
        host=node_name(),
        t=time.time(),
        started=procfs.start_time(pid),
        ppid=procfs.parent_pid(pid),
        uid=procfs.uid_of(pid),
        rank=_optional_int(environ, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        local_rank=_optional_int(environ, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        world_size=_optional_int(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        local_world_size=_optional_int(environ, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        master=":".join(filter(None, (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")))),
        command=procfs.command_line(pid),
        proc=procfs.proc_state(pid),
    )


def _failed(evidence: ProcessEvidence, failure: permission.Failure) -> ProcessEvidence:
    evidence.failure, evidence.failure_text, evidence.remedy = failure.kind, failure.text, failure.remedy
    return evidence


def _dump_with_pyspy(pid: int, *, native: bool, timeout_s: float) -> ProcessEvidence:
    evidence = bare_evidence(pid)
    before = evidence.proc.state
    if before in ("", "X", "Z"):
        return _failed(evidence, permission.explain(pid, ""))
    if pyspy_path() is None:
        remedy = permission.REMEDIES[DumpFailure.NO_PYSPY]
        return _failed(evidence, permission.Failure(DumpFailure.NO_PYSPY, "py-spy not found", remedy))
    if native and before not in ("D", _STOPPED, "t"):
        plans = [("--native",)]
    else:
        plans = [("--nonblocking",)] * _NONBLOCKING_TRIES
    message, deadline = "", time.monotonic() + timeout_s
    for flags in plans:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        out, message, timed_out = run_pyspy(pid, flags, left_s)
        evidence.moved = _undo_stop(pid, before) or evidence.moved
        if timed_out:
            kind = DumpFailure.D_STATE if procfs.state_letter(pid) == "D" else DumpFailure.TIMEOUT
            return _failed(
                evidence, permission.Failure(kind, "the dump did not end", permission.REMEDIES[kind])
            )
        try:
            evidence.threads = parse_pyspy_json(out)
        except msgspec.DecodeError:
            continue
        if any(thread.frames for thread in evidence.threads):
            for thread in evidence.threads:
                if thread.os_tid:
                    thread.sleeps, thread.wanted_s = procfs.thread_counters(pid, thread.os_tid)
            evidence.source = "py-spy native" if native else "py-spy"
            return evidence
    failed = _failed(evidence, permission.explain(pid, message, pyspy_version()))
    if failed.failure is DumpFailure.UNREADABLE and _ran_since(pid, evidence):
        text = f"it moved in each of {len(plans)} tries to read it"
        _failed(
            evidence, permission.Failure(DumpFailure.MOVING, text, permission.REMEDIES[DumpFailure.MOVING])
        )
    if before and not procfs.state_letter(pid):
        failed.moved = "ended while it was dumped"
    return failed


def _ran_since(pid: int, evidence: ProcessEvidence) -> bool:
    """Whether it used the processor or its main thread woke up since `evidence`: its memory moved."""
    now = procfs.proc_state(pid)
    return now.cpu_s > evidence.proc.cpu_s or now.main_sleeps > evidence.proc.main_sleeps


_ASK_HOOK = frozenset(
    {
        DumpFailure.YAMA,
        DumpFailure.NO_PTRACE,
        DumpFailure.OTHER_NAMESPACE,
        DumpFailure.UNSUPPORTED_PYTHON,
        DumpFailure.NO_PYSPY,
        DumpFailure.MOVING,
    }
)


def ask_server(evidence: ProcessEvidence) -> bool:
    """Have torch's worker server in the process write the stacks: no signal, no pause. True when it did."""
    from ftdash.monitor.diagnosis.workerserver import stacks

    threads = _threads_in(stacks(evidence.pid, evidence.rank))
    if not threads:
        return False
    evidence.threads, evidence.source = threads, "worker server"
    return True


def ask_hook(evidence: ProcessEvidence, patience_s: float = 1.0) -> bool:
    """Have the hook's faulthandler write the stacks, where py-spy may not look; True when it did.

    SIGUSR2 ends a process that does not handle it, so SigCgt is read first. The signal can cut a
    blocked system call short: that is said in `moved`.
    """
    run_dir = procfs.environment(evidence.pid).get(RUN_DIR_ENV)
    if not run_dir or evidence.rank is None or not procfs.proc_state(evidence.pid).catches_sigusr2:
        return False
    path = Path(run_dir) / "stacks" / f"faulthandler-rank-{evidence.rank}.txt"
    try:
        if not path.exists():
            return False
        threads = hook_stacks(path, lambda: os.kill(evidence.pid, signal.SIGUSR2), patience_s=patience_s)
    except OSError:
        return False
    if not threads:
        return False
    evidence.threads, evidence.source = threads, "faulthandler"
    evidence.moved = evidence.moved or MOVED_BY_SIGNAL
    return True


def hook_stacks(
    path: Path, send: Callable[[], object], *, patience_s: float, limit: int = MAX_DUMP_BYTES
) -> list[Thread] | None:
    """The threads that a rank's hook appends to `path` once `send` has signalled the rank.

    None when nothing came within `patience_s`, no thread when what came holds no stack. Raises OSError, and
    what `send` raises.
    """
    before = path.stat().st_size if path.exists() else 0
    send()
    deadline, size = time.monotonic() + patience_s, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, size = size, path.stat().st_size if path.exists() else 0
        if size > before and size == last:
            break
    if size <= before:
        return None
    with path.open("rb") as handle:
        handle.seek(before)
        return _threads_in(handle.read(limit).decode("utf-8", "replace"))


def _threads_in(text: str) -> list[Thread]:
    """The threads of the first process in a text dump."""
    from ftdash.monitor.diagnosis.stacks import read_text  # which imports this module

    chunks = read_text(text)
    return chunks[0].processes[0].threads if chunks and chunks[0].processes else []


def dump_process(pid: int, *, native: bool = False, timeout_s: float = 4.0) -> ProcessEvidence:
    """Stacks of all threads and the state of one process; never raises for what the process is.

    `native` adds C and C++ frames and pauses the process meanwhile (about 0.6 s).
    """
    evidence = _dump_with_pyspy(pid, native=native, timeout_s=timeout_s)
    if evidence.failure in _ASK_HOOK and (ask_server(evidence) or ask_hook(evidence)):
        evidence.failure, evidence.failure_text, evidence.remedy = None, "", ""
    return evidence


def rank_evidence(
    pid: int,
    *,
    rank: int | None = None,
    kin: dict[int, list[int]] | None = None,
    children: bool = True,
    native: bool = False,
    timeout_s: float = 4.0,
) -> RankEvidence:
    """One rank: its process, and those below it: loader workers, forked children, programs it started."""
    process = dump_process(pid, native=native, timeout_s=timeout_s)
    if children and process.failure not in (DumpFailure.GONE, DumpFailure.ZOMBIE):
        for child in procfs.descendants(pid, kin)[:MAX_CHILDREN]:
            if procfs.state_letter(child) == "Z":
                process.children.append(_failed(bare_evidence(child), permission.explain(child, "")))
            elif is_helper(command := procfs.command_line(child)):
                if any(_COMPILES in part for part in command):
                    process.children.append(bare_evidence(child))  # its counters tell whether it works
            elif procfs.is_python(child):
                process.children.append(dump_process(child, timeout_s=timeout_s))
            else:
                process.children.append(_failed(bare_evidence(child), permission.explain(child, "")))
    known = rank if rank is not None else process.rank
    return RankEvidence(
        rank=known if known is not None else -1, host=process.host, t=process.t, process=process
    )


_COMPILES = "compile_worker"
_HELPER_MARKS = (
    "resource_tracker",
    _COMPILES,
    "semaphore_tracker",
    "tensorboard",
    "wandb-core",
    "nvidia-smi",
    "wandb-service",
)


def is_helper(command: Sequence[str]) -> bool:
    """Processes that Python and its libraries start beside a rank and that hold nobody up."""
    named = [os.path.basename(command[0]), *command[1:]] if command else []
    return any(mark in part for part in named for mark in _HELPER_MARKS)


def dump_ranks(
    pids: Iterable[tuple[int, int]],
    *,
    native: bool = False,
    timeout_s: float = 4.0,
    second_timeout_s: float = _SECOND_TIMEOUT_S,
) -> list[RankEvidence]:
    """Evidence of several (rank, pid) at once, in parallel, sorted by rank.

    Ranks that could not be read in time, and do not sleep in the kernel, are looked at once more, two at a
    time and with more time: on a burdened machine the looking itself is what is slow.
    """
    todo = list(pids)
    if not todo:
        return []
    kin = procfs.children_map()

    def look(item: tuple[int, int], limit_s: float) -> RankEvidence:
        return rank_evidence(item[1], rank=item[0], kin=kin, native=native, timeout_s=limit_s)

    with ThreadPoolExecutor(max_workers=min(8, len(todo))) as pool:
        found = dict(zip(todo, pool.map(lambda item: look(item, timeout_s), todo), strict=True))
    again = [item for item, evidence in found.items() if _not_seen(evidence)]
    if again:
        with ThreadPoolExecutor(max_workers=2) as pool:
            found.update(zip(again, pool.map(lambda item: look(item, second_timeout_s), again), strict=True))
    return sorted(found.values(), key=lambda evidence: evidence.rank)


def save_ranks(folder: Path, ranks: Iterable[RankEvidence]) -> None:
    """One file a rank, as stacks/ of a run directory and `diagnose --stacks` have them. Raises OSError."""
    for evidence in ranks:
        write_atomic(folder / f"rank-{evidence.rank}.json", encode_rank(evidence))


def _not_seen(evidence: RankEvidence) -> bool:
    return evidence.process is not None and evidence.process.failure in NOT_SEEN
