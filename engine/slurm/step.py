"""Runs inside the job's step, once on each node: works out who this node is, then becomes its agent's
keeper.

    srun … python -m ftdash.engine.slurm.step RUN_DIR

Everything is read from this task's own environment, so nothing can have been expanded too early.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from ftdash.engine.launch.job import start_agent_here
from ftdash.engine.slurm import client
from ftdash.monitor.rundir import RunDir, RunError


def main(argv: list[str]) -> NoReturn:
    """Replace this process by the agent of this node; exit status 2 with one line when it cannot."""
    if len(argv) != 1:
        _refuse("usage: python -m ftdash.engine.slurm.step RUN_DIR")
    run = RunDir(Path(argv[0]))
    try:
        node_rank = int(os.environ["SLURM_NODEID"])
        first = client.hostnames(os.environ["SLURM_JOB_NODELIST"])[0]
        attempt = ".".join(
            os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        )
        address = client.node_address(first)
        start_agent_here(run, node_rank=node_rank, address=address, attempt=attempt, kept=True)
    except KeyError as error:
        _refuse(f"{error.args[0]} is not set: this runs inside a Slurm step only")
    except (RunError, client.SlurmError, OSError) as error:
        _refuse(f"{os.environ.get('SLURMD_NODENAME', '')}: {error}")


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"ftdash: {text}\n")
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
