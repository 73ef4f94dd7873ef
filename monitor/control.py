"""Requests from screens and scripts to the agents of a run: one small file each in control/.

A request is honoured only when the file belongs to the user that the agent runs as. The agent of each
node leaves `<request>.done-<host>` beside a request that it has served, so every node serves it once;
the file holds the agent's answer in one line, or nothing where there is nothing to say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from ftdash.monitor.rundir import RunDir, RunError, decode_json, write_atomic


class Action(StrEnum):
    DUMP = "dump"
    STOP = "stop"
    SAVE_AND_STOP = "save-and-stop"
    SIGNAL = "signal"


class RankSignal(StrEnum):
    """What may be sent to one rank."""

    STACKS = "SIGUSR2"  # the hook writes all stacks
    CONTINUE = "SIGCONT"
    KILL = "SIGKILL"


class Request(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request. `ranks` is None for all of them; `stamp` names the folder below stacks/."""

    action: Action
    t: float
    stamp: str = ""
    ranks: list[int] | None = None
    native: bool = False
    grace_s: float = 20.0  # between SIGTERM and SIGKILL
    signal: RankSignal | None = None
    pid: int = 0  # of a signal: the process that was meant; another one in the rank's place is left alone


def request_stop(run: RunDir, save: bool = False, grace_s: float = 20.0) -> Path:
    """Ask the run's agents to end it, after a checkpoint when `save`. Raises RunError."""
    action = Action.SAVE_AND_STOP if save else Action.STOP
    return _post(run, Request(action=action, t=time.time(), grace_s=grace_s))


def request_dump(run: RunDir, ranks: Iterable[int] | None = None, native: bool = False) -> Path:
    """Ask for stack dumps; returns the folder below stacks/ where rank-<R>.json will appear."""
    return ask_for_dump(run, ranks, native)[1]


def ask_for_dump(run: RunDir, ranks: Iterable[int] | None = None, native: bool = False) -> tuple[Path, Path]:
    """`request_dump` that also gives the request itself, for `unanswered`: (request, folder)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{uuid.uuid4().hex[:4]}"
    chosen = None if ranks is None else sorted(set(ranks))
    path = _post(run, Request(action=Action.DUMP, t=time.time(), stamp=stamp, ranks=chosen, native=native))
    return path, run.stacks / stamp


def request_signal(run: RunDir, rank: int, pid: int, signal: RankSignal) -> Path:
    """Ask for a signal to one rank's process, known by its pid; returns the request. Raises RunError."""
    request = Request(action=Action.SIGNAL, t=time.time(), ranks=[rank], signal=signal, pid=pid)
    return _post(run, request)


def _post(run: RunDir, request: Request) -> Path:
    path = run.control / f"{int(request.t * 1000)}-{uuid.uuid4().hex[:6]}-{request.action}.json"
    try:
        write_atomic(path, msgspec.json.encode(request))
    except OSError as error:
        raise RunError(f"cannot write a request into {run.control}: {error.strerror or error}") from error
    return path


def pending(run: RunDir, host: str, uid: int) -> list[tuple[Path, Request]]:
    """Requests that this node has not served yet, oldest first. Foreign or broken files are left out."""
    try:
        names = sorted(os.listdir(run.control))
    except OSError:
        return []
    served = {name.removesuffix(f".done-{host}") for name in names if name.endswith(f".done-{host}")}
    found = []
    for name in names:
        if not name.endswith(".json") or name.startswith(".") or name in served:
            continue
        path = run.control / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid != uid:
                continue
            found.append((path, decode_json(os.read(fd, 65536), Request)))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        finally:
            os.close(fd)
    return found


def mark_served(path: Path, host: str, answer: str = "") -> None:
    """Remember that this node has served the request; `answer` is one line for who asked."""
    with open(f"{path}.done-{host}", "wb", buffering=0) as handle, contextlib.suppress(OSError):
        handle.write(answer.encode())  # on a full disk the empty file still says: served


def answers(path: Path) -> dict[str, str]:
    """By host, what the agents have answered to the request so far; an empty answer means: not mine."""
    found = {}
    for done in path.parent.glob(f"{path.name}.done-*"):
        with contextlib.suppress(OSError):
            found[done.name.removeprefix(f"{path.name}.done-")] = done.read_text(errors="replace")[:1000]
    return found


def main(argv: list[str]) -> int:
    """`python -m ftdash.monitor.control ACTION RUN_DIR`: post a request, for batch scripts."""
    for_all = [action for action in Action if action is not Action.SIGNAL]
    if len(argv) != 2 or argv[0] not in for_all:
        sys.stderr.write(f"usage: python -m ftdash.monitor.control {'|'.join(for_all)} RUN_DIR\n")
        return 2
    try:
        _post(RunDir(argv[1]), Request(action=Action(argv[0]), t=time.time()))
    except RunError as error:
        sys.stderr.write(f"ftdash: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
