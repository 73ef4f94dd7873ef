"""Real processes under a real agent: how runs end, what kills them, and what does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftdash.monitor import control, procs
from ftdash.monitor.rundir import RunDir, RunError, find_run
from ftdash.monitor.state import RankPhase, RunPhase
from ftdash.monitor.stop import stop_run
from tests.support.live_runs import agent_pid, processes_of, read, start_run, wait_for, wait_until

ENDED = (RunPhase.FINISHED, RunPhase.FAILED, RunPhase.STOPPED)


def adopting_agent(run: RunDir) -> list[str]:
    return [sys.executable, "-m", "ftdash.monitor.agent", "--adopt", str(run.path)]


def test_a_run_that_ends_by_itself_is_finished_with_every_exit_code(tmp_path: Path) -> None:
    run = start_run(tmp_path, 3, "--steps", "10")
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FINISHED
    assert {end.rank: end.code for end in state.manifest.exits} == {0: 0, 1: 0, 2: 0}
    assert state.manifest.exit_code == 0
    assert state.manifest.world_size == 3
    assert [rank.step for rank in state.ranks] == [10, 10, 10]
    assert all(rank.state is RankPhase.FINISHED for rank in state.ranks)
    assert state.experts[0].counts == (9, 3)
    wait_until(lambda: not processes_of(run))


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7), ("kill", -9)])
def test_a_failing_rank_is_named_first_with_its_code_and_words(tmp_path: Path, how: str, code: int) -> None:
    run = start_run(tmp_path, 3, "--steps", "400", "--fail", f"1:5:{how}")
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FAILED
    assert state.manifest.first_failing_rank == 1
    assert {end.rank: end.code for end in state.manifest.exits}[1] == code
    assert {end.code for end in state.manifest.exits if end.rank != 1} == {-15}
    assert ("loss went to the moon [/usr/bin/x]" in state.manifest.reason) == (how == "raise")
    assert "rank 1" in state.manifest.reason


def test_a_rank_killed_from_outside_fails_the_run_and_is_named(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "4000")
    state = wait_for(run, lambda state: all(rank.step > 2 for rank in state.ranks) and len(state.ranks) == 2)
    os.kill(state.ranks[1].pid, signal.SIGKILL)
    state = wait_for(run, lambda state: state.state in ENDED)
    assert (state.state, state.manifest.first_failing_rank) == (RunPhase.FAILED, 1)
    assert state.manifest.reason == "rank 1: killed by SIGKILL"
    assert state.ranks[1].state is RankPhase.DEAD


def test_stop_returns_when_every_process_is_gone_even_one_that_ignores_sigterm(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "4000", "--ignore-term", "--escape")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 0 for rank in state.ranks))
    assert stop_run(run, grace_s=0.5) == set()
    assert not processes_of(run)
    state = read(run)
    assert state.state is RunPhase.STOPPED
    assert {end.code for end in state.manifest.exits} == {-9}
    assert state.manifest.first_failing_rank is None


@pytest.mark.parametrize("adopted", [False, True])
def test_how_a_killed_launcher_ended_is_known_though_its_agent_is_gone(tmp_path: Path, adopted: bool) -> None:
    run = start_run(tmp_path, 2, "--steps", "4000", "--ignore-term")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 0 for rank in state.ranks))
    first = agent_pid(run)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not procs.agent_alive(run.path, first))
    if adopted:
        subprocess.Popen(adopting_agent(run), start_new_session=True)
        wait_until(lambda: agent_pid(run) != first)
    assert stop_run(run, grace_s=0.5) == set()
    state = read(run)
    assert (state.state, state.manifest.exit_code) == (RunPhase.STOPPED, -9)
    assert not processes_of(run)


def test_a_stopped_rank_makes_the_run_stalled_and_stop_still_ends_it(tmp_path: Path) -> None:
    run = start_run(tmp_path, 1, "--steps", "4000")
    state = wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 2)
    os.kill(state.ranks[0].pid, signal.SIGSTOP)
    state = wait_for(run, lambda state: state.state is RunPhase.STALLED)
    assert state.ranks[0].state is RankPhase.STALLED
    assert any(alert.code == "stalled" and alert.ranks == (0,) for alert in state.alerts)
    assert state.tokens_per_s == 0.0
    stop_run(run, grace_s=5)
    assert not processes_of(run)


def test_killing_the_agent_leaves_training_alive_and_the_end_is_still_told(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "60")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    os.kill(agent_pid(run), signal.SIGKILL)
    state = wait_for(run, lambda state: any("agent" in notice for notice in state.notices))
    assert state.state is RunPhase.RUNNING
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FINISHED
    assert [rank.step for rank in state.ranks] == [60, 60]
    stop_run(run, grace_s=2)
    assert read(run).manifest.state == RunPhase.FINISHED


@pytest.mark.slow
def test_without_an_agent_a_failure_is_still_a_failure(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "4000")
    state = wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    os.kill(agent_pid(run), signal.SIGKILL)
    wait_until(lambda: not procs.agent_alive(run.path, agent_pid(run)))
    os.kill(state.ranks[0].pid, signal.SIGKILL)
    state = wait_for(run, lambda state: state.state in ENDED)
    assert state.state is RunPhase.FAILED
    assert state.manifest.exit_code == 1
    stop_run(run, grace_s=2)
    assert read(run).manifest.state == RunPhase.FAILED


@pytest.mark.slow
def test_sigterm_ends_a_detached_agent_but_not_its_training(tmp_path: Path) -> None:
    run = start_run(tmp_path, 1, "--steps", "4000")
    wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 0)
    os.kill(agent_pid(run), signal.SIGTERM)
    wait_until(lambda: not procs.agent_alive(run.path, agent_pid(run)))
    assert len(procs.pids_of_run(run.path)) >= 3
    stop_run(run, grace_s=2)
    assert not processes_of(run)
    assert read(run).state is RunPhase.STOPPED


@pytest.mark.slow
def test_an_agent_can_adopt_a_run_and_sees_it_end(tmp_path: Path) -> None:
    run = start_run(tmp_path, 2, "--steps", "100", "--fail", "1:90:exit")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 2 for rank in state.ranks))
    first = agent_pid(run)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not procs.agent_alive(run.path, first))
    command = adopting_agent(run)
    with subprocess.Popen(command, start_new_session=True) as adopting:
        wait_until(lambda: agent_pid(run) != first)
        refused = subprocess.run(command, capture_output=True, text=True)
        assert (refused.returncode, "living agent" in refused.stderr) == (2, True)
        adopting.wait(60)
    state = read(run)
    assert (state.state, state.manifest.first_failing_rank) == (RunPhase.FAILED, 1)
    assert {end.rank: end.code for end in state.manifest.exits} == {0: -15, 1: 7}


def test_a_dump_request_gives_a_file_for_every_rank(tmp_path: Path) -> None:
    from ftdash.monitor.diagnosis.model import decode_rank

    run = start_run(tmp_path, 2, "--steps", "4000", "--hang-at", "3")
    wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step == 2 for rank in state.ranks))
    folder = control.request_dump(run)
    wait_until(lambda: all((folder / f"rank-{rank}.json").exists() for rank in (0, 1)))
    for rank in (0, 1):
        evidence = decode_rank((folder / f"rank-{rank}.json").read_bytes())
        assert evidence.rank == rank
        frames = [frame for thread in evidence.process.threads for frame in thread.frames]
        assert any(frame.file.endswith("fake_rank.py") for frame in frames)
    stop_run(run, grace_s=2)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_a_request_of_another_user_is_not_honoured(tmp_path: Path) -> None:
    run = start_run(tmp_path, 1, "--steps", "4000")
    state = wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 0)
    request = control.request_stop(run)
    os.chown(request, 65534, 65534)
    step = state.ranks[0].step
    wait_for(run, lambda state: state.ranks[0].step > step + 40)
    assert procs.alive(state.ranks[0].pid)
    stop_run(run, grace_s=2)


@pytest.mark.slow
def test_nothing_to_adopt_is_said_in_one_line(tmp_path: Path) -> None:
    from ftdash.monitor.agent.agent import adoptable

    run = start_run(tmp_path, 1, "--steps", "2")
    wait_for(run, lambda state: state.state in ENDED)
    with pytest.raises(RunError, match="nothing to adopt"):
        adoptable(run)


def test_a_run_is_known_through_a_link_and_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    run = start_run(tmp_path / "link", 1, "--steps", "4000")
    wait_for(run, lambda state: bool(state.ranks) and state.ranks[0].step > 0)
    monkeypatch.chdir(tmp_path / "link")
    found = find_run(run.run_id)
    os.kill(agent_pid(found), signal.SIGKILL)
    assert len(procs.pids_of_run(found.path)) >= 3
    assert stop_run(found, grace_s=2) == set()
    assert not processes_of(run)
