"""A large run is taken in by turns: nothing is lost, what somebody looks at is always new."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftdash.monitor import reader as reading
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Exit, encode_line
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.snapshot import build_state
from ftdash.monitor.state import RankPhase
from tests.support.cluster import Cluster


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cluster, RunDir, RunReader]:
    """Sixteen ranks on eight nodes, taken in in four turns, as 1,024 ranks are."""
    monkeypatch.setattr(reading, "RANKS_A_TURN", 4)
    cluster = Cluster(16, per_node=2, start_t=time.time() - 10)
    run = cluster.create(tmp_path, "wide", steps=3)
    reader = RunReader(run)
    reader.poll()
    return cluster, run, reader


def beats(reader: RunReader) -> list[int]:
    """The step that each rank's agent saw it in, as far as it was taken in."""
    samples = [reader.summary.ranks[rank].sample for rank in range(16)]
    return [sample.beat_step if sample else -1 for sample in samples]


def test_the_first_poll_takes_in_everything(wide):
    _, _, reader = wide
    assert beats(reader) == [3] * 16
    reader.close()


def test_steps_are_new_in_every_poll_and_samples_within_four(wide):
    cluster, run, reader = wide
    for step in range(4, 8):
        cluster.append(run, step)
        state = reader.poll()
        assert state.step == step
        assert state.tokens_per_s == pytest.approx(16 * 4096, rel=0.01)
    assert sorted(beats(reader)) == sorted([4, 5, 6, 7] * 4)
    assert {rank.step for rank in state.ranks} == {4, 5, 6, 7}
    for _ in range(3):
        state = reader.poll()
    assert beats(reader) == [7] * 16
    assert {rank.step for rank in state.ranks} == {7}
    reader.close()


def test_a_rank_that_is_looked_at_is_new_in_every_poll(wide):
    cluster, run, reader = wide
    reader.attend((5, 10))
    for step in range(4, 8):
        cluster.append(run, step)
        state = reader.poll()
        for number in (5, 10):
            assert state.ranks[number].step == step
            assert beats(reader)[number] == step
    reader.close()


def test_samples_that_a_newer_one_followed_leave_their_trace(wide):
    cluster, run, reader = wide
    before = [len(reader.history.ranks[rank].states) for rank in range(16)]
    for step in range(4, 7):
        cluster.append(run, step)
    for _ in range(4):
        reader.poll()
    assert [len(reader.history.ranks[rank].states) for rank in range(16)] == [n + 3 for n in before]
    assert beats(reader) == [6] * 16
    reader.close()


def test_a_torn_sample_and_an_exit_between_samples_are_not_lost(wide):
    cluster, run, reader = wide
    for step in (4, 5):
        cluster.append(run, step)
    ended = Exit(t=time.time(), rank=6, pid=1006, code=1, host="node0003")
    torn = [encode_line(record) for record in cluster.node_records(3, 6)][:3]  # rank 7 is still to come
    with run.node_file("node0003").open("ab") as handle:
        handle.write(encode_line(ended) + b"".join(torn))
    for _ in range(4):
        state = reader.poll()
    assert beats(reader)[6:8] == [6, 5]
    assert state.ranks[6].state is RankPhase.DEAD
    assert state.ranks[7].state is not RankPhase.DEAD
    reader.close()


def test_where_polls_are_rare_all_have_their_turn_in_each(wide, monkeypatch):
    cluster, run, reader = wide
    monkeypatch.setattr(reading, "TURN_S", 0.0)
    cluster.append(run, 4)
    state = reader.poll()
    assert beats(reader) == [4] * 16
    assert {rank.step for rank in state.ranks} == {4}
    reader.close()


def test_who_reads_a_run_whole_has_it_said_once_however_slow_the_reading(wide, monkeypatch):
    _, run, reader = wide
    reader.close()
    monkeypatch.setattr(reading, "POLL_BUDGET_S", 0.0)  # a poll takes in one file
    said = []
    monkeypatch.setattr(reading, "build_state", lambda *a, **kw: said.append(1) or build_state(*a, **kw))
    state = RunReader(run).read_whole()
    assert ([rank.step for rank in state.ranks], len(said)) == ([3] * 16, 1)
