"""How long a collective may take, who says so, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.deadline import known_timeout, time_left
from ftdash.monitor.diagnosis.model import Beat, FlightDump, FlightEntry, RankEvidence, Sample
from ftdash.monitor.records import Meta
from tests.support.live_runs import make_run, write
from tests.test_diagnosis_motion import ALL_REDUCE, MAIN, MODULE, Frame, look


def meta(rank: int, **more: object) -> Meta:
    return Meta(t=1.0, rank=rank, local_rank=rank, world_size=2, host="here", pid=1, device="cpu", **more)  # type: ignore[arg-type]


def test_the_ranks_own_word_comes_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write(run.rank_file(0), meta(0, backend="nccl", collective_timeout_s=7200.0))
    write(run.rank_file(1), meta(1, backend="nccl", collective_timeout_s=3600.0))
    assert known_timeout(run).seconds == 3600.0


@pytest.mark.parametrize(
    ("backend", "seconds"), [("nccl", 600.0), ("cpu:gloo,cuda:nccl", 600.0), ("gloo", 1800.0)]
)
def test_a_default_is_said_to_be_assumed(tmp_path: Path, backend: str, seconds: float) -> None:
    run = make_run(tmp_path)
    write(run.rank_file(0), meta(0, backend=backend))
    known = known_timeout(run)
    assert known.seconds == seconds
    assert "assumed" in known.source


@pytest.mark.parametrize(
    ("arguments", "environ", "seconds"),
    [(["--ddp_timeout", "900"], {}, 900.0), ([], {"DEEPSPEED_TIMEOUT": "45"}, 2700.0), ([], {}, 0.0)],
)
def test_a_process_tells_it_by_flag_or_environment(
    arguments: list[str], environ: dict[str, str], seconds: float
) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", *arguments]
    inherited = {key: value for key, value in os.environ.items() if key != "DEEPSPEED_TIMEOUT"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**inherited, **environ}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert known_timeout(None, [process.pid]).seconds == seconds
        process.kill()


def waiting(rank: int, t: float, beat_t: float) -> RankEvidence:
    evidence = look(rank, t, ALL_REDUCE)
    evidence.beat = Beat(beat_t, 7, "backward")
    return evidence


def test_what_is_left_counts_from_the_first_rank_that_waits() -> None:
    ranks = (waiting(0, 1000.0, 700.0), waiting(1, 1000.0, 900.0), waiting(2, 1000.0, 100.0))
    sample = Sample(t=1000.0, ranks=ranks, timeout_s=600.0, timeout_source="told")
    assert time_left(sample, [0, 1]).startswith("5 m 0 s left of the 10 m 0 s")
    assert "is over" in time_left(sample, [2])
    assert time_left(sample, []) == ""
    assert time_left(Sample(t=1000.0, ranks=ranks), [0]) == ""


def test_the_flight_recorder_knows_better() -> None:
    entry = FlightEntry(group="0", seq=3, op="all_reduce", timeout_ms=1_200_000, state="scheduled")
    sample = Sample(
        t=1000.0,
        ranks=(waiting(0, 1000.0, 700.0),),
        flight=(FlightDump(rank=0, entries=[entry]),),
        timeout_s=600.0,
    )
    assert time_left(sample, [0]).startswith("15 m 0 s left of the 20 m 0 s")


def test_a_verdict_says_how_much_time_is_left() -> None:
    outside = [Frame("score", "/home/u/train.py", 12), MAIN, MODULE]
    samples = []
    for t in (1000.0, 1005.0):
        ranks = (look(0, t, outside), waiting(1, t, 705.0), waiting(2, t, 705.0))
        samples.append(Sample(t=t, ranks=ranks, timeout_s=600.0, timeout_source="told"))
    verdict = diagnose(samples).verdict
    assert [culprit.rank for culprit in verdict.culprits] == [0]
    assert any(text.startswith("5 m 0 s left of the 10 m 0 s") for text in verdict.evidence)
