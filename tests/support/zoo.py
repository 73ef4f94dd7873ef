"""Starts a case of the hang zoo as gloo ranks, waits until it stands where it should, and always ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ftdash.monitor.diagnosis import procfs

ZOO = Path(__file__).parents[1] / "diagnosis" / "zoo"
START_S = 120.0
SETTLED_S = 0.4
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        if process.stdin:
            process.stdin.close()


@contextlib.contextmanager
def job(
    folder: Path, script: str, case: str, ranks: int, *, world: int | None = None, settle: bool = True
) -> Iterator[list[int]]:
    """The pids of the ranks of a case, each ready; killed with all their children at the end."""
    environ = {
        **os.environ,
        "WORLD_SIZE": str(world or ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ZOO_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with open(folder / f"rank-{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(ZOO / script), case],
                        env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        _wait_ready(folder, processes)
        pids = [process.pid for process in processes]
        if settle:
            _wait_settled(pids)
        yield pids
    finally:
        _end(processes)


def _wait_ready(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_S
    missing = set(range(len(processes)))
    while missing:
        missing = {rank for rank in missing if not (folder / f"ready-{rank}").exists()}
        for rank in missing:
            if processes[rank].poll() is not None:
                raise AssertionError(
                    f"rank {rank} ended early: {(folder / f'rank-{rank}.log').read_text()[-2000:]}"
                )
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks {sorted(missing)} did not start")
        time.sleep(0.05)


def _wait_settled(pids: list[int]) -> None:
    """Until all ranks but one at most sleep without waking up: the others have arrived where they wait."""
    deadline, since = time.monotonic() + 20.0, time.monotonic()
    last: list[int] = []
    while time.monotonic() < deadline and time.monotonic() - since < SETTLED_S:
        states = [procfs.proc_state(pid) for pid in pids]
        sleeps = sorted(state.main_sleeps for state in states if state.state in ("S", "D"))
        asleep = [state.main_sleeps if state.state in ("S", "D") else -1 for state in states]
        moved = sum(1 for old, new in zip(last, asleep, strict=False) if old != new)
        if moved > 1 or len(sleeps) < len(pids) - 1 or not last:
            since = time.monotonic()
        last = asleep
        time.sleep(0.05)


def named_lines(script: str, case: str) -> set[int]:
    """Lines that a verdict may name: marked `# named` in the case's function, or by its name anywhere."""
    text = (ZOO / script).read_text().splitlines()
    starts = [number for number, line in enumerate(text, 1) if re.match(r"(?:def|class) ", line)] + [
        len(text) + 1
    ]
    at = next(number for number, line in enumerate(text, 1) if line.startswith(f"def {case}("))
    end = next(number for number in starts if number > at)
    inside = {number for number in range(at, end) if text[number - 1].endswith("# named")}
    return inside | {number for number, line in enumerate(text, 1) if line.endswith(f"# named: {case}")}


def eventually(look: Callable[[], T], good: Callable[[T], bool], within_s: float = 60.0) -> T:
    """Look until it is good, or the time is over; the last look."""
    deadline = time.monotonic() + within_s
    while True:
        seen = look()
        if good(seen) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)
