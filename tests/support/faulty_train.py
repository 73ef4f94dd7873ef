"""A real two-rank training with one planted fault, named by the environment variable FAULT.

Plain PyTorch and the public hook: what a user's own script would look like. The phases are padded by
sleeping, so that ranks are equal on a busy machine unless a fault makes them differ.
"""

from __future__ import annotations

import math
import mmap
import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftdash.monitor.hook import Hook

STEPS = int(os.environ.get("STEPS", "70"))
FAULT = os.environ.get("FAULT", "")
BEGINS = 20
EXPERTS, TOP_K, WIDTH = 8, 2, 32


class TinyTopKRouter(nn.Module):
    """Gives logits, scores and expert indices, as routers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = EXPERTS, TOP_K
        self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        self.dead = int(FAULT == "dead-expert")

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T + torch.randn(hidden.shape[0], EXPERTS)
        if self.dead:
            logits = logits - torch.tensor([0.0] * 5 + [1e9] + [0.0] * 2)
        scores, indices = logits.softmax(-1).topk(TOP_K, -1)
        return logits, scores, indices


class TinyMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = TinyTopKRouter()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, scores, indices = self.router(tokens)
        picked = torch.einsum("tkij,tj->tki", self.experts[indices], tokens)
        mixed: torch.Tensor = self.head((picked * scores.unsqueeze(-1)).sum(1))
        return mixed


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = TinyMoe()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = Hook.start(model=model, max_steps=STEPS, expert_every=1)
    leaked: list[mmap.mmap] = []
    for step in range(1, STEPS + 1):
        at_fault = rank == 1 and step > BEGINS
        with hook.phase("data"):
            time.sleep(0.15 if FAULT == "slow-data" and at_fault else 0.005)
            time.sleep(0.4 if FAULT == "leak" else 0.0)  # agents look at a process once a second
            tokens = torch.randn(64, WIDTH)
        with hook.phase("forward"):
            time.sleep(0.08 if FAULT == "slow-host" and at_fault else 0.04)
            if FAULT == "throttled":
                until = time.thread_time() + 0.04
                while time.thread_time() < until:
                    pass
            loss = (wrapped(tokens) - tokens.mean(1, keepdim=True)).pow(2).mean()
            if FAULT == "nan" and at_fault:
                loss = loss * math.nan
        with hook.phase("backward"):
            time.sleep(0.04)
            loss.backward()
        with hook.phase("optimizer"):
            time.sleep(0.01)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if FAULT == "leak":
            block = mmap.mmap(-1, 8 << 20)  # fresh pages on both ranks, so that both take the same time
            block.write(b"1" * len(block))
            if rank == 1:
                leaked.append(block)
            else:
                block.close()
        shown = 2.0 / step + loss.item()
        hook.step(loss=shown, tokens=64, lr=0.01, grad_norm=float(norm))
    hook.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
