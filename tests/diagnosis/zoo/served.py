"""Gloo ranks that know nothing of ftdash: their stacks are alike, their flight recorders are not."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


def reduce(group, size):
    dist.all_reduce(torch.ones(size), group=group)


def groups_in_another_order():
    """Every rank is in the same line of the same function, rank 1 with the other group."""
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(2)]
    for group in groups:
        reduce(group, 4)
    (Path(os.environ["ZOO_DIR"]) / f"ready-{RANK}").touch()
    for group in reversed(groups) if RANK == 1 else groups:
        reduce(group, 4)  # named


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
