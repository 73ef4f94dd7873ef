"""Stops a run from outside: through its agents where they live, with our own hands where they do not."""

from __future__ import annotations

import os
import time
from collections.abc import Set as AbstractSet
from pathlib import Path

from ftdash.monitor import control, exits, procs
from ftdash.monitor.agent.end import KILL_WAIT_S, end_here
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import FINAL, outcome_without_agent
from ftdash.monitor.reach import ANSWER_S, Reach, unanswered
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunPhase

SAVE_WAIT_S = 660.0  # an agent gives a checkpoint ten minutes


def stop_run(
    run: RunDir, *, save: bool = False, grace_s: float = 20.0, reach: Reach | None = None
) -> set[int]:
    """End the run and wait until its processes are gone; returns those on this machine that would not go.

    A run that has ended already is left as it is, but for processes that outlived it. `reach` ends the run
    on other machines whose agents do not answer; without it, or where it fails, RunError names them. Where no
    request can be written, as on a full disk, signals end the run, which saves nothing: with `save` RunError.
    """
    manifest = run.read_manifest()
    host = node_name()
    here = procs.agent_alive(run.path, manifest.agent_pids.get(host, 0))
    elsewhere = {*manifest.agent_pids, *_heard_of(run)[0]} - {host}
    unheard: set[str] = set()
    ended_before = None if here or elsewhere else exits.launcher_exit(run)
    request: Path | None = None
    if RunPhase(manifest.state) not in FINAL and (here or elsewhere):
        try:
            request = control.request_stop(run, save=save, grace_s=grace_s)
        except RunError:
            if save or (elsewhere and reach is None):
                raise
            unheard = elsewhere
        else:
            if elsewhere and reach is not None:
                unheard = unanswered(request, elsewhere, ANSWER_S)
        if unheard and reach is not None:
            reach.end(unheard, grace_s=grace_s, save=save)
        if request is not None:
            _wait_for_agents(run, unheard, grace_s + KILL_WAIT_S + (SAVE_WAIT_S if save else 0.0))
    left = end_here(run, SAVE_WAIT_S if save else grace_s)
    _wait_for_agent_processes(run)
    manifest = run.read_manifest()
    if RunPhase(manifest.state) not in FINAL:
        if silent := elsewhere - unheard - _heard_of(run)[1]:
            raise RunError(f"no answer from the agents on {', '.join(sorted(silent))}: end the run there")
        _write_end(run, ended_before)
    return left


def _heard_of(run: RunDir) -> tuple[set[str], set[str]]:
    """(machines whose agents have reported, those of them whose launcher is known to have ended)."""
    reader = RunReader(run)
    try:
        reader.known_exits()
        return set(reader.hosts()), {end.host for end in reader.summary.launcher_exits.values()}
    finally:
        reader.close()


def _wait_for_agents(run: RunDir, unheard: AbstractSet[str], timeout_s: float) -> None:
    """Until run.json says that the run has ended, or no agent is there to say it.

    `unheard`: machines whose agents are known to be gone.
    """
    deadline = time.monotonic() + timeout_s
    host = node_name()
    while time.monotonic() < deadline:
        manifest = run.read_manifest()
        if RunPhase(manifest.state) in FINAL:
            return
        leading = set(manifest.agent_pids)
        if leading == {host} and not procs.agent_alive(run.path, manifest.agent_pids[host]):
            return
        if leading and leading <= unheard:
            reporting, ended = _heard_of(run)
            if leading | reporting <= unheard | ended:
                return
        time.sleep(0.05)


def _wait_for_agent_processes(run: RunDir, timeout_s: float = 5.0) -> None:
    """An agent that has written the end needs a moment to leave."""
    deadline = time.monotonic() + timeout_s
    while procs.pids_of_run(run.path, procs.AGENT_ENV) - {os.getpid()} and time.monotonic() < deadline:
        time.sleep(0.02)


def _write_end(run: RunDir, ended_before: int | None) -> None:
    """The manifest's last word, written by us: its writer, the agent, is gone.

    `ended_before`: the launcher's exit code where it ended before anybody asked it to.
    """
    reader = RunReader(run)
    try:
        known = reader.known_exits()
    finally:
        reader.close()
    manifest = exits.complete(run, run.read_manifest(), known)
    if ended_before is None:
        manifest.state, manifest.reason = RunPhase.STOPPED, "stopped on request, without an agent"
        manifest.first_failing_rank = None
    else:
        outcome = outcome_without_agent(ended_before)
        manifest.state, manifest.reason = outcome.phase, outcome.reason
    manifest.ended = time.time()
    try:
        run.write_manifest(manifest)
    except OSError as error:
        raise RunError(
            f"every process of {run.run_id} is gone, but its end cannot be written: {error.strerror or error}"
        ) from error
