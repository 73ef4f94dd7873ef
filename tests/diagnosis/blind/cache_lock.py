"""A cache file's lock that rank 1 keeps while it waits for rank 0, which wants the lock."""

import fcntl
import os
import time
from pathlib import Path

import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join

CACHE = Path(os.environ["BLIND_MARKERS"], "tokenized.lock")


def load_cached(rank: int) -> None:
    taken = CACHE.with_suffix(".taken")
    with CACHE.open("w") as handle:
        if rank == 0:
            while not taken.exists():
                time.sleep(0.05)
            at_the_point()
            fcntl.flock(handle, fcntl.LOCK_EX)
        elif rank == 1:
            fcntl.flock(handle, fcntl.LOCK_EX)
            taken.touch()
        if rank != 0:
            at_the_point()
        dist.barrier()


def main() -> None:
    rank, _ = join()
    load_cached(rank)


if __name__ == "__main__":
    main()
