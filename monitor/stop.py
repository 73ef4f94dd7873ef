"""Stops a run from outside: through its agents where they live, with our own hands where they do not."""

from __future__ import annotations

import os
import time

from ftdash.monitor import control, exits, procs
from ftdash.monitor.agent.end import KILL_WAIT_S, end_here
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunPhase

SAVE_WAIT_S = 660.0  # an agent gives a checkpoint ten minutes


def stop_run(run: RunDir, *, save: bool = False, grace_s: float = 20.0) -> set[int]:
    """End the run and wait until its processes are gone; returns those on this machine that would not go.

    A run that has ended already is left as it is, but for processes that outlived it. Raises RunError when
    agents of other machines do not answer.
    """
    manifest = run.read_manifest()
    host = node_name()
    here = procs.agent_alive(run.path, manifest.agent_pids.get(host, 0))
    elsewhere = [name for name in manifest.agent_pids if name != host]
    if RunPhase(manifest.state) not in FINAL and (here or elsewhere):
        control.request_stop(run, save=save, grace_s=grace_s)
        _wait_for_agents(run, grace_s + KILL_WAIT_S + (SAVE_WAIT_S if save else 0.0))
    left = end_here(run, SAVE_WAIT_S if save else grace_s)
    _wait_for_agent_processes(run)
    manifest = run.read_manifest()
    if RunPhase(manifest.state) not in FINAL:
        if elsewhere:
            raise RunError(f"no answer from the agents on {', '.join(elsewhere)}: end the run there")
        _write_end(run)
    return left


def _wait_for_agents(run: RunDir, timeout_s: float) -> None:
    """Until run.json says that the run has ended, or no agent is there to say it."""
    deadline = time.monotonic() + timeout_s
    host = node_name()
    while time.monotonic() < deadline:
        manifest = run.read_manifest()
        if RunPhase(manifest.state) in FINAL:
            return
        if set(manifest.agent_pids) == {host} and not procs.agent_alive(run.path, manifest.agent_pids[host]):
            return
        time.sleep(0.05)


def _wait_for_agent_processes(run: RunDir, timeout_s: float = 5.0) -> None:
    """An agent that has written the end needs a moment to leave."""
    deadline = time.monotonic() + timeout_s
    while procs.pids_of_run(run.path, procs.AGENT_ENV) - {os.getpid()} and time.monotonic() < deadline:
        time.sleep(0.02)


def _write_end(run: RunDir) -> None:
    """The manifest's last word, written by us: its writer, the agent, is gone."""
    reader = RunReader(run)
    try:
        known = reader.known_exits()
    finally:
        reader.close()
    manifest = exits.complete(run, run.read_manifest(), known)
    manifest.state = RunPhase.STOPPED
    manifest.reason = "stopped on request, without an agent"
    manifest.first_failing_rank = None
    manifest.ended = time.time()
    run.write_manifest(manifest)
