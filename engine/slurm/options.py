"""What a job asks of Slurm, checked before Slurm sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

TIME = re.compile(r"^(\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2})$")
SIZE = re.compile(r"^\d+(\.\d+)?[KMGT]?$", re.IGNORECASE)


# What a run's job is made of, and what would keep sbatch from answering: no further directive may say it.
OURS = re.compile(r"^(--(array|nodes|ntasks|ntasks-per-node|signal|wrap|wait|test-only)\b|-[aNnW])")

TEXTS = ("partition", "account", "qos", "memory", "time", "constraint", "exclude", "reservation", "container")


class SlurmOptionError(ValueError):
    """An option that Slurm could not take; one line naming the flag."""


class ContainerRuntime(StrEnum):
    PYXIS = "pyxis"  # srun --container-image, NVIDIA enroot
    APPTAINER = "apptainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """A job's directives; None or empty leaves the choice to the cluster.

    `signal_lead_s` is how long before the time limit the job is told to save and stop: at least one
    step and one save.
    """

    nodes: int = 1
    gpus_per_node: int | None = None  # None: as the plan says; 0 asks for none (CPU)
    cpus_per_task: int | None = None
    partition: str = ""
    account: str = ""
    qos: str = ""
    memory: str = ""  # a node's, such as 200G
    time: str = ""  # as sbatch reads it: 30, 8:00:00, 1-12
    constraint: str = ""
    exclude: str = ""
    reservation: str = ""
    container: str = ""
    container_runtime: ContainerRuntime = ContainerRuntime.PYXIS
    modules: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()  # further ones, as they are: "--switches=1"
    signal_lead_s: int = 120
    requeue: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SlurmOptionError(f"--nodes {self.nodes}: at least 1")
        if self.gpus_per_node is not None and self.gpus_per_node < 0:
            raise SlurmOptionError(f"--gpus-per-node {self.gpus_per_node}: 0 or more")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise SlurmOptionError(f"--cpus-per-task {self.cpus_per_task}: at least 1")
        texts = [getattr(self, name) for name in TEXTS]
        if any("\0" in text for text in (*texts, *self.modules, *self.directives)):
            raise SlurmOptionError("an option for Slurm holds a NUL character, which no program can be given")
        if self.time and not TIME.match(self.time):
            raise SlurmOptionError(
                f"--time {self.time!r}: minutes, H:M:S or D-H:M:S, such as 90, 8:00:00 or 1-12"
            )
        if self.memory and not SIZE.match(self.memory):
            raise SlurmOptionError(f"--memory {self.memory!r}: a number with K, M, G or T, such as 200G")
        if self.signal_lead_s < 1:
            raise SlurmOptionError(f"--signal-lead {self.signal_lead_s}: seconds, at least 1")
        for directive in self.directives:
            if not directive.startswith("-") or "\n" in directive:
                raise SlurmOptionError(f"--directive {directive!r}: one sbatch option, such as --switches=1")
            if OURS.match(directive):
                raise SlurmOptionError(
                    f"--directive {directive!r}: one run is one job with one task a node; use --nodes, "
                    "--gpus-per-node, --signal-lead"
                )
        for module in self.modules:
            if not re.match(r"^[\w./+:-]+$", module):
                raise SlurmOptionError(f"--module {module!r}: a module's name, such as cuda/12.8")

    def arguments(self) -> list[str]:
        """The sbatch arguments, one option each; values are never seen by a shell."""
        pairs = [
            ("nodes", str(self.nodes)),
            ("ntasks-per-node", "1"),  # one launcher a node; the launcher starts the ranks
            ("gpus-per-node", str(self.gpus_per_node) if self.gpus_per_node else ""),
            ("cpus-per-task", str(self.cpus_per_task) if self.cpus_per_task else ""),
            ("partition", self.partition),
            ("account", self.account),
            ("qos", self.qos),
            ("mem", self.memory),
            ("time", self.time),
            ("constraint", self.constraint),
            ("exclude", self.exclude),
            ("reservation", self.reservation),
            ("signal", f"B:USR1@{self.signal_lead_s}"),
        ]
        found = [f"--{name}={value}" for name, value in pairs if value]
        found.append("--requeue" if self.requeue else "--no-requeue")
        return [*found, *self.directives]
