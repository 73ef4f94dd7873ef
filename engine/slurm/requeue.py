"""Puts a job that saved and stopped before its time limit back into the queue, to go on from there.

    python -m ftdash.engine.slurm.requeue RUN_DIR

Called by the batch script at its end, once the limit's signal has come.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ftdash.engine.launch.resume import last_whole_checkpoint
from ftdash.engine.slurm import client
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunPhase


def main(argv: list[str]) -> int:
    """0 when the job was requeued, 1 when there is nothing to go on with, said in one line."""
    try:
        manifest = RunDir(argv[0]).read_manifest()
        if manifest.state != RunPhase.STOPPED:
            return _stay(f"the run is {manifest.state}")
        checkpoint = last_whole_checkpoint(Path(manifest.output_dir)) if manifest.output_dir else None
        if checkpoint is None:
            return _stay(f"no whole checkpoint in {manifest.output_dir or 'an output folder'}")
        job = client.job(os.environ["SLURM_JOB_ID"])
        if job is None or job.state != "RUNNING":  # a person cancels it: scancel signals this script too
            return _stay(f"the job is {job.state.lower() if job else 'unknown'}")
        sys.stderr.write(f"ftdash: requeued, to go on from {checkpoint}\n")
        sys.stderr.flush()
        client.call("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except (IndexError, KeyError):
        return _stay("usage: python -m ftdash.engine.slurm.requeue RUN_DIR, in a job")
    except (RunError, client.SlurmError) as error:
        return _stay(str(error))
    return 0


def _stay(reason: str) -> int:
    sys.stderr.write(f"ftdash: not requeued: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
