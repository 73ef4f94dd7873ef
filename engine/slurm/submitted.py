"""Which job carries a run, and what it asked of Slurm: config/slurm.json."""

from __future__ import annotations

import msgspec

from ftdash.engine.slurm.options import SlurmOptions
from ftdash.monitor.rundir import RunDir, decode_json, write_atomic


class Submitted(msgspec.Struct):
    """Written by the submitter."""

    job_id: str
    options: SlurmOptions | None = None  # as they were given, for another try


def write_submitted(run: RunDir, submitted: Submitted) -> None:
    write_atomic(run.config / "slurm.json", msgspec.json.encode(submitted))


def read_submitted(run: RunDir) -> Submitted | None:
    """None for a run without a job."""
    try:
        return decode_json((run.config / "slurm.json").read_bytes(), Submitted)
    except (OSError, msgspec.DecodeError):
        return None


def stored_options(run: RunDir) -> SlurmOptions | None:
    """What the run's job was asked to be; None when it has none, or an older ftdash submitted it."""
    stored = read_submitted(run)
    return stored.options if stored is not None else None


def job_id(run: RunDir) -> str:
    """The Slurm job of a run; empty when it has none."""
    stored = read_submitted(run)
    return stored.job_id if stored is not None else ""
