"""A prefetching thread and the main thread take two locks in opposite order on rank 1."""

import threading

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


class Prefetcher:
    def __init__(self, cross: bool) -> None:
        self.cross = cross
        self.buffer_lock, self.stats_lock = threading.Lock(), threading.Lock()
        self.filling, self.reading = threading.Event(), threading.Event()
        self.buffer = [torch.ones(4)]
        if cross:
            threading.Thread(target=self.fill, daemon=True).start()

    def fill(self) -> None:
        with self.buffer_lock:
            self.filling.set()
            self.reading.wait()
            with self.stats_lock:
                self.buffer.append(torch.ones(4))

    def next_batch(self) -> torch.Tensor:
        with self.stats_lock:
            if self.cross:
                self.filling.wait()
                self.reading.set()
                at_the_point()
            with self.buffer_lock:
                return self.buffer[0]


def main() -> None:
    rank, _ = join()
    batches = Prefetcher(cross=rank == 1)
    if rank != 1:
        at_the_point()
    for _ in range(10):
        loss = batches.next_batch().sum()
        dist.all_reduce(loss)


if __name__ == "__main__":
    main()
