"""Not a hang: rank 0 tokenizes a corpus and prints its progress, the others wait for the cache."""

import sys

import torch.distributed as dist

from tests.diagnosis.blind.ranks import at_the_point, join


def tokenize(text: str) -> list[int]:
    return [hash(word) % 32_000 for word in text.split()]


def preprocess(documents: int) -> int:
    tokens = 0
    text = "the quick brown fox jumps over the lazy dog " * 50
    for number in range(documents):
        tokens += len(tokenize(text + str(number)))
        if number % 2000 == 0:
            print(f"tokenizing: {number}/{documents}", file=sys.stderr, flush=True)
    return tokens


def main() -> None:
    rank, _ = join()
    at_the_point()
    if rank == 0:
        preprocess(10_000_000)
    dist.barrier()


if __name__ == "__main__":
    main()
