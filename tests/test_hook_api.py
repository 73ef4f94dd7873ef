"""The hook in one process: what it writes, what it costs when things go wrong, and that it never raises."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ftdash.monitor import records, rundir
from ftdash.monitor.beat import SIZE, Beat, BeatWriter, memory_of, read_beat
from ftdash.monitor.hook import Hook, core
from ftdash.monitor.hook.writer import LineWriter


def decoded(path):
    return [records.decoder.decode(line) for line in path.read_bytes().splitlines()]


def fd_path(fd):
    return os.readlink(f"/proc/self/fd/{fd}")


def wait_until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_three_lines_give_records_that_every_reader_decodes(tmp_path):
    hook = Hook.start(tmp_path, 3, world_size=4, max_steps=2)
    for step in range(2):
        with hook.phase("forward"):
            time.sleep(0.02)  # long against the microseconds that are stored
        hook.step(loss=2.5 - step, tokens=96, lr=1e-3, grad_norm=0.7)
    hook.close()
    meta, first, second = decoded(tmp_path / "telemetry" / "rank-3.jsonl")
    assert (meta.rank, meta.world_size, meta.max_steps, meta.pid) == (3, 4, 2, os.getpid())
    assert (first.step, first.loss, first.tokens) == (1, 2.5, 96)
    assert (second.step, second.loss) == (2, 1.5)
    assert 0 < second.forward_s <= second.step_s
    assert second.tokens_per_s == pytest.approx(96 / second.step_s, rel=1e-2)


def test_the_run_directory_and_the_rank_come_from_the_environment(tmp_path, monkeypatch):
    assert core.RUN_DIR_ENV == rundir.RUN_DIR_ENV
    assert core.FORMAT_VERSION == records.FORMAT_VERSION
    monkeypatch.setenv("FTDASH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "7")
    hook = Hook.start()
    hook.step(loss=1.0)
    hook.close()
    assert [record.step for record in decoded(rundir.RunDir(tmp_path).rank_file(7))] == [1]
    assert read_beat(rundir.RunDir(tmp_path).beat_file(7)).phase == "end"


def test_a_rank_that_the_environment_does_not_name_asks_the_process_group(tmp_path, monkeypatch):
    """Ranks of torch.multiprocessing's spawn are told theirs as an argument."""
    import torch.distributed as dist

    monkeypatch.delenv("RANK", raising=False)
    assert Hook.start(tmp_path / "alone").rank == 0
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    with Hook.start(tmp_path / "spawned") as hook:
        assert hook.rank == 2


def test_without_a_run_directory_nothing_is_written_and_everything_may_be_called(tmp_path, monkeypatch):
    monkeypatch.delenv("FTDASH_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    hook = Hook.start()
    with hook.phase("forward"):
        pass
    hook.step(loss=1.0, tokens=5)
    hook.event("note", "code", "text")
    hook.close()
    assert not list(tmp_path.iterdir())
    assert hook.tokens_seen == 5


def test_values_that_json_cannot_say_are_kept(tmp_path):
    hook = Hook.start(tmp_path, 0)
    hook.step(loss=math.nan, grad_norm=math.inf, aux_loss=-math.inf)
    hook.close()
    (step,) = decoded(tmp_path / "telemetry" / "rank-0.jsonl")
    assert (step.loss, step.grad_norm, step.aux_loss) == ("nan", "inf", "-inf")


def test_tensors_are_read_as_numbers(tmp_path):
    import torch

    hook = Hook.start(tmp_path, 0)
    hook.step(loss=torch.tensor(1.25, requires_grad=True), tokens=torch.tensor(12))
    hook.close()
    (step,) = decoded(tmp_path / "telemetry" / "rank-0.jsonl")
    assert (step.loss, step.tokens) == (1.25, 12)


def test_saving_and_evaluating_are_no_part_of_a_step(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(core.time, "perf_counter", lambda: clock[0])
    hook = Hook.start(tmp_path, 0)

    def spend(phase, seconds):
        with hook.phase(phase):
            clock[0] += seconds

    spend("data", 1.0)
    spend("forward", 2.0)
    spend("backward", 3.0)
    spend("optimizer", 0.5)
    hook.step()
    spend("save", 60.0)
    spend("forward", 2.5)
    hook.step()
    hook.close()
    first, second = decoded(tmp_path / "telemetry" / "rank-0.jsonl")
    assert (first.data_s, first.forward_s, first.backward_s, first.optimizer_s) == (1.0, 2.0, 3.0, 0.5)
    assert first.step_s == 6.5
    assert second.step_s == 2.5


def test_a_value_that_is_no_number_is_told_and_training_goes_on(tmp_path):
    hook = Hook.start(tmp_path, 0)
    hook.step(loss=object())
    hook.step(loss=object())
    hook.step(loss=1.0)
    hook.close()
    told, step = decoded(tmp_path / "telemetry" / "rank-0.jsonl")
    assert (told.severity, told.code) == ("warning", "hook-step")
    assert step.step == 3


def test_an_exception_in_the_loop_is_told_and_goes_through(tmp_path):
    with pytest.raises(ZeroDivisionError), Hook.start(tmp_path, 0):
        _ = 1 / 0
    (event,) = decoded(tmp_path / "telemetry" / "rank-0.jsonl")
    assert (event.severity, event.text) == ("error", "ZeroDivisionError: division by zero")


def test_a_disk_that_hangs_stops_nobody_and_what_is_lost_is_counted(tmp_path):
    os.mkfifo(tmp_path / "slow")  # opening it blocks until somebody reads
    writer = LineWriter(tmp_path / "slow", capacity=10, period_s=0.001)
    writer.put({"kind": "step", "t": 0.0, "step": 0})
    wait_until(lambda: not writer._waiting)
    for step in range(25):
        writer.put({"kind": "step", "t": 0.0, "step": step})
    assert writer.dropped == 15
    writer.close(timeout_s=0.05)


def test_a_full_disk_raises_nothing_and_keeps_a_bounded_number_of_records(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    writer = LineWriter(tmp_path / "full", capacity=3, period_s=0.001)
    for step in range(5):
        writer.put({"kind": "step", "t": 0.0, "step": step})
        wait_until(lambda: not writer._waiting)
    wait_until(lambda: writer.dropped == 2)
    writer.close()


def test_what_a_file_system_refused_is_written_when_it_is_back(tmp_path):
    path = tmp_path / "rank"
    path.symlink_to("/dev/full")
    writer = LineWriter(path, period_s=0.001)
    for step in range(4):
        writer.put({"kind": "step", "t": 0.0, "step": step})
    wait_until(lambda: len(writer._unwritten) == 4)
    path.unlink()
    wait_until(lambda: path.exists() and path.stat().st_size > 0)
    writer.close()
    assert [record.step for record in decoded(path)] == [0, 1, 2, 3]
    assert writer.dropped == 0


def test_after_a_torn_write_the_next_record_stands_on_its_own_line(tmp_path, monkeypatch):
    real = os.write
    results = ["a part", "nothing"]

    def torn(fd, data):
        if not results or not str(fd_path(fd)).endswith("file"):
            return real(fd, data)
        if results.pop(0) == "a part":
            return real(fd, bytes(data)[:7])
        raise OSError(28, "No space left on device")

    writer = LineWriter(tmp_path / "file", period_s=0.001)
    monkeypatch.setattr("ftdash.monitor.hook.writer.os.write", torn)
    writer.put({"kind": "step", "t": 0.0, "step": 1})
    wait_until(lambda: not results)
    writer.put({"kind": "step", "t": 0.0, "step": 2})
    writer.close()
    torn_line, *lines = (tmp_path / "file").read_bytes().splitlines()
    assert len(torn_line) == 7
    assert [records.decoder.decode(line).step for line in lines] == [1, 2]
    assert writer.dropped == 0


def test_sigusr2_writes_the_stacks_of_all_threads(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    hook = Hook.start(tmp_path, 5)
    path = tmp_path / "stacks" / "faulthandler-rank-5.txt"
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: "test_sigusr2_writes_the_stacks_of_all_threads" in path.read_text())
        assert path.read_text().count("hread 0x") >= 2
        hook.close()
        os.kill(os.getpid(), signal.SIGUSR2)  # ignored: it would end a process whose handler is gone
    finally:
        signal.signal(signal.SIGUSR2, before or signal.SIG_DFL)


def test_the_hook_loads_only_the_standard_library_and_torch():
    code = (
        "import sys; import ftdash.monitor.hook, ftdash.monitor.beat; "
        "print(sorted({'torch', 'msgspec', 'psutil', 'transformers', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_beat_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "rank-0.beat"
    writer = BeatWriter(path)
    before = time.time()
    writer.beat(41, "backward")
    beat = read_beat(path)
    assert (beat.step, beat.phase) == (41, "backward")
    assert before <= beat.t <= time.time()
    assert read_beat(path, memory_of(path)) == beat
    writer.close()
    assert path.stat().st_size == SIZE
    assert read_beat(path) == beat


def test_a_beat_is_never_taken_from_the_memory_of_another_process_or_run(tmp_path):
    mine, other = (tmp_path / run / "telemetry" / "rank-0.beat" for run in ("mine", "other"))
    for path in (mine, other):
        path.parent.mkdir(parents=True)
    writer = BeatWriter(mine)
    writer.beat(3, "forward")
    other.write_bytes(mine.read_bytes())  # as if the same pid lived on this machine
    assert read_beat(other) is None
    reading, writing = os.pipe()
    other.write_bytes(b"memory /proc/%d/fd/%d" % (os.getpid(), reading))
    assert read_beat(other) is None
    os.close(reading)
    os.close(writing)
    assert read_beat(mine).step == 3
    writer.close()


def test_what_is_no_beat_file_reads_as_none(tmp_path):
    assert read_beat(tmp_path / "missing") is None
    (tmp_path / "short").write_bytes(b"x" * 20)
    assert read_beat(tmp_path / "short") is None
    (tmp_path / "other").write_bytes(b"\0" * SIZE)
    assert read_beat(tmp_path / "other") is None


def test_a_reader_never_sees_half_of_a_beat(tmp_path):
    path = tmp_path / "rank-0.beat"
    writer = BeatWriter(path)
    phases = {0: "forward", 1: "an-own-phase-with-a-long-name"}
    writer.beat(0, phases[0])
    stop = threading.Event()

    def write():
        step = 0
        while not stop.is_set():
            step += 1
            writer.beat(step, phases[step % 2])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = [beat for beat in (read_beat(path) for _ in range(3000)) if beat is not None]
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 100
    assert all(isinstance(beat, Beat) and beat.phase == phases[beat.step % 2] for beat in seen)
