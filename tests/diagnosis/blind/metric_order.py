"""Metrics are reduced in the order of a dict that rank 1 filled the other way round."""

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def reduce_loss(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def collect_lengths(value: torch.Tensor) -> None:
    parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)


def sync_metrics(metrics: dict) -> None:
    for name, value in metrics.items():
        if name == "loss":
            reduce_loss(value)
        else:
            collect_lengths(value)


def main() -> None:
    rank, _ = join()
    metrics = {"loss": torch.ones(1), "length": torch.ones(6)}
    if rank == 1:
        metrics = dict(reversed(metrics.items()))
    at_the_point()
    sync_metrics(metrics)
    dist.barrier()


if __name__ == "__main__":
    main()
