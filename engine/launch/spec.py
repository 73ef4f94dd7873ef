"""What is to be launched: the plan or command, where it runs, and what it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftdash.engine.plan import Plan
from ftdash.engine.slurm.options import SlurmOptions


class LaunchError(Exception):
    """The launch was refused before any process started; the text is one line for a person."""


class Device(StrEnum):
    AUTO = "auto"  # cuda where this machine has it, cpu otherwise
    CPU = "cpu"
    CUDA = "cuda"


class Backend(StrEnum):
    LOCAL = "local"
    SLURM = "slurm"
    SSH = "ssh"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch. With `command`, that launcher runs as it is; otherwise `plan` becomes a command."""

    plan: Plan | None = None
    command: tuple[str, ...] = ()
    data: str | None = None  # hub id or local JSONL; None: the small set that ships
    steps: int | None = None  # optimizer steps; None: one pass over the data
    out: Path | None = None  # where checkpoints go; None: below the run directory
    device: Device = Device.AUTO
    backend: Backend = Backend.LOCAL
    nodes: int = 1
    slurm: SlurmOptions | None = None  # of a run under Slurm
    hosts: Path | None = None  # hosts file of a run over ssh
    name: str = ""  # shown in the run's id; None: from the model or command
    runs: Path | None = None  # where run directories live; None: $FTDASH_HOME/runs
    port: int | None = None  # rendezvous port; None: a free one
    train_args: tuple[str, ...] = ()  # more arguments for the training script, as they are
    save_steps: int = 0  # a checkpoint every so many steps; 0: the final model only
    resume: Path | None = None  # a checkpoint folder to go on from
    env: tuple[tuple[str, str], ...] = ()  # added to the ranks' environment; stored, so never a secret
