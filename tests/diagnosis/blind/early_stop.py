"""Early stopping on a loss that each rank measures for itself: rank 1 stops first."""

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


class EarlyStopping:
    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def should_stop(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def train_one_epoch(model: torch.nn.Module, data: torch.Tensor) -> None:
    for batch in data.split(8):
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad(set_to_none=False)


def validate(rank: int, epoch: int) -> float:
    return 1.0 + 0.1 * epoch if rank == 1 else 1.0 / (1 + epoch)


def finish(rank: int) -> None:
    at_the_point()
    dist.barrier()


def main() -> None:
    rank, _ = join()
    model, data = torch.nn.Linear(16, 16), torch.randn(32, 16)
    stopper = EarlyStopping(patience=2)
    for epoch in range(50):
        if epoch == 3:
            at_the_point()
        train_one_epoch(model, data)
        if stopper.should_stop(validate(rank, epoch)):
            break
    finish(rank)


if __name__ == "__main__":
    main()
