"""Which processes are the ranks of a job, and which are what a rank left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ftdash.monitor.diagnosis.processes import find_trainers

RANK = """
import os, sys, time
if os.environ["RANK"] == "1" and os.fork():
    os._exit(0)  # its child keeps the rank's environment, and its sockets if it had some
time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
env["MASTER_PORT"] = str(os.getpid())  # nobody listens: it only tells jobs apart
ranks = [subprocess.Popen([sys.executable, sys.argv[1]], env={**env, "RANK": str(n)}) for n in range(3)]
for rank in ranks:
    rank.wait()
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_an_ended_rank_left_behind_is_not_the_rank(tmp_path: Path) -> None:
    launcher, rank = tmp_path / "torchrun", tmp_path / "rank.py"
    launcher.write_text(LAUNCHER)
    rank.write_text(RANK)
    job = subprocess.Popen([sys.executable, launcher, rank], start_new_session=True)
    try:
        wait_for(lambda: len(_of_session(job.pid, "")) == 3 and _parents(job.pid, "1") - {job.pid} != set())
        assert job.pid not in _parents(job.pid, "1")
        for start in (job.pid, *_of_session(job.pid, "0")):
            assert [trainer.rank for trainer in find_trainers([start])] == [0, 2]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


SPAWNS = """
import multiprocessing, time
if __name__ == "__main__":
    ranks = [multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


def test_processes_that_a_plain_script_starts_and_joins_are_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "fleet.py"
    script.write_text(SPAWNS)
    job = subprocess.Popen([sys.executable, script], start_new_session=True)
    children = psutil.Process(job.pid).children
    try:
        wait_for(lambda: [trainer.pid for trainer in find_trainers([job.pid])] != [job.pid])
        wait_for(lambda: len(find_trainers([job.pid])) == 3)
        found = find_trainers([job.pid])
        assert [(trainer.rank, trainer.pid) for trainer in found] == [
            (number, child.pid) for number, child in enumerate(sorted(children(), key=lambda c: c.pid))
        ]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _parents(session: int, rank: str) -> set[int]:
    return {psutil.Process(pid).ppid() for pid in _of_session(session, rank)}


def _of_session(session: int, rank: str) -> list[int]:
    """Living ranks of a session: one of them, or "" for all."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                bears = process.environ().get("RANK")
                if bears is not None and rank in ("", bears):
                    found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_a_shell_above_a_launcher_without_ranks_is_no_rank(tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text("import time; time.sleep(600)")
    shell = ["/bin/sh", "-c", f"'{sys.executable}' '{launcher}'; echo $?"]
    job = subprocess.Popen(shell, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        wait_for(
            lambda: any("torchrun" in " ".join(one.cmdline()) for one in psutil.Process(job.pid).children())
        )
        assert find_trainers([job.pid]) == []
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
