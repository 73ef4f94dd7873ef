"""Rank 1 polls for a file that nobody writes, the others stand in a monitored barrier."""

import datetime
import os
import time
from pathlib import Path

import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def wait_for_shards(folder: Path) -> None:
    at_the_point()
    while not (folder / "_SUCCESS").exists():
        time.sleep(0.5)


def setup_data(rank: int) -> None:
    if rank == 1:
        wait_for_shards(Path(os.environ["BLIND_MARKERS"]))
    else:
        at_the_point()
    dist.monitored_barrier(timeout=datetime.timedelta(minutes=30))


def main() -> None:
    rank, _ = join()
    setup_data(rank)


if __name__ == "__main__":
    main()
