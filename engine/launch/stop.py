"""Ends a run on any backend: through its agents, then without them, then by taking its job out of Slurm."""

from __future__ import annotations

import contextlib

from ftdash.engine.launch.nodes import reach_of
from ftdash.engine.launch.spec import Backend
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.stop import stop_run


def stop(run: RunDir, *, save: bool = False, grace_s: float = 20.0) -> set[int]:
    """Returns when every process of the run is gone: those of this machine that would not go.

    Raises RunError in one line when another machine's cannot be ended, or Slurm does not answer.
    """
    manifest = run.read_manifest()
    if manifest.attached:
        how = f"scancel {manifest.slurm_job_id}" if manifest.slurm_job_id else "whoever started it"
        raise RunError(f"{run.run_id} is somebody else's job, only watched here: {how} ends it")
    if manifest.backend != Backend.SLURM:
        return stop_run(run, save=save, grace_s=grace_s, reach=reach_of(run))
    from ftdash.engine.slurm.client import SlurmError
    from ftdash.engine.slurm.watch import stop_job

    try:
        if manifest.agent_pids:
            with contextlib.suppress(RunError):  # Slurm ends what agents and srun did not
                stop_run(run, save=save, grace_s=grace_s, reach=reach_of(run))
        stop_job(run, grace_s=grace_s)
    except SlurmError as error:
        raise RunError(f"Slurm: {error}") from None
    return set()
