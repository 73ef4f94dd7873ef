"""Memory that trainers print is read in bytes, and shown for jobs that have no hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from ftdash.monitor.logs.memory import LoggedMemory, parse_memory
from ftdash.monitor.logs.progress import ProgressFollower
from ftdash.tui.cli import run

GIB, MIB = 1 << 30, 1 << 20
DEEPSPEED = (
    "[2026-03-01 10:00:00,123] [INFO] [utils.py:839:see_memory_usage] MA 15.03 GB         Max_MA 55.8 GB "
    "        CA 17.5 GB         Max_CA 56 GB "
)
HOST = (
    "[2026-03-01 10:00:00,124] [INFO] [utils.py:846:see_memory_usage] CPU Virtual Memory:  used = 1038.95 "
    "GB, percent = 51.6%"
)
MEGATRON = (
    "[Rank 0] (after 10 iterations) memory (MB) | allocated: 12345.5 | max allocated: 23456.25 | "
    "reserved: 24000.0 | max reserved: 24010.0"
)
TITAN = (
    "[titan] 2026-03-01 - root - INFO - step: 10  loss: 7.12  grad_norm: 1.2  memory: 42.10GiB(53.23%)  "
    "tps: 5,123  mfu: 40.1%"
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            DEEPSPEED,
            LoggedMemory(
                round(15.03 * GIB), round(55.8 * GIB), round(17.5 * GIB), 56 * GIB, source="deepspeed"
            ),
        ),
        (HOST, LoggedMemory(host_used=round(1038.95 * GIB), source="deepspeed")),
        (
            MEGATRON,
            LoggedMemory(
                round(12345.5 * MIB), round(23456.25 * MIB), 24000 * MIB, 24010 * MIB, source="megatron"
            ),
        ),
        (
            TITAN,
            LoggedMemory(max_reserved=round(42.10 * GIB), source="torchtitan"),
        ),
    ],
)
def test_printed_memory_is_read_in_bytes(line, found):
    assert parse_memory(line) == found
    assert parse_memory(f"\x1b[32m{line}\x1b[0m") == found


@pytest.mark.parametrize(
    "line",
    [
        "Estimated memory needed for params 15.03 GB",
        "MA course 15 GB",
        "Downloading 2.00 GB",
        "{'loss': 1.0}",
        "GPU memory: 42.10GiB(53%)",
    ],
)
def test_other_sizes_are_no_memory_of_the_run(line):
    assert parse_memory(line) is None


def test_lines_add_to_each_other_and_leave_progress_alone():
    follower = ProgressFollower()
    assert follower.feed(DEEPSPEED)
    assert follower.feed(HOST)
    assert follower.latest.step is None
    assert follower.memory is not None
    assert (follower.memory.max_allocated, follower.memory.host_used) == (
        round(55.8 * GIB),
        round(1038.95 * GIB),
    )
    assert not follower.feed("Downloading 2.00 GB")


def test_a_job_without_a_hook_shows_what_its_log_says(tmp_path, capsysbinary):
    log = tmp_path / "train.log"
    program = f"import sys\nprint({DEEPSPEED!r}, flush=True)\nprint('ready', flush=True)\nsys.stdin.read()\n"
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=out,
            env={**env, "MASTER_PORT": "1"},
        )
    try:
        deadline = time.monotonic() + 60
        while b"ready" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert run(["attach", "--pid", str(process.pid), "--once"]) == 0
        said = capsysbinary.readouterr().out.decode()
        assert "memory: allocated 15.0 GiB, peak 55.8 GiB" in said
        assert "as deepspeed last logged" in said
        assert run(["attach", "--pid", str(process.pid), "--once", "--json"]) == 0
        [job] = json.loads(capsysbinary.readouterr().out)["jobs"]
        assert job["logged_memory"]["max_allocated"] == round(55.8 * GIB)
    finally:
        process.communicate(b"")
