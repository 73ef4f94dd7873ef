"""Real trainings of two and four ranks with one planted fault each raise exactly the alert of that fault."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, find_run
from ftdash.monitor.state import Alert, RunPhase, RunState

SCRIPT = Path(__file__).parent / "support" / "faulty_train.py"
CLI = [sys.executable, "-c", "from ftdash.tui.cli import main; main()"]
TIMEOUT_S = 150.0


def train(
    fault: str,
    root: Path,
    each_poll: Callable[[RunState], None] = lambda state: None,
    steps: int = 70,
    ranks: int = 2,
) -> tuple[RunState, dict[str, list[Alert]]]:
    """Run the training under the agent; its last state, and every alert that was raised, by code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch = [*CLI, "launch", "--detach", "--runs", str(root), "--", *torchrun, str(SCRIPT)]
    env = {**os.environ, "FAULT": fault, "STEPS": str(steps), "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(launch, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    run = find_run("last", root)
    reader = RunReader(run)
    found: dict[str, list[Alert]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while True:
            state = reader.poll()
            for alert in state.alerts:
                if not found.get(alert.code) or found[alert.code][-1].text != alert.text:
                    found.setdefault(alert.code, []).append(alert)
            each_poll(state)
            if state.state in (RunPhase.FINISHED, RunPhase.FAILED, RunPhase.STOPPED):
                assert state.state is RunPhase.FINISHED, log_of(run)
                return state, found
            assert time.monotonic() < deadline, log_of(run)
            time.sleep(0.1)
    finally:
        reader.close()


def log_of(run: RunDir) -> str:
    return "\n".join(
        path.read_text(errors="replace")[-3000:] for path in run.logs.rglob("*") if path.is_file()
    )


pytestmark = pytest.mark.slow


def test_equal_ranks_raise_nothing(tmp_path):
    state, found = train("", tmp_path)
    assert len(state.ranks) == 2
    assert state.experts
    assert found == {}


def test_among_four_ranks_only_the_one_with_slow_data_is_named_with_its_wait(tmp_path):
    state, found = train("slow-data", tmp_path, ranks=4, steps=50)
    assert len(state.ranks) == 4
    assert set(found) == {"straggler"}, found
    for alert in found["straggler"]:
        assert alert.ranks == (1,)
        assert "loading data" in alert.text
        assert "waiting for data" in alert.text or "own data" in alert.text


def test_a_rank_on_a_slow_host_is_named_with_the_phase(tmp_path):
    _, found = train("slow-host", tmp_path)
    assert set(found) == {"straggler"}
    assert {alert.ranks for alert in found["straggler"]} == {(1,)}
    assert "forward" in found["straggler"][-1].text


@contextlib.contextmanager
def limited(pid_of: Callable[[], int]) -> Iterator[None]:
    """As cpulimit does, all the time from when `pid_of` names a process: let it run and stop it, in turns.

    Whoever polls the run may be as slow as it likes meanwhile.
    """
    over = threading.Event()

    def limit() -> None:
        while not over.wait(0.02):
            if pid := pid_of():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    over.wait(0.12)
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_process_that_is_stopped_again_and_again_is_named_with_that_cause(tmp_path):
    pid = 0

    def look(state: RunState) -> None:
        nonlocal pid
        pid = next((rank.pid for rank in state.ranks if rank.rank == 1 and rank.step >= 5), pid)

    with limited(lambda: pid):
        _, found = train("throttled", tmp_path, look, steps=60)
    assert "straggler" in found
    assert {alert.ranks for alert in found["straggler"]} == {(1,)}
    assert any("being stopped" in alert.text for alert in found["straggler"]), found


def test_a_nan_names_the_rank_where_it_began(tmp_path):
    _, found = train("nan", tmp_path, steps=30)
    assert "loss-nan" in found
    assert found["loss-nan"][0].ranks == (1,)
    assert "step 21" in found["loss-nan"][0].text
    assert set(found) <= {"loss-nan", "grad-nan"}


def test_a_dead_expert_is_named(tmp_path):
    _, found = train("dead-expert", tmp_path)
    assert set(found) == {"expert-dead"}
    assert "L0/E5" in found["expert-dead"][-1].text


def test_memory_that_grows_is_named_with_its_rank_and_rate(tmp_path):
    _, found = train("leak", tmp_path, steps=80)
    assert set(found) == {"memory-creep"}, found
    assert {alert.ranks for alert in found["memory-creep"]} == {(1,)}
    rate = float(found["memory-creep"][-1].text.split("grows by ")[1].split(" MiB")[0])
    assert 6 < rate < 10
