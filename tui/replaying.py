"""Plays a run again on the screen, at any speed, from any moment of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ftdash.monitor.replay import Replay
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.tui import format as fmt
from ftdash.tui.feed import RunFeed

PERIOD_S = 0.5
FIRST_SPEED = 10.0
SPEEDS = (1 / 8, 4096.0)


class ReplayFeed(RunFeed):
    """Stands in for the feed of a live run: it delivers the states that the run once had."""

    def __init__(self, run: RunDir, deliver: Callable[[], object]) -> None:
        super().__init__(run, deliver)
        self.speed = FIRST_SPEED
        self.paused = False
        self._turn = threading.Lock()  # held while the moment moves
        self._start = self._end = self._at = 0.0

    @property
    def words(self) -> str:
        """Where the replay stands: time of day, share of the run, speed."""
        if self._end <= self._start:
            return "replay: reading the run"
        share = (self._at - self._start) / (self._end - self._start)
        clock = time.strftime("%H:%M:%S", time.localtime(self._at))
        pace = "paused" if self.paused else "at its end" if self._at >= self._end else f"{self.speed:g} times"
        return f"replay {clock}, {fmt.percent(share)}, {pace}: space pauses, [ ] seek, + - speed, p ends"

    def pause(self) -> None:
        """Stop, or go on; at the end of the run, begin anew."""
        with self._turn:
            if self._at >= self._end:
                self._at, self.paused = self._start, False
            else:
                self.paused = not self.paused
        self._wake.set()

    def hurry(self, factor: float) -> None:
        """Play so many times as fast as now."""
        self.speed = max(SPEEDS[0], min(SPEEDS[1], self.speed * factor))
        self._wake.set()

    def move(self, share: float) -> None:
        """Go on, or back, by this share of the whole run."""
        with self._turn:
            self._at = self._within(self._at + share * (self._end - self._start))
        self._wake.set()

    def _within(self, t: float) -> float:
        return max(self._start, min(self._end, t))

    def _follow(self) -> None:
        try:
            player = Replay(self.run)
        except (RunError, OSError) as error:
            self._announce(None, " ".join(str(error).split()))
            return
        self._start, self._end, self._at = player.start, player.end, player.start
        before = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            with self._turn:
                if not self.paused and self.watched:
                    self._at = self._within(self._at + (now - before) * self.speed)
                wanted = self._at
            before = now
            try:
                self._announce(player.seek(wanted), "")
            except Exception as error:  # as in a live feed: a line on the screen, not the end of it
                self._announce(None, f"cannot replay {self.run.path}: {type(error).__name__}: {error}")
            idle = self.paused or not self.watched or wanted >= self._end
            self._wake.wait(None if idle else PERIOD_S)
            self._wake.clear()
            if idle:
                before = time.monotonic()
