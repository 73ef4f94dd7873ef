"""The reader that fits a run: with Slurm's view of it where Slurm carries it."""

from __future__ import annotations

from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError


def reader_for(run: RunDir, *, patient: bool = True) -> RunReader:
    """A reader of this run. A run that cannot be read yet gets the plain one, which says why.

    `patient`: the first poll waits for Slurm's answer, for those who look once.
    """
    try:
        backend = run.read_manifest().backend
    except RunError:
        backend = ""
    if backend == "slurm":
        from ftdash.engine.slurm.watch import JobReader

        return JobReader(run, patient=patient)
    return RunReader(run)
