"""Looks at a Slurm job that ftdash did not start: its ranks on every node, and their stacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ftdash.engine.slurm.client import SlurmError
from ftdash.engine.slurm.remote import on_nodes


def look(job_id: str) -> list[dict[str, Any]]:
    """The job as each node sees it, as `ftdash attach --json` prints jobs, joined into one a launcher tree.

    Raises SlurmError when the job does not run or a node does not answer.
    """
    answers = on_nodes(job_id, [sys.executable, "-m", "ftdash.tui.cli", "attach", "--once", "--json"])
    joined: dict[str, Any] | None = None
    for node in sorted(answers):
        try:
            seen = msgspec.json.decode("\n".join(answers[node]))
        except msgspec.DecodeError:
            raise SlurmError(f"{node} gave no readable answer: {' '.join(answers[node])[:200]}") from None
        for job in seen["jobs"]:
            if job["slurm_job_id"] != job_id:
                continue
            if joined is None:
                joined = job
                continue
            joined["ranks"] += job["ranks"]
            for key, value in job.items():
                if not joined.get(key):
                    joined[key] = value
    if joined is not None:
        joined["ranks"].sort(key=lambda rank: rank["rank"])
    return [joined] if joined else []


def dump(job_id: str, folder: Path) -> int:
    """Stacks of all the job's ranks into `folder`, which all nodes must share; how many were written.

    Raises SlurmError as `look` does.
    """
    argv = [sys.executable, "-m", "ftdash.monitor.attach.dump", "--slurm", job_id, str(folder.absolute())]
    return sum(int(line) for lines in on_nodes(job_id, argv).values() for line in lines if line.isdigit())
