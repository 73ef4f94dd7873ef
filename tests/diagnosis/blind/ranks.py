"""How a script of this folder joins its group and says that it got to the point it is about."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist


def join() -> tuple[int, int]:
    """Rank and world size, after the gloo group is up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def at_the_point() -> None:
    """Leaves the marker file of this rank."""
    Path(os.environ["BLIND_MARKERS"], os.environ["RANK"]).touch()
