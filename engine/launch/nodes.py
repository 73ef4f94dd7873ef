"""Gets at the nodes of a run whose agents are dead: through srun --overlap under Slurm, else through ssh."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ftdash.engine.launch.spec import Backend
from ftdash.monitor.agent.end import KILL_WAIT_S, SAVE_WAIT_S
from ftdash.monitor.agent.substitute import NOTHING_LEFT
from ftdash.monitor.hostname import NODE_NAME_ENV
from ftdash.monitor.reach import Reach
from ftdash.monitor.rundir import RunDir, RunError

ANSWER_S = 30.0  # a step or a connection, an interpreter, and the dumps of a node's ranks
AGAIN_LOG = "agent-again.log"  # below logs/: what agents say that took the place of others

# Last line of output by host, of argv run on each of the hosts. Raises RunError.
RunOn = Callable[[RunDir, Collection[str], Sequence[str], float], dict[str, str]]
# Starts argv on a host, where it stays, and returns once the last argument sees it there. Raises RunError.
StayOn = Callable[[RunDir, str, Sequence[str], Callable[[], bool]], None]


def reach_of(run: RunDir) -> Reach | None:
    """The way to the nodes of this run; None for a run of this machine. Raises RunError."""
    manifest = run.read_manifest()
    backend = manifest.backend
    if manifest.attached:
        return _Attached(manifest.slurm_job_id) if manifest.slurm_job_id else None
    if backend == Backend.SLURM:
        return _Nodes(run, _through_srun, _beside_through_srun)
    if backend == Backend.SSH:
        return _Nodes(run, _through_ssh, _beside_through_ssh)
    return None


class _Nodes:
    """`ftdash.monitor.agent.substitute`, started where it is needed."""

    def __init__(self, run: RunDir, run_on: RunOn, stay_on: StayOn) -> None:
        self._run = run
        self._run_on = run_on
        self._stay_on = stay_on

    def dump(self, hosts: Collection[str], folder: Path) -> None:
        self._substitute(hosts, ["dump", str(self._run.path), str(folder)], ANSWER_S)

    def end(self, hosts: Collection[str], *, grace_s: float, save: bool) -> None:
        words = ["end", str(self._run.path), str(grace_s), *(["save"] if save else [])]
        patience_s = ANSWER_S + grace_s + KILL_WAIT_S + (SAVE_WAIT_S if save else 0.0)
        left = self._substitute(hosts, words, patience_s)
        if stuck := [f"{host}: {pids}" for host, pids in sorted(left.items()) if pids != NOTHING_LEFT]:
            raise RunError(f"processes that would not end on {', '.join(stuck)}")

    def watch(self, hosts: Collection[str]) -> None:
        argv = [sys.executable, "-m", "ftdash.monitor.agent", "--adopt", str(self._run.path)]
        trouble = []
        for host in sorted(hosts):
            before = _reported(self._run, host)
            try:
                self._stay_on(self._run, host, argv, partial(_reports, self._run, host, before))
            except RunError as error:
                trouble.append(f"{host}: {error}")
        if trouble:
            raise RunError("; ".join(trouble))

    def _substitute(self, hosts: Collection[str], words: Sequence[str], timeout_s: float) -> dict[str, str]:
        argv = [sys.executable, "-m", "ftdash.monitor.agent.substitute", *words]
        return self._run_on(self._run, hosts, argv, timeout_s)


class _Attached:
    """A Slurm job that ftdash did not start: its stacks can be taken without the watchers, no more."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id

    def dump(self, hosts: Collection[str], folder: Path) -> None:
        from ftdash.engine.slurm.attach import dump
        from ftdash.engine.slurm.client import SlurmError

        try:
            dump(self._job_id, folder)
        except SlurmError as error:
            raise RunError(f"srun --overlap: {error}") from None

    def end(self, hosts: Collection[str], *, grace_s: float, save: bool) -> None:
        raise RunError(f"somebody else's job, only watched here: scancel {self._job_id} ends it")

    def watch(self, hosts: Collection[str]) -> None:
        raise RunError(f"ftdash attach --slurm {self._job_id} watches it again")


def _reported(run: RunDir, host: str) -> int:
    """Bytes that the host's agents have written."""
    try:
        return run.node_file(host).stat().st_size
    except OSError:
        return 0


def _reports(run: RunDir, host: str, before: int) -> bool:
    return _reported(run, host) != before


def _through_srun(
    run: RunDir, hosts: Collection[str], argv: Sequence[str], timeout_s: float
) -> dict[str, str]:
    from ftdash.engine.slurm.client import SlurmError
    from ftdash.engine.slurm.remote import on_nodes
    from ftdash.engine.slurm.submitted import job_id

    try:
        found = on_nodes(job_id(run), argv, nodes=hosts, timeout_s=timeout_s)
    except SlurmError as error:
        raise RunError(f"srun --overlap: {error}") from None
    return {host: lines[-1] for host, lines in found.items()}


def _beside_through_srun(run: RunDir, host: str, argv: Sequence[str], is_there: Callable[[], bool]) -> None:
    from ftdash.engine.slurm.client import SlurmError
    from ftdash.engine.slurm.remote import stay_beside
    from ftdash.engine.slurm.submitted import job_id

    try:
        stay_beside(job_id(run), [host], argv, log=run.logs / AGAIN_LOG, is_there=is_there)
    except SlurmError as error:
        raise RunError(f"srun --overlap: {error}") from None


def _beside_through_ssh(run: RunDir, host: str, argv: Sequence[str], is_there: Callable[[], bool]) -> None:
    from ftdash.engine.ssh.hosts import HostsError, start_on, stored_hosts

    try:
        there = next((known for known in stored_hosts(run) if known.node == host), None)
        if there is None:
            raise RunError("no host of this run")
        start_on(there, argv, log=run.logs / AGAIN_LOG)
    except HostsError as error:
        raise RunError(f"ssh: {error}") from None
    deadline = time.monotonic() + ANSWER_S
    while not is_there():
        if time.monotonic() > deadline:
            raise RunError(f"no word from it within {ANSWER_S:.0f} s: see {run.logs / AGAIN_LOG}")
        time.sleep(0.2)


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
