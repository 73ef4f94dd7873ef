"""DistributedDataParallel over a sampler that gives the last rank one batch fewer."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.diagnosis.blind.ranks import at_the_point, join


def collate(rows: list) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


def my_part(data: Dataset, rank: int, world: int) -> Subset:
    return Subset(data, list(range(rank, 16 * world - 4, world)))


def train_one_epoch(model: torch.nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    for step, batch in enumerate(loader):
        if step == 3:
            at_the_point()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def validate(model: torch.nn.Module, world: int) -> float:
    losses: list = [None] * world
    at_the_point()
    dist.all_gather_object(losses, 0.5)
    return sum(losses) / world


def main() -> None:
    rank, world = join()
    data = TensorDataset(torch.randn(16 * world, 8))
    part = my_part(data, rank, world)
    if rank == world - 1:
        part = Subset(part, range(12))
    loader = DataLoader(part, batch_size=4, collate_fn=collate)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    train_one_epoch(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    validate(model, world)


if __name__ == "__main__":
    main()
