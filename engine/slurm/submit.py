"""Submits a run: run directory, batch script, sbatch; and cancels it again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ftdash.engine.launch.job import job_of, read_job, spec_plan, write_job
from ftdash.engine.launch.local import prepare
from ftdash.engine.launch.restart import restarted
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.slurm import client
from ftdash.engine.slurm.defaults import Site, ask_site, with_defaults
from ftdash.engine.slurm.options import SlurmOptions
from ftdash.engine.slurm.script import batch_script, directives
from ftdash.engine.slurm.submitted import Submitted, read_submitted, write_submitted
from ftdash.monitor.rundir import RunDir, write_atomic
from ftdash.monitor.state import RunPhase


def submit(spec: LaunchSpec) -> RunDir:
    """Write the run directory and hand the job to Slurm. Raises LaunchError with Slurm's own message."""
    if not client.available():
        raise LaunchError("--backend slurm: no sbatch on this machine; log in to a node that submits jobs")
    given = spec.slurm or SlurmOptions()
    spec, options = spread(spec)
    if options.cpus_per_task is None and ranks_per_node(spec, options):
        try:
            options = completed(spec, options, ask_site())
        except client.SlurmError as error:
            raise LaunchError(f"Slurm: {error}") from None
    prepared = prepare(spec)
    run = prepared.run
    write_job(run, job_of(prepared, spec, options.nodes))
    script = run.config / "job.sbatch"
    write_atomic(script, batch_script(run.path, options, python=sys.executable).encode())
    _, arguments = directives(options)
    try:
        answer = client.call(
            "sbatch",
            "--parsable",
            f"--job-name={spec.name or prepared.manifest.name or run.run_id}",
            f"--chdir={run.path}",
            "--output=logs/slurm-%j.out",
            "--open-mode=append",
            *arguments,
            str(script),
        )
    except client.SlurmError as error:
        prepared.manifest.state, prepared.manifest.reason = RunPhase.FAILED, f"sbatch: {error}"
        run.write_manifest(prepared.manifest)
        raise LaunchError(f"Slurm refused the job: {error}") from None
    job_id = answer.strip().split(";")[0]
    write_submitted(run, Submitted(job_id, given))
    return run


def spread(spec: LaunchSpec) -> tuple[LaunchSpec, SlurmOptions]:
    """The spec with its ranks spread over the nodes, and the options with what that asks of a node."""
    options = spec.slurm or SlurmOptions()
    nodes = max(options.nodes, spec.nodes)
    if spec.plan is None:
        gpus = 0 if spec.device is Device.CPU else options.gpus_per_node
        return replace(spec, nodes=nodes), replace(options, nodes=nodes, gpus_per_node=gpus)
    plan = spec_plan(spec.plan, nodes)
    per_node = plan.gpus // nodes
    gpus = 0 if spec.device is Device.CPU else (options.gpus_per_node or per_node)
    return replace(spec, plan=plan, nodes=nodes), replace(options, nodes=nodes, gpus_per_node=gpus)


def completed(spec: LaunchSpec, options: SlurmOptions, site: Site) -> SlurmOptions:
    """`spread`'s options with what sinfo says. A partition that it does not know is for sbatch to refuse."""
    ranks = ranks_per_node(spec, options)
    return with_defaults(options, ranks, site.shape(options.partition)) if ranks else options


def ranks_per_node(spec: LaunchSpec, options: SlurmOptions) -> int:
    """0 for a command of somebody's own that asks for no GPUs: nobody knows how many it starts."""
    return spec.plan.gpus_per_node if spec.plan is not None else options.gpus_per_node or 0


def resubmit(run: RunDir, *, exclude: Sequence[str] = ()) -> RunDir:
    """The same run as a new job that asks for what the old one asked for, but for the nodes in `exclude`.

    A plan goes on from its last whole checkpoint, a command of somebody's own starts anew. The old run must
    have ended. Raises LaunchError and RunError in one line.
    """
    stored = read_submitted(run)
    if stored is None:
        raise LaunchError(f"{run.run_id} was not submitted to Slurm")
    before = stored.options or SlurmOptions()
    unwanted = dict.fromkeys([*filter(None, before.exclude.split(",")), *exclude])
    return submit(replace(_again(run), slurm=replace(before, exclude=",".join(unwanted))))


def _again(run: RunDir) -> LaunchSpec:
    job, manifest = read_job(run), run.read_manifest()
    if job.plan is not None:
        return restarted(run)
    return LaunchSpec(
        command=("env", "-C", job.directory, *job.command) if job.directory else tuple(job.command),
        backend=Backend.SLURM,
        nodes=job.nodes,
        steps=manifest.max_steps or None,
        out=Path(manifest.output_dir) if manifest.output_dir else None,
        name=manifest.name,
        runs=run.path.parent,
        env=tuple(job.env.items()),
    )
