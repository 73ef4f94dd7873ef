"""Requests from screens and scripts to the agents of a run: one small file each in control/.

A request is honoured only when the file belongs to the user that the agent runs as. The agent of each
node leaves `<request>.done-<host>` beside a request that it has served, so every node serves it once.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from ftdash.monitor.rundir import RunDir, RunError, write_atomic


class Action(StrEnum):
    DUMP = "dump"
    STOP = "stop"
    SAVE_AND_STOP = "save-and-stop"


class Request(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request. `ranks` is None for all of them; `stamp` names the folder below stacks/."""

    action: Action
    t: float
    stamp: str = ""
    ranks: list[int] | None = None
    native: bool = False
    grace_s: float = 20.0  # between SIGTERM and SIGKILL


def request_stop(run: RunDir, save: bool = False, grace_s: float = 20.0) -> Path:
    """Ask the run's agents to end it, after a checkpoint when `save`. Raises RunError."""
    action = Action.SAVE_AND_STOP if save else Action.STOP
    return _post(run, Request(action=action, t=time.time(), grace_s=grace_s))


def request_dump(run: RunDir, ranks: Iterable[int] | None = None, native: bool = False) -> Path:
    """Ask for stack dumps; returns the folder below stacks/ where rank-<R>.json will appear."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{uuid.uuid4().hex[:4]}"
    chosen = None if ranks is None else sorted(set(ranks))
    _post(run, Request(action=Action.DUMP, t=time.time(), stamp=stamp, ranks=chosen, native=native))
    return run.stacks / stamp


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
            found.append((path, msgspec.json.decode(os.read(fd, 65536), type=Request)))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        finally:
            os.close(fd)
    return found


def mark_served(path: Path, host: str) -> None:
    """Remember that this node has served the request."""
    with open(f"{path}.done-{host}", "wb"):
        pass


def main(argv: list[str]) -> int:
    """`python -m ftdash.monitor.control ACTION RUN_DIR`: post a request, for batch scripts."""
    if len(argv) != 2 or argv[0] not in list(Action):
        sys.stderr.write(f"usage: python -m ftdash.monitor.control {'|'.join(Action)} RUN_DIR\n")
        return 2
    try:
        _post(RunDir(argv[1]), Request(action=Action(argv[0]), t=time.time()))
    except RunError as error:
        sys.stderr.write(f"ftdash: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
