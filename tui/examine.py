"""Takes the evidence of a run in a thread, twice, and hands over the verdict after each sample."""

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
from ftdash.monitor.rundir import RunDir, RunError

QUICK_S = 0.6  # between the first look and the second, which gives the quick verdict
CONFIRM_S = 4.4  # from there to the third, which confirms it
PATIENCE_S = 6.0
LOOK_EVERY_S = 0.1
LARGEST_DUMP = 32_000_000  # bytes; a stack file beyond this is not one


class Examined(Message):
    """A verdict on one or two samples; `trouble` is one line when there is none."""

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
            for pause_s in (0.0, QUICK_S, CONFIRM_S):
                if self._ended.wait(pause_s):
                    return
                samples.append(take_sample(self._run, self._world, native=self._native, ended=self._ended))
                if len(samples) == 1 and samples[0].ranks and not self._native:
                    continue  # one look cannot tell waiting from working
                taken = samples[-1].ranks
                final = pause_s == CONFIRM_S or not taken or self._native
                seen = [samples[0], samples[-1]] if len(samples) > 1 else samples
                self._tell(Examined(diagnose(seen), taken, len(seen), confirmed=final))
                if final:
                    return
        except (RunError, OSError) as error:
            self._tell(Examined(None, trouble=" ".join(str(error).split())))
        except Exception as error:  # a fault in judging is a line on the screen, the stacks stay readable
            evidence = samples[-1].ranks if samples else ()
            self._tell(Examined(None, evidence, trouble=f"no verdict: {type(error).__name__}: {error}"))

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
