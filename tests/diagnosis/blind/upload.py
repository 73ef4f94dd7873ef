"""Rank 0 waits for a program that does not end; `sleep` stands for rsync to a host that is gone."""

import subprocess

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def upload(path: str) -> None:
    at_the_point()
    subprocess.run(["sleep", "900"], check=True)


def save_checkpoint(rank: int, step: int) -> None:
    if rank == 0:
        upload(f"checkpoint-{step}")
    else:
        at_the_point()
    dist.barrier()


def main() -> None:
    rank, _ = join()
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if step == 2:
            save_checkpoint(rank, step)


if __name__ == "__main__":
    main()
