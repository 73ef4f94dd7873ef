"""A run that has ended, as a launch that goes on from its last whole checkpoint."""

from __future__ import annotations

from pathlib import Path

from ftdash.engine.checkpoint.recognise import inspect
from ftdash.engine.configs import TrainArgs
from ftdash.engine.launch.job import read_job
from ftdash.engine.launch.resume import whole_checkpoints
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.slurm.submitted import stored_options
from ftdash.engine.ssh.hosts import hosts_file
from ftdash.monitor.rundir import RunDir


def restarted(run: RunDir, *, steps: int | None = None) -> LaunchSpec:
    """The same plan, data and output folder; `steps` replaces the number of steps in all.

    Without a whole checkpoint it starts anew. It asks Slurm for what the run asked for, or goes to the hosts
    that it ran on. Raises LaunchError and RunError.
    """
    manifest = run.read_manifest()
    if manifest.plan is None:
        raise LaunchError(f"{run.run_id} ran a command of its own: start that command again")
    job = read_job(run)
    if job.plan is None or job.train is None:
        raise LaunchError(f"{run.run_id} has no plan to go on with")
    output = Path(job.train.output_dir)
    made, checkpoint = _last(output)
    wanted = steps or job.train.steps
    if checkpoint is not None and made >= wanted:
        raise LaunchError(f"{run.run_id} has made {made} of {wanted} steps: ask for more of them to go on")
    backend = Backend(manifest.backend or Backend.LOCAL)
    return LaunchSpec(
        plan=job.plan,
        data=job.train.data,
        steps=wanted,
        out=output,
        device=_device(job.train),
        backend=backend,
        nodes=job.nodes,
        slurm=stored_options(run) if backend is Backend.SLURM else None,
        hosts=hosts_file(run) if backend is Backend.SSH else None,
        name=manifest.name,
        runs=run.path.parent,
        train_args=job.train.extra,
        save_steps=job.train.save_steps,
        resume=checkpoint,
        env=tuple(job.env.items()),
    )


def _last(output: Path) -> tuple[int, Path | None]:
    """Step and folder of the newest checkpoint whose files are there and readable; (0, None) for none."""
    for step, path in whole_checkpoints(output):
        found = inspect(path)
        if found is None or found.whole:
            return step, path
    return 0, None


def _device(train: TrainArgs) -> Device:
    return Device.CPU if train.device == "cpu" else Device.AUTO
