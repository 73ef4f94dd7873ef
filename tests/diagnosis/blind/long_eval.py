"""Not a hang: a long evaluation, the same on every rank, with no collective until its end."""

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: int) -> float:
    model.eval()
    total = 0.0
    for number in range(batches):
        total += model(torch.randn(64, 256)).square().mean().item()
        if number == 10:
            at_the_point()
    return total / batches


def main() -> None:
    join()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    score = torch.tensor(evaluate(model, 10_000_000))
    dist.all_reduce(score)


if __name__ == "__main__":
    main()
