"""Not a hang: rank 1 still compiles the graphs of its first step, the others wait for its gradients."""

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def build(width: int) -> torch.nn.Module:
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(40)]
    return torch.nn.Sequential(*layers)


def first_step(rank: int) -> None:
    for bucket in range(400 if rank == 1 else 1):
        torch._dynamo.reset()
        model = torch.compile(build(8), backend="aot_eager")
        model(torch.randn(2 + bucket, 8)).sum().backward()
        if bucket == 0:
            at_the_point()


def main() -> None:
    rank, _ = join()
    first_step(rank)
    dist.all_reduce(torch.ones(8))


if __name__ == "__main__":
    main()
