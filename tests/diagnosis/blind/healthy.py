"""Not a hang: three ranks reduce their gradients every 50 ms."""

import time

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.045)
    return model(batch).square().mean()


def train_one_epoch(model: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        compute_loss(model, torch.randn(16, 64)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad()
        if step == 10:
            at_the_point()


def main() -> None:
    join()
    train_one_epoch(torch.nn.Linear(64, 64), steps=100_000)


if __name__ == "__main__":
    main()
