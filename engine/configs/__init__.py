"""What a plan becomes: config files, launcher commands, and the way back from files that people have."""

from ftdash.engine.configs.generate import generate
from ftdash.engine.configs.types import Command, ConfigError, Generated, Launcher, Rendezvous, TrainArgs

__all__ = ["Command", "ConfigError", "Generated", "Launcher", "Rendezvous", "TrainArgs", "generate"]
