"""Rank 1 expects the run's configuration from another rank than everybody else."""

import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def share_config(rank: int) -> dict:
    payload = [{"lr": 1e-4}] if rank == 0 else [None]
    source = 0 if rank != 1 else 2
    at_the_point()
    dist.broadcast_object_list(payload, src=source)
    return payload[0]


def main() -> None:
    rank, _ = join()
    config = share_config(rank)
    dist.barrier()
    print(config)


if __name__ == "__main__":
    main()
