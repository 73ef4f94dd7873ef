"""Ends every process of a run on this machine: SIGTERM, a grace, SIGKILL, whatever group they are in."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from ftdash.monitor import procs
from ftdash.monitor.agent.launcher import waits_for_launcher
from ftdash.monitor.rundir import RunDir

SAVE_WAIT_S = 600.0  # how long a checkpoint may take before save-and-stop becomes stop
STATUS_WAIT_S = 5.0  # for a killed launcher to go, and the shell above it to write how it went
KILL_WAIT_S = 10.0  # a process in uninterruptible sleep cannot be killed: it is named, not waited for


class Ending:
    """The end of a run, step by step, so that an agent can go on watching meanwhile."""

    def __init__(self, run: RunDir, grace_s: float) -> None:
        self.run = run
        self._kill_at = time.monotonic() + grace_s
        self._signalled: set[int] = set()
        self.killed = False

    def step(self, seen: Mapping[int, int]) -> set[int]:
        """Signal what is still there and return it. `seen`: pid to start of processes known to be its own."""
        left = procs.pids_of_run(self.run.path)
        left.update(pid for pid, start in seen.items() if procs.alive(pid, start))
        for pid in list(left):
            left.update(child for child in procs.descendants(pid) if procs.alive(child))
        if time.monotonic() >= self._kill_at:
            self.killed = self.killed or bool(left)
            spared = set() if self._shells_overdue else {pid for pid in left if waits_for_launcher(pid)}
            procs.send(left - spared, signal.SIGKILL)
        else:
            fresh = left - self._signalled
            procs.send(fresh, signal.SIGTERM)
            procs.send(fresh, signal.SIGCONT)  # a stopped process takes no SIGTERM
            self._signalled |= fresh
        return left

    @property
    def _shells_overdue(self) -> bool:
        return time.monotonic() > self._kill_at + STATUS_WAIT_S

    @property
    def overdue(self) -> bool:
        """True when even SIGKILL has not helped for a while."""
        return time.monotonic() > self._kill_at + KILL_WAIT_S


def end_here(run: RunDir, grace_s: float) -> set[int]:
    """End the run on this machine and wait for it, without an agent. Returns processes that would not go."""
    ending = Ending(run, grace_s)
    seen: dict[int, int] = {}
    while left := ending.step(seen):
        for pid in left:
            if pid not in seen and (stat := procs.read_stat(pid)):
                seen[pid] = stat.start
        if ending.overdue:
            return left
        time.sleep(0.1)
    return set()
