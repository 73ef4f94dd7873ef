"""Starts a run on this machine: checks, run directory, configs, then the node agent."""

from __future__ import annotations

from ftdash.engine.launch.spec import LaunchSpec
from ftdash.monitor.rundir import RunDir


def launch(spec: LaunchSpec) -> RunDir:
    """Check, write the run directory and start the agent, detached from this terminal.

    Raises LaunchError, in one line naming the flag or file, before any process was started.
    """
    raise NotImplementedError
