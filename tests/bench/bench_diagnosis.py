"""How long a verdict takes: 1,024 recorded ranks, and eight live ranks of this machine looked at twice.

And how long a dump stops a rank that works: the longest gap between two turns of a busy loop.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ftdash.monitor.diagnosis import collect, diagnose, live
from ftdash.monitor.diagnosis.stacks import read_stacks
from tests.diagnosis import table

RANKS = 1024
LIVE_RANKS = 8
THREADS = 20
CULPRIT = 777
_IDLE = ("Condition.wait@threading.py", "Thread.run@threading.py", "Thread._bootstrap@threading.py")
_SLEEPER = (
    "import threading, time\n"
    "for _ in range(20): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)
_BUSY = (
    "import sys, threading, time\n"
    "longest, last, asked = 0.0, time.perf_counter(), threading.Event()\n"
    "threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()\n"
    "print('ready', flush=True)\n"
    "while not asked.is_set():\n"
    "    now = time.perf_counter()\n"
    "    longest, last = max(longest, now - last), now\n"
    "print(longest)\n"
)


def recorded(root: Path, style: str) -> None:
    folder = root / style.replace(" ", "-")
    folder.mkdir()
    depth = tuple(f"layer{number}@transformers/models/x{number}.py" for number in range(20))
    threads = (_IDLE,) * THREADS
    waiting = table.Dump(((table.BARRIER, table.WRAP, *depth, "main@train.py", table.MODULE), *threads))
    stuck = table.Dump((("fetch@train.py", "main@train.py", table.MODULE), *threads))
    ranks = {rank: stuck if rank == CULPRIT else waiting for rank in range(RANKS)}
    table.write(folder, table.Row(style, ranks, frozenset(), frozenset()), style)
    started, cpu = time.perf_counter(), time.process_time()
    samples = read_stacks(folder)
    read_s, read_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    verdict = diagnose(samples).verdict
    assert [culprit.rank for culprit in verdict.culprits] == [CULPRIT], verdict
    whole_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    print(f"  {RANKS:,} ranks, {style}: read {read_s:.2f} s ({read_cpu_s:.2f} s of CPU), with the verdict")
    print(f"    {whole_s:.2f} s ({cpu_s:.2f} s of CPU)")


def alive() -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", _SLEEPER], stdout=subprocess.PIPE) for _ in range(LIVE_RANKS)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        started = time.perf_counter()
        evidence = collect.dump_ranks([(rank, process.pid) for rank, process in enumerate(ranks)])
        dump_s = time.perf_counter() - started
        assert all(len(item.threads) == THREADS + 1 for item in evidence)
        started = time.perf_counter()
        diagnose(live.sample_processes([process.pid for process in ranks], quick=True))
        quick_s = time.perf_counter() - started
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    print(f"  {LIVE_RANKS} ranks of {THREADS} threads: dump {dump_s:.2f} s, quick verdict {quick_s:.2f} s")


def pause(dumps: int) -> float:
    """The longest gap, seconds, in a busy rank that is dumped so many times in five seconds."""
    rank = subprocess.Popen(
        [sys.executable, "-c", _BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    rank.stdout.readline()
    for _ in range(dumps):
        assert collect.dump_process(rank.pid).threads
        time.sleep(5 / dumps)
    if not dumps:
        time.sleep(5)
    gap, _ = rank.communicate("end\n")
    return float(gap)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for style in ("new json", "new text"):
            recorded(Path(folder), style)
    alive()
    alone_ms, dumped_ms = pause(0) * 1e3, pause(20) * 1e3
    print(f"  longest gap in a busy rank: {alone_ms:.1f} ms left alone, {dumped_ms:.1f} ms dumped 20 times")


if __name__ == "__main__":
    main()
