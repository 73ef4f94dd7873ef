"""The rank that a script of the zoo is, and its sign that it has come to where it hangs or works."""

import os
from pathlib import Path

import torch

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["ZOO_DIR"])


def ready():
    (FOLDER / f"ready-{RANK}").touch()


def tensor(size=4):
    return torch.ones(size)
