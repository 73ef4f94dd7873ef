"""Reading telemetry: records per second of one core, and what following 1,024 ranks costs."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path

from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import Manifest, RunDir

RECORDS = 1_000_000
RANKS = 1_024
SECONDS = 10


def step_line(step: int) -> bytes:
    """A step record as the hook writes it on a GPU."""
    record = {"kind": "step", "t": 1_795_974_124.357514 + step, "v": 1, "step": step, "epoch": step / 1000}
    times = {
        "step_s": 0.512345,
        "data_s": 0.0101,
        "forward_s": 0.20134,
        "backward_s": 0.290222,
        "optimizer_s": 0.0104,
    }
    memory = {"allocated": 71_234_567_890, "peak": 73_234_567_890, "reserved": 75_234_567_890}
    rest = {
        "lr": 1e-5,
        "loss": 1.2345678 + step % 7,
        "tokens": 2048,
        "grad_norm": 0.98765,
        "tokens_per_s": 4000.123,
    }
    return json.dumps({**record, **times, **memory, **rest}, separators=(",", ":")).encode() + b"\n"


def meta_line(rank: int, world: int) -> bytes:
    who = {
        "rank": rank,
        "local_rank": rank % 8,
        "world_size": world,
        "host": f"n{rank // 8}",
        "pid": 100 + rank,
    }
    return json.dumps({"kind": "meta", "v": 1, "t": 1.0, **who, "device": "cuda:0"}).encode() + b"\n"


def make_run(root: Path, name: str, world: int) -> RunDir:
    return RunDir.create(Manifest(run=name, state="finished", world_size=world), root)


def throughput(root: Path) -> tuple[float, float]:
    """(records per second, seconds to the first state) of a run with one rank and a long past."""
    run = make_run(root, "long", 1)
    with open(run.rank_file(0), "wb") as handle:
        handle.write(meta_line(0, 1))
        for start in range(0, RECORDS, 10_000):
            handle.write(b"".join(step_line(step) for step in range(start, start + 10_000)))
    best, first = 0.0, 0.0
    for _ in range(3):
        reader = RunReader(run)
        started = time.process_time()
        state = reader.poll()
        first = time.process_time() - started
        while reader.behind:
            state = reader.poll()
        seconds = time.process_time() - started
        assert state.ranks[0].tokens == RECORDS * 2048
        reader.close()
        best = max(best, RECORDS / seconds)
    return best, first


def tailing(root: Path) -> tuple[float, float, float]:
    """(percent of a core, MiB, seconds to the first state) for following 1,024 ranks at one step a second."""
    run = make_run(root, "wide", RANKS)
    for rank in range(RANKS):
        run.rank_file(rank).write_bytes(
            meta_line(rank, RANKS) + b"".join(step_line(step) for step in range(50))
        )
    reader = RunReader(run)
    started = time.process_time()
    reader.poll()
    while reader.behind:
        reader.poll()
    first = time.process_time() - started
    spent, start = 0.0, time.time()
    for second in range(SECONDS):
        line = step_line(50 + second)
        for rank in range(RANKS):
            with open(run.rank_file(rank), "ab") as handle:
                handle.write(line)
        started = time.process_time()
        state = reader.poll(start + second)
        spent += time.process_time() - started
        assert state.step == 50 + second
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    reader.close()
    return 100.0 * spent / SECONDS, mib, first


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        percent, mib, first = tailing(Path(folder))
        print(f"tail {RANKS:,} ranks at 1 Hz: {percent:.1f} % of a core, {mib:.0f} MiB, first {first:.2f} s")
        rate, first = throughput(Path(folder))
        print(f"read {RECORDS:,} step records: {rate:,.0f} records/s of one core, first state {first:.3f} s")


if __name__ == "__main__":
    main()
