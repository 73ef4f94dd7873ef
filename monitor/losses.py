"""Whether a run's loss has jumped, judged by the noise of the run's own recent losses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

BEFORE = 100
LEAST_BEFORE = 50
BETWEEN = 20  # left out, so that a loss that climbs for a while is not held against itself
NEWEST = 7
DEVIATIONS = 6.0  # of the losses before
SHARE = 0.2  # and of their median, where they hardly vary at all
_TO_SIGMA = 1.4826  # of a median absolute deviation, under normal noise


@dataclass(frozen=True, slots=True)
class LossJump:
    """`level` is the median of the newest seven losses, `usual` that of up to a hundred before."""

    step: int  # of the newest
    level: float
    usual: float
    sigma: float  # of the losses before


class LossLevel:
    """Feed it the losses of a run in order. One bad batch is no jump, however bad, nor is a level that one of
    the losses before had reached: most of the newest must be above all of those."""

    def __init__(self) -> None:
        self.jump: LossJump | None = None  # the newest one
        self._losses: deque[float] = deque(maxlen=BEFORE + BETWEEN + NEWEST)

    def add(self, step: int, loss: float) -> None:
        """A finite loss."""
        self._losses.append(loss)
        if len(self._losses) < LEAST_BEFORE + BETWEEN + NEWEST:
            return
        values = list(self._losses)
        before, level = values[: -NEWEST - BETWEEN], median(values[-NEWEST:])
        if level <= max(before):
            return
        usual = median(before)
        sigma = _TO_SIGMA * median(abs(value - usual) for value in before)
        if level - usual > max(DEVIATIONS * sigma, SHARE * abs(usual)):
            self.jump = LossJump(step, level, usual, sigma)
