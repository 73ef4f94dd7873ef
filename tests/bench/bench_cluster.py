"""A synthetic cluster of 1,024 ranks at 1 Hz in percent of a core and MiB, and what a real node writes."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from ftdash.monitor.reader import RunReader
from ftdash.monitor.replay import Replay
from tests.bench import operations
from tests.support.cluster import START_T, Cluster

RANKS = 1_024
STEPS = 40


def follow(root: Path) -> None:
    """One step of all ranks and one sample of all nodes between two polls, as a live run would give."""
    cluster = Cluster(RANKS, experts=64, start_t=time.time())
    run = cluster.create(root, "wide")
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    reader = RunReader(run)
    started = time.monotonic()
    state = reader.poll()
    first_s = time.monotonic() - started
    spent = 0.0
    for step in range(1, STEPS + 1):
        cluster.start_t = time.time() - step  # the records are of now, however long writing them takes
        cluster.append(run, step)
        cpu = time.process_time()
        state = reader.poll()
        while reader.behind:
            state = reader.poll()
        spent += time.process_time() - cpu
    assert (state.step, state.state) == (STEPS, "running")
    state = reader.poll(time.time() + 9)  # alerts of a thousand ranks are eight seconds old at most
    assert [alert.ranks for alert in state.alerts if alert.code == "straggler"] == [(3,)]
    after_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    reader.close()
    print(f"  {RANKS:,} ranks, 1 step a second: {spent / STEPS:.1%} of a core, {after_mib:.0f} MiB in all")
    print(f"    ({before_mib:.0f} MiB before the reader), first state after {first_s:.2f} s")


def replay(root: Path) -> None:
    """Playing the same run: how long it takes to go through it, and to seek back to its middle."""
    run = Cluster(64).create(root, "played", state="finished", steps=500)
    cpu = time.process_time()
    player = Replay(run)
    opened_s = time.process_time() - cpu
    cpu = time.process_time()
    state = player.seek(player.end)
    through_s = time.process_time() - cpu
    assert state.step == 500
    cpu = time.process_time()
    assert player.seek(START_T + 250).step == 250
    back_s = time.process_time() - cpu
    print(
        f"  replay of 64 ranks × 500 steps: open {opened_s:.2f} s, to the end {through_s:.2f} s,"
        f" back to the middle {back_s:.2f} s"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        follow(Path(folder))
        replay(Path(folder))
    operations.main()


if __name__ == "__main__":
    main()
