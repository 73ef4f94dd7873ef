"""A gloo training loop under the hook in which one rank falls asleep in its own code after some steps."""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from ftdash.monitor.hook import Hook


def score(batch: torch.Tensor) -> float:
    time.sleep(3600)
    return float(batch.sum())


def main(timeout_s: float, hang_at: int) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    hook = Hook.start(model=model)
    for step in range(1, 10**6):
        batch = torch.randn(4, 8)
        with hook.phase("forward"):
            if step == hang_at and rank == 1:
                score(batch)
            loss = model(batch).sum()
        with hook.phase("backward"):
            loss.backward()
        time.sleep(0.05)
        hook.step(loss=loss.detach(), tokens=32)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(float(sys.argv[1]), int(sys.argv[2]))
