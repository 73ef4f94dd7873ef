"""Ranks that are pinned to fewer processors than their workers and threads need are told, others are not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftdash.monitor import procs
from ftdash.monitor.agent.sample import RankSampler
from ftdash.monitor.agent.watch import Watched
from ftdash.monitor.procs import RankProcess
from ftdash.monitor.rundir import RunDir
from tests.support.runs import codes, only, play, with_rank


@pytest.mark.parametrize(
    ("allowed", "workers", "threads"), [(1, 1, 0), (1, 8, 1), (2, 4, 2), (4, 0, 16), (8, 15, 1)]
)
def test_too_few_processors_are_told_with_the_figures(allowed, workers, threads):
    history, state = play(20)
    state = with_rank(state, 1, cpus_allowed=allowed, loader_workers=workers, omp_threads=threads)
    alert = only(state, history)
    assert (alert.code, alert.severity, alert.ranks) == ("cpus-crowded", "warning", (1,))
    assert f"may use {allowed} processor" in alert.text
    assert "--cpus-per-task" in alert.text
    assert (f"{workers} loader worker" in alert.text) is (workers > 0)
    assert (f"{threads} OpenMP threads" in alert.text) is (threads > allowed)


@pytest.mark.parametrize(
    ("allowed", "workers", "threads"), [(0, 8, 8), (1, 0, 1), (1, 0, 0), (4, 4, 1), (8, 8, 8), (16, 8, 4)]
)
def test_enough_processors_or_unknown_ones_are_no_alert(allowed, workers, threads):
    history, state = play(20)
    assert (
        codes(with_rank(state, 1, cpus_allowed=allowed, loader_workers=workers, omp_threads=threads), history)
        == []
    )


RANK = """
import multiprocessing, os, sys, time
def work(): time.sleep(120)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    workers = [context.Process(target=work, daemon=True) for _ in range(3)]
    for worker in workers: worker.start()
    print("ready", flush=True)
    sys.stdin.read()
    for worker in workers: worker.kill(); worker.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pinned_child_is_measured_as_it_runs(method, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, str(script), method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "0", "OMP_NUM_THREADS": "4,2"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        sample = sampled(process.pid, tmp_path)
        deadline = time.monotonic() + 60
        while sample.loader_workers != 3 and time.monotonic() < deadline:
            time.sleep(0.05)
            sample = sampled(process.pid, tmp_path)
        assert (sample.cpus_allowed, sample.loader_workers, sample.omp_threads) == (1, 3, 4)
    finally:
        process.communicate(b"")


def test_children_that_load_no_data_are_no_workers(tmp_path):
    script = (
        "import subprocess, sys\nchild = subprocess.Popen(['sleep', '60'])\nprint('ready', flush=True)\n"
        "sys.stdin.read()\nchild.kill(); child.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RANK": "0"},
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert procs.descendants(process.pid)
        assert sampled(process.pid, tmp_path).loader_workers == 0
    finally:
        process.communicate(b"")


def sampled(pid: int, folder: Path):
    stat = procs.read_stat(pid)
    assert stat is not None
    rank = RankProcess(rank=0, local_rank=0, world_size=1, pid=pid, start=stat.start)
    [sample] = RankSampler(RunDir(folder)).sample([Watched(rank, pidfd=-1)])
    return sample
