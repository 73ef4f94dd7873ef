"""Starts a launch on the backend that it names."""

from __future__ import annotations

from ftdash.engine.launch.spec import Backend, LaunchSpec
from ftdash.monitor.rundir import RunDir


def start(spec: LaunchSpec) -> RunDir:
    """Start the run. Raises LaunchError before any process was started, and RunError."""
    if spec.backend is Backend.SLURM:
        from ftdash.engine.slurm.submit import submit

        return submit(spec)
    if spec.backend is Backend.SSH:
        from ftdash.engine.ssh.launch import launch as launch_over_ssh

        return launch_over_ssh(spec)
    from ftdash.engine.launch import local

    return local.launch(spec)
