"""Rank 2 swallows an exception, and a thread that uploads metrics keeps its process alive."""

import logging
import queue
import threading

import torch
import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


class MetricsUploader(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.pending: queue.Queue = queue.Queue()

    def run(self) -> None:
        while True:
            metrics = self.pending.get()
            if metrics is None:
                return


def train(rank: int, uploader: MetricsUploader) -> None:
    for step in range(100):
        loss = torch.ones(4)
        if step == 5:
            at_the_point()
            if rank == 2:
                raise ValueError("loss is not finite")
        dist.all_reduce(loss)
        uploader.pending.put({"step": step})
    uploader.pending.put(None)


def main() -> None:
    rank, _ = join()
    uploader = MetricsUploader()
    uploader.start()
    try:
        train(rank, uploader)
    except ValueError:
        logging.exception("training failed")


if __name__ == "__main__":
    main()
