"""Submits a run: run directory, batch script, sbatch; and cancels it again."""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec

from ftdash.engine.launch.job import job_of, spec_plan, write_job
from ftdash.engine.launch.local import prepare
from ftdash.engine.launch.spec import Device, LaunchError, LaunchSpec
from ftdash.engine.slurm import client
from ftdash.engine.slurm.options import SlurmOptions
from ftdash.engine.slurm.script import batch_script, directives
from ftdash.monitor.rundir import RunDir, write_atomic
from ftdash.monitor.state import RunPhase


class Submitted(msgspec.Struct):
    """config/slurm.json, written by the submitter: the job that carries this run."""

    job_id: str


def submit(spec: LaunchSpec) -> RunDir:
    """Write the run directory and hand the job to Slurm. Raises LaunchError with Slurm's own message."""
    if not client.available():
        raise LaunchError("--backend slurm: no sbatch on this machine; log in to a node that submits jobs")
    spec, options = spread(spec)
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
    write_atomic(run.config / "slurm.json", msgspec.json.encode(Submitted(job_id)))
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


def job_id(run: RunDir) -> str:
    """The Slurm job of a run; empty when it has none."""
    try:
        return msgspec.json.decode((run.config / "slurm.json").read_bytes(), type=Submitted).job_id
    except (OSError, msgspec.DecodeError):
        return ""
