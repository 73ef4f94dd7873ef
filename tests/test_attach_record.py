"""Somebody else's job, recorded into a run directory: readers see it run, and nothing is done to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftdash.engine.launch.stop import stop
from ftdash.monitor import control, procs
from ftdash.monitor.attach.here import recorded
from ftdash.monitor.attach.record import ONLY_WATCHED, Recorder
from ftdash.monitor.attach.watch import Watcher
from ftdash.monitor.hostname import NODE_NAME_ENV
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import Manifest, RunDir, RunError
from ftdash.monitor.state import RunPhase, RunState

GIB = 1 << 30
TRAINING = """
import time
print("MA 15.5 GB         Max_MA 55.25 GB         CA 17.5 GB         Max_CA 56 GB ", flush=True)
for step in range(100000):
    print({"loss": 2.0 / (step + 1), "step": step}, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of one job; the first one's log is a file, as a launcher would have it."""
    started = []
    for rank in (0, 1):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "here", "MASTER_PORT": "1", "SLURM_JOB_ID": f"9{os.getpid()}"}
        with (tmp_path / "out.log").open("ab") as log:
            output = log if rank == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen([sys.executable, "-c", TRAINING], env=env, stdout=output))
    yield started
    for process in started:
        process.kill()
        process.wait()


def until(
    reader: RunReader, recorder: Recorder, watcher: Watcher, ready: Callable[[RunState], bool]
) -> RunState:
    end = time.monotonic() + 20
    while True:
        recorder.write(watcher.look())
        state = reader.poll()
        if ready(state):
            return state
        assert time.monotonic() < end, state
        time.sleep(0.05)


def test_ranks_steps_and_ends_reach_readers_and_a_stop_reaches_nobody(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(
        Manifest(run="r", attached=True, state="running", world_size=2, slurm_job_id="7"), tmp_path / "runs"
    )
    monkeypatch.setenv(NODE_NAME_ENV, "node7")  # read from a login node
    watcher, recorder = Watcher(slurm_job=f"9{os.getpid()}"), Recorder(run)
    monkeypatch.delenv(NODE_NAME_ENV)
    reader = RunReader(run)
    state = until(reader, recorder, watcher, lambda state: state.step > 3)
    assert [rank.pid for rank in state.ranks] == [process.pid for process in ranks]
    assert all((rank.memory_used or 0) > 1_000_000 for rank in state.ranks)
    held = [(rank.allocated, rank.peak, rank.reserved) for rank in state.ranks]
    assert held == [(15.5 * GIB, 55.25 * GIB, 17.5 * GIB), (None, None, None)]  # as the log of rank 0 says
    assert state.points[-1].memory_used == 56 * GIB
    assert (state.state, state.ranks[0].loss is not None, state.ranks[1].loss) == ("running", True, None)

    request = control.request_stop(run)
    until(reader, recorder, watcher, lambda state: True)
    assert list(control.answers(request).values()) == [ONLY_WATCHED]
    with pytest.raises(RunError, match="only watched here: scancel 7 ends it"):
        stop(run)
    assert all(procs.alive(process.pid) for process in ranks)

    ranks[1].kill()
    ranks[1].wait()
    state = until(reader, recorder, watcher, lambda state: state.ranks[1].state == "dead")
    assert state.ranks[0].state != "dead"
    reader.close()
    recorder.close()


def test_the_end_of_the_watch_is_told_and_is_not_that_of_the_job(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    (view,) = Watcher(slurm_job=f"9{os.getpid()}").look().jobs

    def command(run: Path) -> list[str]:
        pid = str(ranks[0].pid)
        return [sys.executable, "-m", "ftdash.tui.cli", "attach", "--pid", pid, f"--record={run}"]

    with recorded(view, command, str(tmp_path / "runs")) as run:
        reader = RunReader(run)
        end = time.monotonic() + 20
        while (state := reader.poll()).step < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert state.state is RunPhase.RUNNING
    state = reader.poll()
    assert (state.state, state.manifest.reason) == (RunPhase.STOPPED, "no longer watched")
    assert all(procs.alive(process.pid) for process in ranks)
    reader.close()
