"""New agents are sent to silent machines: seldom, in the background, and not for ever."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from ftdash.engine.launch import again
from ftdash.monitor.rundir import Manifest, RunDir, RunError
from ftdash.monitor.state import Alert, RankState, RunPhase, RunState


def state_of(*silent: int) -> RunState:
    """Four ranks on two nodes; one alert a silent rank's node."""
    return RunState(
        run="r",
        path="",
        manifest=Manifest(run="r", backend="slurm", state="running"),
        state=RunPhase.RUNNING,
        now=time.time(),
        ranks=tuple(RankState(rank=rank, host=f"node{rank // 2}") for rank in range(4)),
        alerts=tuple(Alert("node-silent", "error", "no word", (rank,)) for rank in silent),
    )


def test_a_silent_node_is_seen_to_once_and_again_only_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    answered = threading.Event()

    def start_on(run: RunDir, hosts: set[str]) -> bool:
        asked.append(hosts)
        answered.set()
        return True

    monkeypatch.setattr(again, "start_on", start_on)
    agents = again.NewAgents(RunDir("r"))
    assert agents.look(state_of()).notices == ()
    for _ in range(5):
        agents.look(state_of(3))
    assert answered.wait(10)
    while not agents.told:
        time.sleep(0.01)
    assert asked == [{"node1"}]
    assert agents.look(state_of()).notices == ("the agent on node1 was gone: another is beside the ranks",)


def test_a_node_that_takes_no_agent_is_left_alone_after_three_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def start_on(run: RunDir, hosts: set[str]) -> bool:
        tries.append("")
        raise RunError("node1: it is down")

    monkeypatch.setattr(again, "start_on", start_on)
    monkeypatch.setattr(again, "BETWEEN_TRIES_S", 0.0)
    agents = again.NewAgents(RunDir("r"))
    end = time.monotonic() + 20
    while len(tries) < again.TRIES:
        agents.look(state_of(2))
        assert time.monotonic() < end
        time.sleep(0.01)
    for _ in range(20):
        agents.look(state_of(2))
        time.sleep(0.01)
    assert len(tries) == again.TRIES
    assert agents.told == "no new agent beside the ranks: node1: it is down"


def test_somebody_elses_job_and_an_ended_run_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "start_on", lambda *_: pytest.fail("started"))
    silent = state_of(3)
    attached = replace(silent, manifest=Manifest(run="r", attached=True))
    for state in (attached, replace(silent, state=RunPhase.FAILED)):
        assert again.NewAgents(RunDir("r")).look(state) is state
        assert again.offered(state) is state
    assert "ftdash agent --adopt r" in again.offered(silent).notices[0]
