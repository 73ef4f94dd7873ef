"""A rank that nobody could look at in time is neither guilty nor cleared."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import collect, diagnose, procfs
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import DumpFailure, ProcessEvidence, ProcState, RankEvidence, Sample
from ftdash.monitor.diagnosis.rundata import unanswered_ranks
from tests.support import zoo
from tests.test_diagnosis_motion import ALL_REDUCE, BACKWARD, look


def two_looks_at(pid: int) -> tuple[ProcState, ProcState]:
    first = procfs.proc_state(pid)
    time.sleep(0.1)
    return first, procfs.proc_state(pid)


@pytest.fixture
def python() -> Iterator[int]:
    """A Python process that waits for its standard input."""
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        zoo.eventually(lambda: two_looks_at(process.pid), lambda seen: seen[0] == seen[1])
        yield process.pid
        process.kill()


@pytest.fixture
def pyspy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for py-spy: what it does is written by the test. It counts its calls in `calls`."""
    tool = tmp_path / "py-spy"
    monkeypatch.setattr(collect, "pyspy_path", lambda: str(tool))
    return tool


def write_tool(tool: Path, body: str) -> None:
    tool.write_text(f"#!/bin/sh\necho x >> {tool.parent}/calls\n{body}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def calls(tool: Path) -> int:
    return len((tool.parent / "calls").read_text().splitlines())


STACK = '[{"thread_name": "MainThread", "frames": [{"name": "main", "filename": "train.py", "line": 3}]}]'


def test_a_dump_that_took_too_long_is_taken_once_more_with_more_time(python: int, pyspy: Path) -> None:
    write_tool(pyspy, f"[ $(wc -l < {pyspy.parent}/calls) = 1 ] && exec sleep 60\necho '{STACK}'")
    (evidence,) = collect.dump_ranks([(0, python)], timeout_s=0.3)
    assert evidence.process is not None
    assert evidence.process.failure is None
    assert [frame.name for frame in evidence.threads[0].frames] == ["main"]
    assert calls(pyspy) == 2


def test_the_second_time_is_the_last(python: int, pyspy: Path) -> None:
    write_tool(pyspy, "exec sleep 60")
    (evidence,) = collect.dump_ranks([(0, python)], timeout_s=0.2, second_timeout_s=0.3)
    assert evidence.process is not None
    assert evidence.process.failure is DumpFailure.TIMEOUT
    assert calls(pyspy) == 2


def test_a_process_that_moves_in_every_try_is_told_from_one_that_cannot_be_read(pyspy: Path) -> None:
    write_tool(pyspy, "echo 'Error: Failed to get stack trace' >&2; sleep 0.02; exit 1")
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        evidence = collect.dump_process(process.pid)
        process.kill()
    assert evidence.failure is DumpFailure.MOVING


def test_a_process_that_rests_and_cannot_be_read_stays_unreadable(python: int, pyspy: Path) -> None:
    write_tool(pyspy, "echo 'Error: Failed to get stack trace' >&2; exit 1")
    assert collect.dump_process(python).failure is DumpFailure.UNREADABLE


def unseen(rank: int, t: float, cpu_s: float, failure: DumpFailure = DumpFailure.TIMEOUT) -> RankEvidence:
    proc = ProcState(state="S", cpu_s=cpu_s, main_wanted_s=cpu_s, threads=1)
    process = ProcessEvidence(
        pid=100 + rank, rank=rank, t=t, proc=proc, failure=failure, failure_text="no time"
    )
    return RankEvidence(rank=rank, t=t, process=process)


def samples_with(others: list[list], busy: float, failure: DumpFailure = DumpFailure.TIMEOUT) -> list[Sample]:
    """Rank 0 unseen, the others in these frames."""
    found = []
    for t in (0.0, 5.0):
        ranks = [unseen(0, t, 1.0 + busy * t, failure), *(look(n, t, f) for n, f in enumerate(others, 1))]
        found.append(
            Sample(t=t, ranks=tuple(ranks), expected=frozenset(range(len(ranks))), world_size=len(ranks))
        )
    return found


@pytest.mark.parametrize("failure", [DumpFailure.TIMEOUT, DumpFailure.MOVING, DumpFailure.NO_ANSWER])
@pytest.mark.parametrize("busy", [0.0, 0.9])
def test_a_rank_that_was_not_seen_is_blamed_for_nothing(failure: DumpFailure, busy: float) -> None:
    verdict = diagnose(samples_with([ALL_REDUCE, ALL_REDUCE, ALL_REDUCE], busy, failure)).verdict
    assert (verdict.kind, verdict.culprits) == (Kind.NO_EVIDENCE, ())
    assert "rank 0 could not be looked at" in verdict.reason
    assert ("of a core" in verdict.reason) == (busy > 0)


def test_a_rank_that_was_not_seen_does_not_hide_the_one_that_differs() -> None:
    outside = [frame for frame in ALL_REDUCE if frame.name != "all_reduce"]
    seen = diagnose(samples_with([outside, ALL_REDUCE, ALL_REDUCE, BACKWARD], 0.0)).verdict
    assert [culprit.rank for culprit in seen.culprits] == [1]
    assert any("could not be looked at" in text for text in seen.against)


def test_a_rank_that_gives_no_stack_at_rest_is_still_suspect() -> None:
    verdict = diagnose(samples_with([ALL_REDUCE, ALL_REDUCE], 0.0, DumpFailure.UNREADABLE)).verdict
    assert verdict.kind is Kind.UNDUMPABLE
    assert [culprit.rank for culprit in verdict.culprits] == [0]


def test_how_many_of_all_ranks_answered_is_said() -> None:
    found = {rank: RankEvidence(rank=rank) for rank in (0, 1, 2, 4, 5, 6, 7)}
    assert unanswered_ranks(found, 8, {}) == ("7 of 8 ranks answered; missing: 3",)
    assert unanswered_ranks(found | {3: RankEvidence(rank=3)}, 8, {}) == ()
