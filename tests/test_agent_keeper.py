"""Where a scheduler watches the agent's task, killing the agent ends neither the task nor training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.beat import read_beat
from ftdash.monitor.rundir import RunDir
from tests.support.live_runs import LAUNCHER, make_run, processes_of, wait_until


@contextmanager
def kept_run(root: Path, *words: str) -> Iterator[tuple[RunDir, subprocess.Popen[str]]]:
    """Keeper, agent, launcher and one rank, once the rank steps."""
    run = make_run(root)
    agent = [sys.executable, "-m", "ftdash.monitor.agent", "--run", str(run.path), "--node-rank", "0", "--"]
    keeper = [sys.executable, "-m", "ftdash.monitor.agent.keep", str(run.path), "0", "--"]
    argv = [*keeper, *agent, sys.executable, str(LAUNCHER), "1", *words]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (beat := read_beat(run.beat_file(0))) is not None and beat.step > 2)
        yield run, process
    finally:
        process.kill()
        process.communicate()
        procs.send(processes_of(run), signal.SIGKILL)


def kill_agent(run: RunDir, keeper: subprocess.Popen[str]) -> None:
    (agent,) = procs.pids_of_run(run.path, procs.AGENT_ENV)
    assert procs.read_stat(agent).ppid == keeper.pid
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not procs.alive(agent))


def test_the_task_ends_with_training_and_its_exit_status_when_the_agent_was_killed(tmp_path: Path) -> None:
    with kept_run(tmp_path, "--steps", "60", "--fail", "0:60:exit") as (run, keeper):
        kill_agent(run, keeper)
        before = read_beat(run.beat_file(0)).step
        wait_until(lambda: read_beat(run.beat_file(0)).step > before + 3)
        assert keeper.poll() is None
        _, words = keeper.communicate(timeout=30)
        assert keeper.returncode == 1  # the launcher's, whose rank failed
        assert "was killed by SIGKILL; training goes on without it" in words
        assert not processes_of(run)


def test_a_signal_to_the_task_reaches_the_launcher_when_the_agent_was_killed(tmp_path: Path) -> None:
    with kept_run(tmp_path, "--steps", "100000") as (run, keeper):
        kill_agent(run, keeper)
        keeper.send_signal(signal.SIGTERM)
        keeper.communicate(timeout=30)
        wait_until(lambda: not processes_of(run))


def test_the_tasks_exit_status_is_the_agents_while_it_lives(tmp_path: Path) -> None:
    with kept_run(tmp_path, "--steps", "40") as (run, keeper):
        keeper.communicate(timeout=60)
        assert keeper.returncode == 0
        assert run.read_manifest().state == "finished"
