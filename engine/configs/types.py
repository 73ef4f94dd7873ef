"""What a generated configuration is: its files, its commands per node, and what a person should know."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ftdash.engine.plan import Plan


class ConfigError(Exception):
    """A plan cannot become a run; the text is one line with the reason and a way out."""


class Launcher(StrEnum):
    PYTHON = "python"
    ACCELERATE = "accelerate"
    TORCHRUN = "torchrun"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArgs:
    """What the training script needs beside the plan. `model` is a hub name or a local folder."""

    model: str
    output_dir: str
    data: str | None = None  # None: the small chat set that ships
    steps: int = 20
    save_steps: int = 0  # 0: no checkpoints, the final model only
    resume: str | None = None  # a checkpoint folder
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    seed: int | None = None
    learning_rate: float | None = None
    extra: tuple[str, ...] = ()  # further arguments, handed to the script as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of several nodes meet. One node needs none: a free port is taken there."""

    address: str = "NODE0"  # host name of the first node
    port: int = 29400
    hosts: tuple[str, ...] = ()  # all nodes in order, for launchers that want a host file


@dataclass(frozen=True, slots=True)
class Command:
    """One way to start the run: an argv for each node, in node order."""

    launcher: Launcher
    nodes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """`files` are named relative to the folder that `commands` refer to; the first command is preferred.

    `notes` are sentences for a person; `not_rehearsed` names files that no CPU run can exercise.
    """

    files: dict[str, str]
    commands: tuple[Command, ...]
    notes: tuple[str, ...] = ()
    not_rehearsed: tuple[str, ...] = field(default=())

    @property
    def preferred(self) -> Command:
        return self.commands[0]

    def command(self, launcher: Launcher | str) -> Command:
        """Raises ConfigError when this plan cannot be started by `launcher`."""
        for command in self.commands:
            if command.launcher == launcher:
                return command
        offered = ", ".join(command.launcher for command in self.commands)
        raise ConfigError(f"launcher {launcher} cannot start this plan: one of {offered}")


def nodes_of(plan: Plan) -> int:
    """Number of nodes that `plan.gpus` ranks fill, `gpus_per_node` on each."""
    return max(1, -(-plan.gpus // plan.gpus_per_node))


def local_world(plan: Plan) -> int:
    """Ranks on each node."""
    return plan.gpus // nodes_of(plan)
