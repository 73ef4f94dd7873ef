"""Looks at a Slurm job that ftdash did not start: its ranks on every node, their logs and their stacks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ftdash.engine.slurm import client
from ftdash.engine.slurm.client import Job, SlurmError
from ftdash.engine.slurm.remote import Labels, nodes_of, on_nodes, stay_beside
from ftdash.engine.slurm.submitted import Submitted, write_submitted
from ftdash.engine.slurm.watch import describe, end_of
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.procs import AGENT_ENV
from ftdash.monitor.rundir import Manifest, RunDir, RunError, new_run_id
from ftdash.monitor.state import RunPhase

ATTACH = (sys.executable, "-m", "ftdash.tui.cli", "attach")
LOG = "attach.log"  # below logs/: what the nodes' watchers say of themselves


def find(text: str) -> Job:
    """The job that a person names, by number or as a task of a job array (7_3). Raises SlurmError."""
    found = client.tasks(text)
    if not found:
        raise SlurmError(f"Slurm knows no job {text}")
    running = [job for job in found if job.state == "RUNNING"]
    if len(running) > 1:
        raise SlurmError(f"a job array: name one of {', '.join(job.shown_id for job in running)}")
    return (running or found)[0]


def look(job: Job) -> list[dict[str, Any]]:
    """The job as each node sees it, as `ftdash attach --json` prints jobs, joined into one.

    Raises SlurmError when the job does not run or a node does not answer.
    """
    answers = on_nodes(job.id, [*ATTACH, *_of(job), "--once", "--json"])
    seen = []
    for node in sorted(answers):
        try:
            seen.append(msgspec.json.decode("".join(answers[node])))
        except msgspec.DecodeError:
            raise SlurmError(f"{node} gave no readable answer: {' '.join(answers[node])[:200]}") from None
    return joined(seen)


def _of(job: Job) -> list[str]:
    """Only this job, and its log, which the ranks write through pipes and srun to another node."""
    return ["--of-job", job.id, *(["--log", job.output] if job.output else [])]


def joined(looks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the nodes have seen, as one job."""
    found: dict[str, Any] | None = None
    for job in (job for seen in looks for job in seen["jobs"]):
        if found is None:
            found = job
            continue
        found["ranks"] += job["ranks"]
        for key, value in job.items():
            if not found.get(key):
                found[key] = value
    if found is not None:
        found["ranks"].sort(key=lambda rank: rank["rank"])
    return [found] if found else []


def dump(job_id: str, folder: Path) -> int:
    """Stacks of all the job's ranks into `folder`, which all nodes must share; how many were written.

    Raises SlurmError as `look` does.
    """
    argv = [sys.executable, "-m", "ftdash.monitor.attach.dump", "--slurm", job_id, str(folder.absolute())]
    return sum(int(line) for lines in on_nodes(job_id, argv).values() for line in lines if line.isdigit())


@dataclass(frozen=True, slots=True)
class Recording:
    """A watcher on each of the job's nodes, started with srun --overlap, that writes into `run`."""

    run: RunDir
    job: Job
    nodes: tuple[str, ...]
    step: subprocess.Popen[str]

    def looks(self) -> Iterator[list[dict[str, Any]]]:
        """The job as its nodes saw it, once each of them has looked again or one of them twice."""
        assert self.step.stdout is not None
        labels, newest = Labels(), dict[str, dict[str, Any]]()
        for line in self.step.stdout:
            whole = labels.take(line.rstrip("\n"))
            if whole is None:
                continue
            if whole[0] in newest:  # another node is silent
                yield joined(newest[task] for task in sorted(newest, key=int))
                newest.clear()
            with contextlib.suppress(msgspec.DecodeError):
                newest[whole[0]] = msgspec.json.decode(whole[1])
            if len(newest) == len(self.nodes):
                yield joined(newest[task] for task in sorted(newest, key=int))
                newest.clear()

    def close(self) -> None:
        """End the watchers, not the job, and say in the run directory how it stood then.

        A job that is just ending is left to whoever reads the run next: Slurm tells its end later.
        """
        self.step.terminate()
        self.step.wait()
        try:
            job = client.job(self.job.id)
        except SlurmError:
            return
        manifest = self.run.read_manifest()
        if RunPhase(manifest.state) in FINAL or job is None or job.state == "COMPLETING":
            return
        manifest.state, manifest.reason = RunPhase.STOPPED, "no longer watched; the job goes on"
        if job.is_over:
            manifest.state, manifest.reason = end_of(job), f"Slurm: {describe(job)}"
        manifest.ended = time.time()
        self.run.write_manifest(manifest)


def record(job: Job, *, root: str | None, interval_s: float, heard: bool) -> Recording:
    """Start watching. `heard`: the looks are to be read, else they go into the run directory only.

    The nodes must share the run directory. Raises SlurmError and RunError.
    """
    nodes = nodes_of(job.id)
    jobs = look(job)
    if not jobs:
        raise SlurmError(f"no training process of yours on {', '.join(nodes)}")
    run = RunDir.create(
        Manifest(
            run=new_run_id(f"slurm-{job.id}-{job.name}"),
            created=time.time(),
            name=job.name,
            command=[jobs[0]["launcher"] or jobs[0]["ranks"][0]["command"]],
            backend="slurm",
            attached=True,
            state=RunPhase.RUNNING,
            world_size=jobs[0]["world_size"],
            hosts=nodes,
            started=float(job.started),
            slurm_job_id=job.id,
        ),
        root,
    )
    write_submitted(run, Submitted(job.id))
    if job.output:
        (run.logs / f"slurm-{job.id}.out.log").symlink_to(job.output)
    told = f"{AGENT_ENV}={run.path}"  # readers on the same machine know a living watcher by it
    argv = ["env", told, *ATTACH, *_of(job), "--record", str(run.path), f"--interval={interval_s}"]
    try:
        step = stay_beside(
            job.id,
            nodes,
            [*argv, "--json"] if heard else argv,
            log=run.logs / LOG,
            is_there=lambda: all(run.node_file(node).exists() for node in nodes),
            heard=heard,
        )
    except SlurmError as error:
        manifest = run.read_manifest()
        manifest.state, manifest.reason, manifest.ended = RunPhase.FAILED, str(error), time.time()
        run.write_manifest(manifest)
        raise RunError(f"no watcher on {', '.join(nodes)}: {error}") from None
    return Recording(run, job, tuple(nodes), step)
