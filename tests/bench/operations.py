"""What one node of a run asks of the shared file system in a second: system calls of real processes, counted.

Agent and ranks are real, their telemetry goes through the hook's own writers; strace(1) counts what they do
below the run directory.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.rundir import NODES_ENV, RunDir
from ftdash.monitor.state import RunState
from tests.support.live_runs import agent_pid, start_run, wait_for

RANKS = 8
NODES = 128
COUNTED_S = 30.0
# with -y strace writes <path> behind a descriptor
CALL = re.compile(r"^\d+\s+(?:<\.\.\. )?(\w+)[( ]")
APPENDS = ("write", "pwrite64", "writev")
READS = ("read", "pread64")
LISTS = ("getdents64",)
OPENED = ("lseek", "fcntl", "ioctl", "mmap", "close", "fstat")  # of files that are open, nearly always cached


def count(run: RunDir, seconds: float) -> tuple[Counter[str], int]:
    """Calls on files below the run directory by name, and bytes written, of all its processes together."""
    pids = procs.pids_of_run(run.path) | {agent_pid(run)}
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as out:
        attach = [word for pid in sorted(pids) for word in ("-p", str(pid))]
        what = "trace=%file,%desc"
        strace = subprocess.Popen(
            ["strace", "-f", "-qq", "-y", "-s", "0", "-e", what, "-o", out.name, *attach],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        strace.terminate()
        strace.wait()
        calls: Counter[str] = Counter()
        written = 0
        for line in out:
            if str(run.path) not in line or not (match := CALL.match(line)):
                continue
            name = "fstat" if "AT_EMPTY_PATH" in line else match.group(1)
            calls[name] += 1
            if name in APPENDS and (answer := re.search(r"= (\d+)$", line.rstrip())):
                written += int(answer.group(1))
    return calls, written


def _all_step(state: RunState) -> bool:
    return len(state.ranks) == RANKS and all(rank.step > 3 for rank in state.ranks)


def main() -> None:
    if shutil.which("strace") is None:
        print("  operations on the shared file system: strace is not installed")
        return
    os.environ[NODES_ENV] = str(NODES)  # agents of several nodes look for requests once a second
    with tempfile.TemporaryDirectory() as folder:
        run = start_run(Path(folder), RANKS, "--steps", "100000", "--step-s", "1.0")
        try:
            wait_for(run, _all_step)
            time.sleep(10)  # past the start, when the agent still looks for ranks
            calls, written = count(run, COUNTED_S)
        finally:
            del os.environ[NODES_ENV]
            procs.send(procs.pids_of_run(run.path, procs.AGENT_ENV), signal.SIGKILL)
            procs.send(procs.pids_of_run(run.path), signal.SIGKILL)
    each = {name: number / COUNTED_S for name, number in calls.items()}
    appends = sum(each.get(name, 0.0) for name in APPENDS)
    lists = sum(each.get(name, 0.0) for name in LISTS) / 2  # the second call of each says that it was all
    reads = sum(each.get(name, 0.0) for name in READS)
    others = {n: v for n, v in each.items() if n not in (*APPENDS, *LISTS, *READS, *OPENED)}
    print(
        f"  one node of {RANKS} ranks at 1 step a second asks of the run directory, in a second:"
        f" {appends:.1f} appends of {written / COUNTED_S / 1e3:.1f} kB in all, {lists:.1f} directory reads,"
        f" {reads:.1f} reads, {sum(others.values()):.1f} look-ups"
        f" ({', '.join(f'{n} {v:.1f}' for n, v in sorted(others.items(), key=lambda x: -x[1]) if v > 0.05)})"
    )
    print(
        f"    {NODES} nodes: {NODES * appends:,.0f} appends, {NODES * written / COUNTED_S / 1e6:.2f} MB,"
        f" {NODES * lists:,.0f} directory reads, {NODES * sum(others.values()):,.0f} look-ups a second"
    )


if __name__ == "__main__":
    main()
