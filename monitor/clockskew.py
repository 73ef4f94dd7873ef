"""How far another machine's clock is from ours, from how late its records seem to arrive."""

from __future__ import annotations

from collections import deque

ENOUGH = 3  # arrivals before anything is said
WINDOW = 60
# A record is up to a sample and a poll old when it is read; a smaller difference is no skew.
TOLERANCE_S = 3.0


class SkewMeter:
    """Fed with each arrival of fresh records. A record arrives late, never early: the smallest
    (our clock - its stamp) of many is the skew plus the shortest delay."""

    def __init__(self) -> None:
        self._offsets: deque[float] = deque(maxlen=WINDOW)
        self.skew_s = (
            0.0  # to be added to the other clock's stamps to compare them with ours; 0 within tolerance
        )

    def observe(self, now: float, stamp: float) -> None:
        """`now`: our clock as we first saw a record; `stamp`: the time in it. Both UTC seconds."""
        self._offsets.append(now - stamp)
        if len(self._offsets) >= ENOUGH:
            smallest = min(self._offsets)
            self.skew_s = smallest if abs(smallest) > TOLERANCE_S else 0.0
