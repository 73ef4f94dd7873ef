"""Finds the ranks below a launcher and sees each of them end: when, in which order, with which code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Collection
from dataclasses import dataclass

from ftdash.monitor import procs
from ftdash.monitor.procs import RankProcess
from ftdash.monitor.rundir import RunDir

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them is lost from sight."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(slots=True)
class Watched:
    """One rank's process. `code` is set once it has ended; None then means that nobody could see how."""

    process: RankProcess
    pidfd: int
    ended: float = 0.0
    code: int | None = None


class RankWatch:
    """The ranks of this node. `wait` sleeps until one ends, the timeout passes, or `wake_fd` is readable."""

    def __init__(self, run: RunDir, wake_fd: int) -> None:
        self.run = run
        self.ranks: dict[int, Watched] = {}
        self.seen: dict[int, int] = {}  # every process of the run that was ever seen: pid to start
        self.reaped: dict[int, int] = {}  # exit codes of our own children, orphans included
        self._wake_fd = wake_fd
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._by_pidfd: dict[int, Watched] = {}

    def discover(self, roots: Collection[int]) -> None:
        """Look for ranks among `roots` and their descendants; a restarted rank replaces its predecessor."""
        pids = set(roots)
        for root in roots:
            pids.update(procs.descendants(root))
        for pid in pids:
            if pid not in self.seen and (stat := procs.read_stat(pid)):
                self.seen[pid] = stat.start
        for rank, process in procs.find_ranks(pids).items():
            known = self.ranks.get(rank)
            if known is None or (known.process.pid, known.process.start) != (process.pid, process.start):
                self._watch(process)

    def forget_dead(self) -> None:
        """Keep `seen` from growing with every helper process of a long run."""
        self.seen = {pid: start for pid, start in self.seen.items() if procs.alive(pid, start)}

    def living(self) -> list[Watched]:
        return [watched for watched in self.ranks.values() if not watched.ended]

    def wait(self, timeout_s: float) -> list[Watched]:
        """Ranks that ended within the timeout, in the order in which they were seen to end."""
        ended = []
        for fd, _ in self._poll.poll(max(0, int(timeout_s * 1000))):
            if fd == self._wake_fd:
                with contextlib.suppress(OSError):
                    os.read(fd, 4096)
            elif (watched := self._by_pidfd.pop(fd, None)) is not None:
                self._end(watched, fd)
                ended.append(watched)
        self.reap()
        for watched in self.living():
            if watched.pidfd < 0 and not procs.alive(watched.process.pid, watched.process.start):
                self._end(watched, -1)
                ended.append(watched)
        return ended

    def reap(self) -> None:
        """Collect every child of ours that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.reaped[pid] = procs.exit_code(status)

    def _watch(self, process: RankProcess) -> None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            pidfd = -1  # an old kernel: looked at in every wait instead
        watched = Watched(process, pidfd)
        self.ranks[process.rank] = watched
        if pidfd >= 0:
            self._by_pidfd[pidfd] = watched
            self._poll.register(pidfd, select.POLLIN)

    def _end(self, watched: Watched, fd: int) -> None:
        """A process stays a zombie until its parent asks for it, which launchers do every 0.1 s or so."""
        watched.ended = time.time()
        stat = procs.read_stat(watched.process.pid)
        if stat is not None and stat.start == watched.process.start and stat.state in "ZX":
            watched.code = procs.exit_code(stat.exit_status)
        if fd >= 0:
            if watched.code is None:
                watched.code = procs.reaped_exit_code(fd)
            self._poll.unregister(fd)
            os.close(fd)
        self.reap()
        if watched.code is None:
            watched.code = self.reaped.get(watched.process.pid)
