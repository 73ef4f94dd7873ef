"""Plain log lines of a run: what really runs, and loss, tokens per second and peak memory of each rank."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from transformers import TrainerCallback

from ftdash.engine.train.options import Options, TrainStrategy
from ftdash.engine.train.verify import Reality
from ftdash.monitor.hook import Hook


def peak_bytes() -> int:
    """This process's peak: torch's allocated bytes on a GPU, else the resident set."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepReport(TrainerCallback):
    """One line a rank every `log_steps` steps, and one line on what runs before the first."""

    def __init__(self, options: Options, hook: Hook) -> None:
        self._options = options
        self._hook = hook
        self._since = time.perf_counter()
        self._tokens = 0
        self._last_step = 0

    def say(self, line: str) -> None:
        """A line from rank 0."""
        if self._hook.rank == 0:
            print(line, flush=True)

    def tell_reality(self, asked: TrainStrategy, found: Reality) -> None:
        self.say(
            f"running {asked}: {found.distributed_type} on {found.world_size} ranks, "
            f"{found.wrapped_class}, {found.dtensor_params} DTensor parameters, "
            f"{found.trainable_params:,} of {found.total_params:,} parameters learn"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.perf_counter()
        self._last_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if state.global_step % self._options.log_steps == 0 or state.global_step == state.max_steps:
            self.line(state.global_step, state.max_steps, logs["loss"])

    def line(self, step: int, max_steps: int, loss: float) -> None:
        now = time.perf_counter()
        seconds = now - self._since
        tokens = self._hook.tokens_seen
        rate = (tokens - self._tokens) / seconds if seconds > 0 else 0.0
        # One write: the lines of ranks that share a terminal do not run into one another.
        sys.stdout.write(
            f"rank {self._hook.rank} step {step}/{max_steps} loss {loss:.4f} "
            f"{rate:,.0f} tokens/s peak {peak_bytes() / 2**20:,.0f} MiB\n"
        )
        sys.stdout.flush()
        self._since, self._tokens = now, tokens
