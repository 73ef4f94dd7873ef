"""What is alive of a run besides what its files say: agents, processes here, and beats of its ranks."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Mapping
from functools import lru_cache

from ftdash.monitor import exits, procs
from ftdash.monitor.beat import Beat, read_beat
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import AGENT_SILENT_S
from ftdash.monitor.rundir import Manifest, RunDir, safe_name
from ftdash.monitor.summary import Summary

PROCESS_SCAN_S = 2.0
DIRECT_BEATS = 64  # up to so many ranks, beats are read from their files although an agent hands them on
BEATS_A_POLL = 256  # of more files, the others have their turn in the next polls

_file_host = lru_cache(maxsize=4096)(lambda host: safe_name(host, 80))  # asked for each host in each poll


class Living:
    """Looks around for one reader. `processes`: of the run here, None as long as nobody counted."""

    def __init__(self, run: RunDir, summary: Summary) -> None:
        self.run = run
        self.summary = summary
        self.host = node_name()
        self.processes: int | None = None
        self.launcher_code: int | None = None
        self._processes_looked = 0.0
        self._beats: dict[int, Beat] = {}
        self._beats_after = -1  # the rank whose beat file was read last

    def agents(self, manifest: Manifest, now: float) -> frozenset[str]:
        """Hosts whose agent is alive: looked up by process here, by its last record elsewhere.

        Where there is none, the run's processes on this machine are counted.
        """
        known = self._agents(manifest)
        alive = []
        for host, pid in known.items():
            if host == self.host:
                if procs.agent_alive(self.run.path, pid):
                    alive.append(host)
            elif now - self._heard_t(host) < AGENT_SILENT_S:
                alive.append(host)
        # Elsewhere nothing can be counted: silence there is no proof of an end.
        if not alive and set(known) <= {self.host}:
            self._count_processes()
        return frozenset(alive)

    def silent(self, manifest: Manifest, agents: Collection[str], now: float) -> dict[str, float]:
        """Other machines of the run that have stopped reporting without having ended: seconds of silence."""
        return {
            host: now - heard_t
            for host in self._agents(manifest)
            if host != self.host
            and host not in agents
            and _file_host(host) not in self.summary.launcher_exits
            and (heard_t := self._heard_t(host))
        }

    def dead_pids(self) -> set[int]:
        """Rank processes of this machine that are no longer there."""
        dead = set()
        for number in self.summary.ranks_of_host.get(self.host, ()):
            rank = self.summary.ranks[number]
            pid = rank.sample.pid if rank.sample else rank.meta.pid if rank.meta else 0
            if pid and not procs.alive(pid):
                dead.add(pid)
        return dead

    def beats(self, agents: Collection[str], files: Mapping[int, str]) -> dict[int, Beat]:
        """Beats straight from `files`: for few ranks, and where no agent hands them on."""
        if len(self.summary.ranks) <= DIRECT_BEATS:
            wanted = [rank for rank in self.summary.ranks if rank in files]
        else:
            ranks = self.summary.ranks
            wanted = [
                rank for rank in files if (known := ranks.get(rank)) and known.sample_host not in agents
            ]
        due = wanted
        if len(wanted) > BEATS_A_POLL:
            wanted.sort()
            start = bisect_right(wanted, self._beats_after)
            due = (wanted[start:] + wanted[:start])[:BEATS_A_POLL]
            self._beats_after = due[-1]
        for number in due:
            if (beat := read_beat(files[number])) is not None:
                self._beats[number] = beat
        return {number: self._beats[number] for number in wanted if number in self._beats}

    def notices(self, manifest: Manifest, agents: Collection[str]) -> list[str]:
        """What a person should know about agents and clocks."""
        told = []
        if self.host in manifest.agent_pids and self.host not in agents and self.processes != 0:
            told.append(
                f"the agent on {self.host} is gone, training goes on without it: "
                f"ftdash agent --adopt {manifest.run}"
            )
        for node in self.summary.nodes.values():
            if skew_s := node.skew.skew_s:
                how = "behind ours" if skew_s > 0 else "ahead of ours"
                told.append(f"the clock of {node.host} is {abs(skew_s):.0f} s {how}: corrected")
        return told

    def _agents(self, manifest: Manifest) -> dict[str, int]:
        """Pid of each node's agent by host, as the manifest and the nodes' own telemetry say."""
        reported = (entry.node for entry in self.summary.nodes.values())
        return {node.host: node.agent_pid for node in reported if node} | manifest.agent_pids

    def _heard_t(self, host: str) -> float:
        node = self.summary.nodes.get(_file_host(host))
        return node.heard_t if node else 0.0

    def _count_processes(self) -> None:
        """Count this run's processes here, now and then; only while no agent does it for us."""
        now = time.monotonic()
        if self.processes is not None and now - self._processes_looked < PROCESS_SCAN_S:
            return
        self._processes_looked = now
        self.processes = len(procs.pids_of_run(self.run.path))
        if self.processes == 0:
            self.launcher_code = exits.launcher_exit(self.run)
