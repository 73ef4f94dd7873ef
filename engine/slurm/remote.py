"""Runs a command on every node of a job, beside what runs there and without waiting for its resources."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ftdash.engine.slurm import client

# srun ends a step a moment after its first task has ended; output of slow nodes was seen to be lost then.
TRIES = 3


def on_nodes(
    job_id: str, argv: Sequence[str], *, nodes: Collection[str] | None = None, timeout_s: float = 60.0
) -> dict[str, list[str]]:
    """Standard output by node, in lines, of `argv` run once on each of a running job's nodes.

    `nodes` names some of them. A node that gave nothing is asked again. Raises SlurmError when the job does
    not run, or when a node keeps silent.
    """
    job = client.job(job_id)
    if job is None:
        raise client.SlurmError(f"Slurm knows no job {job_id}")
    if job.state != "RUNNING":
        raise client.SlurmError(
            f"job {job_id} is {job.state.lower() or 'unknown'}: it has no processes to look at"
        )
    asked = [node for node in client.hostnames(job.nodes) if nodes is None or node in nodes]
    found: dict[str, list[str]] = {}
    for _ in range(TRIES):
        missing = [node for node in asked if node not in found]
        if not missing:
            return found
        found |= _ask(job_id, missing, argv, timeout_s)
    missing = [node for node in asked if node not in found]
    if missing:
        raise client.SlurmError(f"job {job_id}: no answer from {', '.join(missing)}")
    return found


def _ask(job_id: str, nodes: Sequence[str], argv: Sequence[str], timeout_s: float) -> dict[str, list[str]]:
    # --overlap: the job's own step holds its CPUs and would be waited for; likewise its GPUs
    step = ["srun", f"--jobid={job_id}", "--overlap", "--gres=none", "--mem=0", f"--nodes={len(nodes)}"]
    step += [f"--nodelist={','.join(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    shell = 'printf "%s\\n" "ftdash-node $SLURMD_NODENAME"; exec "$@"'
    text = client.call(*step, "--label", "sh", "-c", shell, "sh", *argv, timeout_s=timeout_s)
    by_task: dict[str, list[str]] = {}
    for line in text.splitlines():
        task, found, rest = line.partition(": ")
        if found and task.strip().isdigit():
            by_task.setdefault(task.strip(), []).append(rest)
    result = {}
    for lines in by_task.values():
        name = next((line.split()[1] for line in lines if line.startswith("ftdash-node ")), "")
        output = [line for line in lines if not line.startswith("ftdash-node ")]
        if name and output:
            result[name] = output
    return result
