"""Naming the rank that failed first, from what each of them left behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ftdash.monitor import exits
from ftdash.monitor.exits import Failure
from ftdash.monitor.rundir import RankExit, RunDir
from tests.support.live_runs import make_run

PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7032"


def test_the_earliest_end_is_the_first_failure() -> None:
    first = exits.first_failure([Failure(0, 1, 20.0), Failure(1, -9, 10.0), Failure(2, -15, 30.0)])
    assert first is not None
    assert first.rank == 1


def test_a_rank_that_only_lost_its_peer_does_not_come_first() -> None:
    first = exits.first_failure([Failure(0, 1, 10.0, PEER), Failure(1, 1, 10.2, "ValueError: bad batch")])
    assert first is not None
    assert first.rank == 1


def test_a_rank_that_the_launcher_ended_does_not_come_first() -> None:
    first = exits.first_failure([Failure(0, -15, 10.0), Failure(1, 1, 11.0)])
    assert first is not None
    assert first.rank == 1
    assert exits.first_failure([Failure(0, 0, 1.0)]) is None


def report(rank: int, code: int) -> str:
    first = "  time      : 2026\n  host      : h\n"
    return (
        "============\ntrain.py FAILED\n------------\nFailures:\n[1]:\n"
        f"{first}  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 3)\n"
        "------------\nRoot Cause (first observed failure):\n[0]:\n"
        f"{first}  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 4)\n"
    )


def test_torch_elastics_report_is_read_when_nobody_saw_the_ranks_end(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running")
    run.launcher_log.write_text("noise\n" * 1000 + report(2, -9))
    run.exit_marker.write_text("1\n")
    done = exits.complete(run, run.read_manifest(), [])
    assert (done.exit_code, done.first_failing_rank) == (1, 2)
    assert exits.reason(run, done) == "rank 2: killed by SIGKILL"


def test_a_log_made_to_confuse_is_read_in_no_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.launcher_log.write_text("Root Cause (first observed failure):\n rank " * 20_000)
    started = time.process_time()
    assert exits.elastic_root_cause(run) is None
    assert exits.last_error_in(run.launcher_log) == ""
    assert time.process_time() - started < 5


def rank_log(run: RunDir, rank: int, text: str) -> None:
    folder = run.logs / "none_x" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(text)
    run.rank_log(rank, "stderr").symlink_to(os.path.relpath(folder / "stderr.log", run.logs))


def test_each_ranks_own_words_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running")
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\n'
    rank_log(run, 0, trace + PEER + "\n")
    rank_log(
        run, 1, f"[rank1]: {trace}[rank1]: torch.OutOfMemoryError: CUDA out of memory. [/x]\nlast words\n"
    )
    told = json.dumps({"message": {"message": PEER}})
    (run.logs / "none_x" / "attempt_0" / "0" / "error.json").write_text(told)
    ends = [RankExit(0, 1, 10.0), RankExit(1, 1, 10.5)]
    done = exits.complete(run, run.read_manifest(), ends)
    assert done.first_failing_rank == 1
    assert exits.reason(run, done) == "rank 1: exit code 1: torch.OutOfMemoryError: CUDA out of memory. [/x]"


@pytest.mark.parametrize(("status", "code"), [("0", 0), ("3", 3), ("137", -9), ("143", -15), ("255", 255)])
def test_a_shells_status_is_a_code_or_a_signal(tmp_path: Path, status: str, code: int) -> None:
    run = make_run(tmp_path)
    assert exits.launcher_exit(run) is None
    run.exit_marker.write_text(status + "\n")
    assert exits.launcher_exit(run) == code
