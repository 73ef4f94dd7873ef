"""Not a hang: rank 0 writes a checkpoint to slow storage, the others wait for it."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


class SlowDisk:
    """A file on storage of some ten megabytes a second that begins again at 64 MB to spare the disk."""

    def __init__(self, path: Path) -> None:
        self.handle = path.open("wb")

    def write(self, chunk: bytes) -> None:
        self.handle.write(chunk)
        self.handle.flush()
        time.sleep(len(chunk) / 10e6)
        if self.handle.tell() > 64e6:
            self.handle.seek(0)


def save_checkpoint(state: dict, disk: SlowDisk) -> None:
    for _ in range(1000):
        for value in state.values():
            disk.write(value.numpy().tobytes())


def main() -> None:
    rank, _ = join()
    state = {f"layer.{i}.weight": torch.randn(256, 512) for i in range(8)}
    at_the_point()
    if rank == 0:
        save_checkpoint(state, SlowDisk(Path(os.environ["BLIND_MARKERS"], "model.bin")))
    dist.barrier()


if __name__ == "__main__":
    main()
