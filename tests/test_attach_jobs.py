"""Training that somebody else started: found, read, and left as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftdash.monitor.attach.find import find_jobs
from ftdash.monitor.attach.output import LogFollower, OutputFile, files_behind_pipe, output_files
from ftdash.monitor.attach.watch import Watcher
from ftdash.monitor.records import GpuSample

# A stand-in for a trainer that knows nothing of ftdash: it prints as transformers and TRL do.
TRAINER = """
import os, subprocess, sys, time
rank = int(os.environ["RANK"])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) if rank == 1 else None
if rank == 0:
    for step in range(1, 8):
        bar = f"{step}%|#| {step}/100 [00:0{step}<01:00,  2.00it/s]"
        print("\\r" + bar, end="", file=sys.stderr, flush=True)
        logs = {"loss": f"{3 - step / 10:.4g}", "grad_norm": "1.5", "num_tokens": str(1000.0 * step)}
        print(logs, flush=True)
print("ready", flush=True)
sys.stdin.read()
if worker: worker.kill(); worker.wait()
"""


def start(rank: int, out, tmp_path: Path, **more: str) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(40000 + os.getpid() % 20000),
        "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
        **more,
    }
    script = tmp_path / "their_train.py"
    script.write_text(TRAINER)
    command = [sys.executable, str(script), "--token", "hf_abcdefghijklmnopqrstuvwxyz"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=env)


@pytest.fixture
def job(tmp_path):
    log = tmp_path / "train.log"
    with log.open("wb") as out:
        ranks = [start(rank, out, tmp_path) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while log.read_bytes().count(b"ready") < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    yield ranks, log
    for process in ranks:
        process.communicate(b"")


def test_ranks_are_found_by_their_environment_and_loader_workers_are_none(job):
    ranks, _ = job
    [found] = find_jobs(pids=[ranks[0].pid])
    assert [(rank.rank, rank.pid) for rank in found.ranks] == [(0, ranks[0].pid), (1, ranks[1].pid)]
    assert found.world_size == 2


def test_the_log_tells_step_loss_and_tokens_per_second(job):
    ranks, log = job
    [view] = Watcher([ranks[0].pid]).look().jobs
    assert view.log == str(log)
    assert view.progress is not None
    latest = view.progress.latest
    assert (latest.step, latest.max_steps, latest.loss) == (7, 100, 2.3)
    assert view.progress.tokens_per_s() == 2000.0  # 1,000 tokens a step, two steps a second


def test_two_looks_give_rates_and_change_nothing(job):
    ranks, log = job
    before = log.read_bytes()
    watcher = Watcher([ranks[1].pid])
    watcher.look()
    time.sleep(0.05)
    [view] = watcher.look().jobs
    assert all(rank.cpu is not None and rank.read_bytes_s is not None for rank in view.ranks)
    assert all(rank.rss > 1 << 20 for rank in view.ranks)
    assert len(view.ranks[1].descendants) == 1
    assert log.read_bytes() == before
    assert all(process.poll() is None for process in ranks)


def test_the_gpu_is_joined_by_the_ranks_own_environment(tmp_path):
    log = (tmp_path / "one.log").open("wb")
    process = start(0, log, tmp_path, CUDA_VISIBLE_DEVICES="GPU-bbbb", WORLD_SIZE="1")
    try:
        gpus = [
            GpuSample(t=0.0, index=0, uuid="GPU-aaaa", name="A", memory_used=1),
            GpuSample(t=0.0, index=1, uuid="GPU-bbbb", name="B", memory_used=2),
        ]
        deadline = time.monotonic() + 30
        while not (jobs := find_jobs(pids=[process.pid])) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert jobs
        [view] = Watcher([process.pid], lambda: gpus).look().jobs
        assert view.ranks[0].gpu is not None
        assert view.ranks[0].gpu.index == 1
    finally:
        process.communicate(b"")
        log.close()


def test_output_that_goes_through_tee_is_found(tmp_path):
    log = tmp_path / "tee.log"
    quiet = subprocess.DEVNULL
    tee = subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    assert tee.stdin is not None
    process = start(0, tee.stdin, tmp_path, WORLD_SIZE="1")
    tee.stdin.close()
    try:
        deadline = time.monotonic() + 60
        while b"ready" not in (log.read_bytes() if log.exists() else b""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert output_files(process.pid) == []
        assert [file.path for file in files_behind_pipe(process.pid)] == [str(log)]
        [view] = Watcher([process.pid]).look().jobs
        assert view.progress is not None
        assert view.progress.latest.step == 7
    finally:
        process.communicate(b"")
        tee.wait(10)


def test_the_command_prints_one_json_document_without_secrets(job):
    ranks, _ = job
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ftdash.tui.cli import main; main()",
            "attach",
            "--once",
            "--json",
            "--pid",
            str(ranks[0].pid),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    [found] = data["jobs"]
    assert found["step"] == 7
    assert found["log_format"] == "transformers"
    assert [rank["pid"] for rank in found["ranks"]] == [process.pid for process in ranks]
    assert "hf_abcdef" not in done.stdout


def test_lines_that_name_a_process_belong_to_its_rank(tmp_path):
    log = tmp_path / "ray.log"
    log.write_text(
        "(RayWorkerWrapper pid=4009) {'loss': '2.5', 'grad_norm': '1'}\n"
        "(RayWorkerWrapper pid=4010) {'loss': '2.0', 'grad_norm': '1'}\n"
        "{'loss': '1.0', 'grad_norm': '1'}\n"
    )
    with log.open() as handle:
        follower = LogFollower(OutputFile(os.getpid(), handle.fileno(), str(log), (0, 0)))
        follower.rank_of_pid = {4009: 0, 4010: 1}
        follower.poll()
    assert {rank: item.latest.loss for rank, item in follower.ranks.items()} == {0: 2.5, 1: 2.0}
    assert follower.whole.latest.loss == 1.0


def test_failures_and_sick_gpus_that_a_log_reports_are_told(tmp_path):
    log = tmp_path / "failed.log"
    log.write_text(
        "slurmstepd: error: NVML: Failed to get usage(15): GPU is lost\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "x.py", line 1, in f\n'
        "[rank1]: ValueError: bad [/usr/bin/x]\n"
    )
    with log.open() as handle:
        follower = LogFollower(OutputFile(os.getpid(), handle.fileno(), str(log), (0, 0)))
        follower.poll()
    assert follower.first_failure() == "rank 1: ValueError: bad [/usr/bin/x]"
    assert follower.gpu_fault == "a GPU of this node is lost"


def test_a_log_that_is_truncated_under_the_reader_is_read_anew(tmp_path):
    log = tmp_path / "x.log"
    with log.open("w") as out:
        out.write("{'loss': '3.0', 'grad_norm': '1'}\n" * 50)
        out.flush()
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
        )
    try:
        [file] = output_files(child.pid)
        follower = LogFollower(file)
        follower.poll()
        assert follower.whole.latest.loss == 3.0
        log.write_text("{'loss': '2.0', 'grad_norm': '1'}\n")
        follower.poll()
        assert follower.whole.latest.loss == 2.0
    finally:
        child.communicate(b"")
