"""Not a hang: rank 2 takes twice as long for every step, yet the run moves."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.blind.ranks import at_the_point, join


def load_batch(rank: int) -> torch.Tensor:
    time.sleep(0.8 if rank == 2 else 0.4)
    return torch.randn(16, 64)


def train(model: torch.nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        loss = model(load_batch(rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            at_the_point()


def main() -> None:
    rank, _ = join()
    train(DistributedDataParallel(torch.nn.Linear(64, 64)), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
