"""Takes the evidence of a run in a thread, and hands over a quick verdict and then a confirmed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from textual.message import Message

from ftdash.monitor.control import request_dump
from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.model import Diagnosis, RankEvidence, Sample, decode_rank
from ftdash.monitor.diagnosis.rundata import sample_run
from ftdash.monitor.rundir import RunDir, RunError

PATIENCE_S = 6.0
LOOK_EVERY_S = 0.1
LARGEST_DUMP = 32_000_000  # bytes; a stack file beyond this is not one


class Examined(Message):
    """A verdict, quick or confirmed; `trouble` is one line when there is none."""

    def __init__(
        self,
        diagnosis: Diagnosis | None,
        evidence: tuple[RankEvidence, ...] = (),
        samples: int = 0,
        trouble: str = "",
        *,
        confirmed: bool = True,
    ) -> None:
        super().__init__()
        self.diagnosis = diagnosis
        self.evidence = evidence
        self.samples = samples
        self.trouble = trouble
        self.confirmed = confirmed


class Examination:
    """One look at one run. `post` is called from a thread, after each sample or once with the trouble."""

    def __init__(
        self, run: RunDir, world_size: int, post: Callable[[Message], object], *, native: bool = False
    ) -> None:
        self._run, self._world, self._native = run, world_size, native
        self._post = post
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._examine, name="examination", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _examine(self) -> None:
        samples: list[Sample] = []
        try:
            if self._native:
                samples = [take_sample(self._run, self._world, native=True, ended=self._ended)]
                self._tell(self._judged(samples))
                return
            samples = sample_run(self._run, quick=True)
            final = len(samples) < 2  # a dead run does not change any more
            self._tell(self._judged(samples, confirmed=final))
            if not final and not self._ended.is_set():
                samples = sample_run(self._run)
                self._tell(self._judged(samples))
        except (RunError, OSError) as error:
            self._tell(Examined(None, trouble=" ".join(str(error).split())))
        except Exception as error:  # a fault in judging is a line on the screen, the stacks stay readable
            evidence = samples[-1].ranks if samples else ()
            self._tell(Examined(None, evidence, trouble=f"no verdict: {type(error).__name__}: {error}"))

    @staticmethod
    def _judged(samples: list[Sample], *, confirmed: bool = True) -> Examined:
        return Examined(diagnose(samples), samples[-1].ranks, len(samples), confirmed=confirmed)

    def _tell(self, message: Examined) -> None:
        if not self._ended.is_set():
            self._post(message)


def take_sample(run: RunDir, world_size: int, *, native: bool, ended: threading.Event) -> Sample:
    """Ask the run's agents for all stacks and wait for them, a few seconds at most. Raises RunError."""
    folder = request_dump(run, None, native)
    found: dict[int, RankEvidence] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < world_size and time.monotonic() < deadline and not ended.wait(LOOK_EVERY_S):
        found |= read_stacks(folder, set(range(world_size)) - set(found))
    missing = sorted(set(range(world_size)) - set(found))
    notices = (f"no stacks of rank {', '.join(map(str, missing[:8]))}",) if missing else ()
    return Sample(
        t=time.time(),
        ranks=tuple(found[rank] for rank in sorted(found)),
        world_size=world_size,
        expected=frozenset(range(world_size)),
        notices=notices,
    )


def read_stacks(folder: Path, wanted: set[int]) -> dict[int, RankEvidence]:
    """Those of the wanted ranks' files that are there and whole."""
    found: dict[int, RankEvidence] = {}
    for rank in wanted:
        path = folder / f"rank-{rank}.json"
        try:
            if path.stat().st_size <= LARGEST_DUMP:
                found[rank] = decode_rank(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found
