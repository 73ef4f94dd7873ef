"""Opening a run of 24 hours and 64 ranks: seconds to the first full view, and to the end of its history.

A full view has the newest step of every rank and curves over the whole run, from one rank at least; the other
ranks' histories are added to them in the following polls.

The 64 files are hard links to one: what is read, decoded and added up is as much as from 64 files.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from ftdash.monitor.reader import RunReader
from ftdash.monitor.state import RunState
from tests.bench.bench_reader import make_run, meta_line, step_line

HOURS = 24
RANKS = 64


def widest_gap(state: RunState) -> int:
    """Most steps between neighbouring points of the curves."""
    return max(after.step - before.step for before, after in pairwise(state.points))


def opened(root: Path, step_s: int) -> None:
    """A finished run whose ranks took `step_s` seconds a step."""
    steps = HOURS * 3600 // step_s
    run = make_run(root, f"day-{step_s}", RANKS)
    with open(run.rank_file(0), "wb") as handle:
        handle.write(meta_line(0, RANKS))
        for start in range(0, steps, 1000):
            handle.write(b"".join(step_line(step) for step in range(start, min(start + 1000, steps))))
    for rank in range(1, RANKS):
        os.link(run.rank_file(0), run.rank_file(rank))
    reader = RunReader(run)
    began, cpu = time.monotonic(), time.process_time()
    state = reader.poll()
    while len(state.ranks) < RANKS or state.step < steps - 1 or widest_gap(state) > steps / 100:
        state = reader.poll()
    first_s, first_cpu_s = time.monotonic() - began, time.process_time() - cpu
    assert (state.points[0].step < steps / 100, state.points[-1].step) == (True, steps - 1)
    while reader.behind:
        state = reader.poll()
    whole_s, whole_cpu_s = time.monotonic() - began, time.process_time() - cpu
    reader.close()
    assert sum(rank.tokens for rank in state.ranks) == steps * RANKS * 2048
    gib = RANKS * run.rank_file(0).stat().st_size / 2**30
    print(
        f"  {RANKS} ranks × {steps:,} steps ({gib:.1f} GiB): full view after"
        f" {first_s:.2f} s ({first_cpu_s:.2f} s of CPU),"
    )
    print(f"    the whole history after {whole_s:.2f} s ({whole_cpu_s:.2f} s of CPU)")


def main() -> None:
    print(f"a run of {HOURS} hours")
    with tempfile.TemporaryDirectory() as folder:
        for step_s in (5, 1):
            opened(Path(folder), step_s)


if __name__ == "__main__":
    main()
