"""Notices that this node's ranks have stopped making progress for longer than their own steps allow.

Ages are counted on the agent's own clock from what it sees change: a clock that jumps, a suspended machine
or an agent that was itself stopped adds nothing. Loading, compiling, saving and evaluating have no rhythm of
their own and are given the patience of `liveness.PAUSE_S`, or what is left to a known timeout of collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ftdash.monitor.liveness import PAUSE_PHASES, PAUSE_S, STALL_FLOOR_S, STALL_STEPS
from ftdash.monitor.records import RankSample

LONGEST_LOOK_S = 5.0  # between two looks; what is longer happened to the agent, not to the ranks
BEFORE_TIMEOUT = 0.7  # of the timeout: evidence takes some 15 s, and the watchdog ends the job
_KEPT_STEPS = 64
_MOVES_AGAIN = 3  # an exception that ends a hung rank also changes its phase, once
_TIMES_LONGEST = 2.0  # a pause between beats that was as long before is no hang
_SLOWER = 1.2  # the same, where the timeout presses


@dataclass(slots=True)
class _Rhythm:
    """What one rank's beats showed. `steps` are seconds per step, of steps without a pause in them."""

    beat: tuple[float, int, str] | None = None
    pid: int = 0
    age_s: float = 0.0  # since the beat changed
    step_age_s: float = 0.0  # since the step changed
    paused: bool = True  # a save, an evaluation or the start fell into the step
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    longest_s: float = 0.0  # between two beats, outside of pauses

    def look(self, sample: RankSample, passed_s: float) -> bool:
        """Take one sample in; True when the rank made progress."""
        beat = (sample.beat_t, sample.beat_step, sample.beat_phase)
        if sample.pid != self.pid:
            self.__init__(beat, sample.pid)  # type: ignore[misc]
            return True
        self.age_s += passed_s
        self.step_age_s += passed_s
        if beat == self.beat:
            return False
        before, self.beat = self.beat, beat
        if before is not None and before[2] not in PAUSE_PHASES:
            self.longest_s = max(self.longest_s, self.age_s)
        if before is not None and beat[1] > before[1]:
            if not self.paused:
                self.steps.append(self.step_age_s / (beat[1] - before[1]))
            self.step_age_s, self.paused = 0.0, False
        self.paused = self.paused or beat[2] in PAUSE_PHASES
        self.age_s = 0.0
        return True

    def patience_s(self, timeout_s: float) -> float:
        """How long it may show no progress."""
        if (self.beat is not None and self.beat[2] in PAUSE_PHASES) or not self.steps:
            return min(PAUSE_S, timeout_s * BEFORE_TIMEOUT) if timeout_s else PAUSE_S
        usual_s = max(STALL_STEPS * median(self.steps), _TIMES_LONGEST * self.longest_s)
        if timeout_s:
            usual_s = max(min(usual_s, timeout_s * BEFORE_TIMEOUT), _SLOWER * self.longest_s)
        return max(usual_s, min(STALL_FLOOR_S, timeout_s * BEFORE_TIMEOUT or STALL_FLOOR_S))


class Vigil:
    """One node's ranks. `look` once a second; `quiet_s` is set while evidence is called for."""

    def __init__(self) -> None:
        self._rhythms: dict[int, _Rhythm] = {}
        self._looked: float | None = None
        self._patience = 1.0  # grows when a look found somebody at work
        self._taken = False
        self._moves = 0  # looks that showed progress since evidence was called for

    def look(self, samples: Sequence[RankSample], now: float, timeout_s: float = 0.0) -> float | None:
        """Seconds without progress when evidence has to be taken now, once for each hang; else None.

        `now` is monotonic; `samples` are of the living ranks; `timeout_s` is that of collectives, 0 when
        it is not known.
        """
        passed_s = min(now - self._looked, LONGEST_LOOK_S) if self._looked is not None else 0.0
        self._looked = now
        heard = [sample for sample in samples if sample.beat_t > 0]
        moved = [self._rhythms.setdefault(sample.rank, _Rhythm()).look(sample, passed_s) for sample in heard]
        self._moves += any(moved)
        if any(moved) and (not self._taken or self._moves >= _MOVES_AGAIN):
            self._taken, self._patience = False, 1.0
        living = [self._rhythms[sample.rank] for sample in heard if sample.beat_phase != "end"]
        if self._taken or not living or len(heard) < len(samples):
            return None
        paused = [one for one in living if one.beat is not None and one.beat[2] in PAUSE_PHASES]
        patience_s = max(one.patience_s(timeout_s) for one in paused or living) * self._patience
        quiet_s = min(one.age_s for one in living)
        if quiet_s <= patience_s:
            return None
        self._taken, self._moves = True, 0
        return quiet_s

    @property
    def moved_since(self) -> bool:
        """Whether a rank has made progress since evidence was called for."""
        return not self._taken

    def be_patient(self) -> None:
        """The look found somebody at work: look again after twice the time, if nothing moves till then."""
        self._taken = False
        self._patience *= 2.0
