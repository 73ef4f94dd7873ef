"""Gets at the nodes of a run whose agents are dead: through srun --overlap under Slurm, else through ssh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ftdash.engine.launch.spec import Backend
from ftdash.monitor.agent.end import KILL_WAIT_S, SAVE_WAIT_S
from ftdash.monitor.agent.substitute import NOTHING_LEFT
from ftdash.monitor.hostname import NODE_NAME_ENV
from ftdash.monitor.reach import Reach
from ftdash.monitor.rundir import RunDir, RunError

ANSWER_S = 30.0  # a step or a connection, an interpreter, and the dumps of a node's ranks

# Last line of output by host, of argv run on each of the hosts. Raises RunError.
RunOn = Callable[[RunDir, Collection[str], Sequence[str], float], dict[str, str]]


def reach_of(run: RunDir) -> Reach | None:
    """The way to the nodes of this run; None for a run of this machine. Raises RunError."""
    backend = run.read_manifest().backend
    if backend == Backend.SLURM:
        return _Nodes(run, _through_srun)
    if backend == Backend.SSH:
        return _Nodes(run, _through_ssh)
    return None


class _Nodes:
    """`ftdash.monitor.agent.substitute`, started where it is needed."""

    def __init__(self, run: RunDir, run_on: RunOn) -> None:
        self._run = run
        self._run_on = run_on

    def dump(self, hosts: Collection[str], folder: Path) -> None:
        self._substitute(hosts, ["dump", str(self._run.path), str(folder)], ANSWER_S)

    def end(self, hosts: Collection[str], *, grace_s: float, save: bool) -> None:
        words = ["end", str(self._run.path), str(grace_s), *(["save"] if save else [])]
        patience_s = ANSWER_S + grace_s + KILL_WAIT_S + (SAVE_WAIT_S if save else 0.0)
        left = self._substitute(hosts, words, patience_s)
        if stuck := [f"{host}: {pids}" for host, pids in sorted(left.items()) if pids != NOTHING_LEFT]:
            raise RunError(f"processes that would not end on {', '.join(stuck)}")

    def _substitute(self, hosts: Collection[str], words: Sequence[str], timeout_s: float) -> dict[str, str]:
        argv = [sys.executable, "-m", "ftdash.monitor.agent.substitute", *words]
        return self._run_on(self._run, hosts, argv, timeout_s)


def _through_srun(
    run: RunDir, hosts: Collection[str], argv: Sequence[str], timeout_s: float
) -> dict[str, str]:
    from ftdash.engine.slurm.client import SlurmError
    from ftdash.engine.slurm.remote import on_nodes
    from ftdash.engine.slurm.submit import job_id

    try:
        found = on_nodes(job_id(run), argv, nodes=hosts, timeout_s=timeout_s)
    except SlurmError as error:
        raise RunError(f"srun --overlap: {error}") from None
    return {host: lines[-1] for host, lines in found.items()}


def _through_ssh(
    run: RunDir, hosts: Collection[str], argv: Sequence[str], timeout_s: float
) -> dict[str, str]:
    from ftdash.engine.ssh.hosts import Host, HostsError, run_on, stored_hosts

    def ask(host: Host) -> str:
        output = run_on(host, argv, timeout_s=timeout_s, environment={NODE_NAME_ENV: host.node})
        return output.strip().rpartition("\n")[2]

    try:
        wanted = [host for host in stored_hosts(run) if host.node in hosts]
        with ThreadPoolExecutor(max_workers=min(32, len(wanted) or 1)) as pool:
            return dict(zip([host.node for host in wanted], pool.map(ask, wanted), strict=True))
    except HostsError as error:
        raise RunError(f"ssh: {error}") from None
