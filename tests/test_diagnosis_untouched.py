"""A dump reads the memory of a rank and touches nothing else: no tracer, no stop, no signal."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ftdash.monitor.diagnosis import collect
from ftdash.monitor.diagnosis.model import ProcessEvidence

BUSY = "import time\nprint('ready', flush=True)\nend = time.time() + 60\nwhile time.time() < end: pass"


def looked_at(pid: int, ended: threading.Event) -> set[tuple[str, str]]:
    """(state, tracer) of a process, as often as can be read until the end."""
    seen = set()
    while not ended.is_set():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        seen.add((status["State"].split()[0], status["TracerPid"].strip()))
    return seen


def dumped(native: bool, times: int) -> tuple[list[ProcessEvidence], set[tuple[str, str]]]:
    """Dumps of a busy process, and what a watcher saw of it meanwhile."""
    rank = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(looked_at, rank.pid, ended)
        try:
            dumps = [collect.dump_process(rank.pid, native=native) for _ in range(times)]
        finally:
            ended.set()
            seen = watcher.result()
            rank.kill()
            rank.wait()
    return dumps, seen


def test_a_working_rank_is_neither_traced_nor_stopped_by_ten_dumps():
    dumps, seen = dumped(native=False, times=10)
    assert all(dump.threads and dump.source == "py-spy" for dump in dumps)
    assert seen == {("R", "0")}


def test_native_frames_need_a_tracer_and_the_watcher_sees_it():
    dumps, seen = dumped(native=True, times=1)
    assert dumps[0].source == "py-spy native"
    assert any(tracer != "0" for _, tracer in seen)
