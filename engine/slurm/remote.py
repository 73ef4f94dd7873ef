"""Runs a command on every node of a job, beside what runs there and without waiting for its resources."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ftdash.engine.slurm import client

# srun ends a step a moment after its first task has ended; output of slow nodes was seen to be lost then.
TRIES = 3
START_S = 20.0  # a step, an interpreter on a shared file system, and its first sample
# srun hands output on in messages of so many bytes (MAX_MSG_LEN in slurmstepd's io.c) and labels each of
# them as a line: a longer line arrives in pieces, all but the last of just this length.
PIECE_BYTES = 1024


def on_nodes(
    job_id: str, argv: Sequence[str], *, nodes: Collection[str] | None = None, timeout_s: float = 60.0
) -> dict[str, list[str]]:
    """Standard output by node, in lines, of `argv` run once on each of a running job's nodes.

    `nodes` names some of them. A node that gave nothing is asked again. Raises SlurmError when the job does
    not run, or when a node keeps silent.
    """
    asked = [node for node in nodes_of(job_id) if nodes is None or node in nodes]
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


def nodes_of(job_id: str) -> list[str]:
    """The nodes of a running job. Raises SlurmError, with the job's state when it does not run."""
    job = client.job(job_id)
    if job is None:
        raise client.SlurmError(f"Slurm knows no job {job_id}")
    if job.state != "RUNNING":
        why = f" ({job.reason})" if job.reason else ""
        raise client.SlurmError(
            f"job {job_id} is {job.state.lower() or 'unknown'}{why}: it has no processes to look at"
        )
    return client.hostnames(job.nodes)


def stay_beside(
    job_id: str,
    nodes: Sequence[str],
    argv: Sequence[str],
    *,
    log: Path,
    is_there: Callable[[], bool],
    heard: bool = False,
) -> subprocess.Popen[str]:
    """A step that runs `argv` on each of these nodes until it ends, once `is_there` sees it at work.

    What it says of itself goes to `log`. Its output is dropped, or with `heard` to be read, labelled by task,
    from the srun returned, with which it ends. Where Slurm confines devices, a step without the job's GPUs is
    not shown them, so it shares them; before 22.05 such a step waits for the job's own, and goes without.
    Raises SlurmError.
    """
    said = ""
    for devices in (True, False):
        step = _start([*_step(job_id, nodes, devices=devices), *argv], log, heard)
        try:
            if _waited(step, is_there):
                return step
        except BaseException:  # whoever waits is being ended: nobody would end the step
            step.terminate()
            raise
        said = _last_line(log) if step.poll() is not None else f"no word within {START_S:.0f} s"
        step.terminate()
        step.wait()
    raise client.SlurmError(said)


def _waited(step: subprocess.Popen[str], is_there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + START_S
    while step.poll() is None and time.monotonic() < deadline:
        if is_there():
            return True
        time.sleep(0.2)
    return False


def _start(argv: Sequence[str], log: Path, heard: bool) -> subprocess.Popen[str]:
    with log.open("ab") as said:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if heard else subprocess.DEVNULL,
            stderr=said,
            env=client.environment(),
            text=True,
            errors="replace",
            start_new_session=True,
        )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it ended at once")


def _step(job_id: str, nodes: Sequence[str], *, devices: bool = False) -> list[str]:
    """srun beside what the job runs. --overlap: its own step holds the CPUs and would be waited for."""
    step = ["srun", f"--jobid={job_id}", "--overlap", "--mem=0", f"--nodes={len(nodes)}"]
    step += [f"--nodelist={','.join(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--label"]
    return step if devices else [*step, "--gres=none"]


def _ask(job_id: str, nodes: Sequence[str], argv: Sequence[str], timeout_s: float) -> dict[str, list[str]]:
    shell = 'printf "%s\\n" "ftdash-node $SLURMD_NODENAME"; exec "$@"'
    text = client.call(*_step(job_id, nodes), "sh", "-c", shell, "sh", *argv, timeout_s=timeout_s)
    result = {}
    for lines in by_task(text).values():
        name = next((line.split()[1] for line in lines if line.startswith("ftdash-node ")), "")
        output = [line for line in lines if not line.startswith("ftdash-node ")]
        if name and output:
            result[name] = output
    return result


def by_task(text: str) -> dict[str, list[str]]:
    """The output of `srun --label` in whole lines, by task."""
    found: dict[str, list[str]] = {}
    labels = Labels()
    for line in text.splitlines():
        if (whole := labels.take(line)) is not None:
            found.setdefault(whole[0], []).append(whole[1])
    return found


class Labels:
    """Puts the lines of `srun --label` together. ASCII: other text may be torn within a letter."""

    def __init__(self) -> None:
        self._torn: dict[str, str] = {}

    def take(self, line: str) -> tuple[str, str] | None:
        """(task, line) once the line is whole; None for a piece, and for what bears no label."""
        label, colon, piece = line.partition(": ")
        task = label.strip()
        if not colon or not task.isdigit():
            return None
        text = self._torn.pop(task, "") + piece
        if len(piece) == PIECE_BYTES:
            self._torn[task] = text
            return None
        return task, text
