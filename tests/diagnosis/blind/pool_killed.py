"""A pool worker is killed, as the kernel does when memory is short, and `map` never returns."""

import multiprocessing
import os
import signal

import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def tokenize(text: str) -> list[int]:
    if text == "very long document":
        at_the_point()
        os.kill(os.getpid(), signal.SIGKILL)
    return [ord(c) for c in text]


def prepare_dataset(rank: int) -> None:
    if rank == 0:
        texts = ["short"] * 8 + ["very long document"] + ["short"] * 8
        with multiprocessing.get_context("fork").Pool(2) as pool:
            rows = pool.map(tokenize, texts, chunksize=1)
        print(len(rows))
    else:
        at_the_point()
    dist.barrier()


def main() -> None:
    rank, _ = join()
    prepare_dataset(rank)


if __name__ == "__main__":
    main()
