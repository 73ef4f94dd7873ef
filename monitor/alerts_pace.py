"""Steps that stand still for as long as a collective waits, and go on: hangs that end by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from ftdash.monitor.state import Alert, RunState

# Defaults of torch's process groups (constants.py): 10 minutes with NCCL, 30 with the others.
_TIMEOUTS_S = (600.0, 1800.0)
_OFF = 0.03  # a step's own work beside the wait, as a share of the timeout
_STEPS = 512
_SHORT = 0.1  # usual steps are at most this share of the wait: else it is no standing still


def near_hangs(state: RunState, history: object, limits: object) -> Iterator[Alert]:
    """Steps that waited out a timeout, twice or more: once can be a slow save or somebody's debugger."""
    seconds = [
        (after.step, (after.t - before.t))
        for before, after in pairwise(state.points[-_STEPS:])
        if after.step == before.step + 1
    ]
    if len(seconds) < 4:
        return
    usual = median(taken for _, taken in seconds)
    for timeout in _TIMEOUTS_S:
        stood = [(step, taken) for step, taken in seconds if abs(taken - usual - timeout) < _OFF * timeout]
        if len(stood) >= 2 and usual < _SHORT * timeout:
            steps = ", ".join(str(step) for step, _ in stood[-4:])
            text = (
                f"{len(stood)} steps stood still for {timeout / 60:.0f} min and went on (the last: {steps}): "
                "ranks that skip a part of the model, as the vision tower in text-only batches, are waited "
                "for until the timeout"
            )
            yield Alert("near-hang", "warning", text)
