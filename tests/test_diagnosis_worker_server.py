"""Torch's worker server of live ranks: what only the flight recorder tells, and stacks without ptrace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import collect, diagnose, live, procfs, workerserver
from ftdash.monitor.diagnosis.model import DumpFailure, ProcessEvidence
from ftdash.monitor.hook import process
from ftdash.monitor.inject.own import python_path
from tests.support import zoo


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Three ranks that make the same call on different groups, started as `ftdash launch` starts a script.

    Their run directory has a longer path than a socket's address can hold.
    """
    folder = tmp_path_factory.mktemp("served")
    run = folder / ("a-long-name-" * 10)
    (run / "control").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTDASH_RUN_DIR", str(run))
        patch.setenv("PYTHONPATH", python_path(os.environ.get("PYTHONPATH", "")))
        with zoo.job(folder, "served.py", "groups_in_another_order", 3) as pids:
            yield pids


@pytest.mark.slow
def test_a_rank_with_another_group_is_named_by_its_flight_recorder(served: list[int]) -> None:
    samples = live.sample_processes(served, interval_s=1.0)
    assert [dump.rank for dump in samples[-1].flight] == [0, 1, 2]
    verdict = diagnose(samples).verdict
    assert {culprit.rank for culprit in verdict.culprits} == {1}, verdict
    assert any("flight recorder" in text for text in verdict.evidence)


@pytest.mark.slow
def test_stacks_come_from_the_server_where_ptrace_is_refused(
    served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ProcessEvidence(pid=served[0], rank=0, failure=DumpFailure.YAMA, failure_text="refused")
    monkeypatch.setattr(collect, "_dump_with_pyspy", lambda pid, native, timeout_s: refused)
    evidence = collect.dump_process(served[0])
    assert evidence.failure is None
    assert (evidence.source, evidence.moved) == ("worker server", "")
    assert any(frame.short == "all_reduce" for thread in evidence.threads for frame in thread.frames)


@pytest.mark.slow
def test_a_child_with_its_parents_rank_leaves_the_server_to_it(
    served: list[int],
) -> None:
    control = Path(procfs.environment(served[1])["FTDASH_RUN_DIR"]) / "control"
    assert not process.serve_flight_recorder(control, 1)
    assert workerserver.flight_dumps([(1, served[1])])[0].rank == 1


def test_a_process_without_a_server_is_not_asked() -> None:
    assert workerserver.socket_of(os.getpid(), 0) == ""
    assert workerserver.flight_dumps([(0, os.getpid())]) == ()
    assert workerserver.stacks(os.getpid(), 0) == ""
