"""Asks for stack dumps and waits in a thread until they lie in the run directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from textual.message import Message

from ftdash.monitor.control import request_dump
from ftdash.monitor.diagnosis.model import RankEvidence
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.tui.examine import LOOK_EVERY_S, read_stacks

PATIENCE_S = 12.0


class StackAnswer(Message):
    """Stacks that have arrived, or one line of trouble."""

    def __init__(self, evidence: tuple[RankEvidence, ...], trouble: str = "") -> None:
        super().__init__()
        self.evidence = evidence
        self.trouble = trouble


class DumpWatch:
    """One request. `deliver` is called from a thread: once for what came, or once with the trouble."""

    def __init__(
        self, run: RunDir, ranks: tuple[int, ...], *, native: bool, deliver: Callable[[StackAnswer], object]
    ) -> None:
        self._run, self._ranks, self._native = run, ranks, native
        self._deliver = deliver
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._wait, name="dump-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _wait(self) -> None:
        try:
            folder = request_dump(self._run, self._ranks, self._native)
        except (RunError, OSError) as error:
            self._answer((), str(error))
            return
        found: dict[int, RankEvidence] = {}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and len(found) < len(self._ranks):
            if self._closed.wait(LOOK_EVERY_S):
                return
            found |= read_stacks(folder, set(self._ranks) - set(found))
        trouble = ""
        if missing := [rank for rank in self._ranks if rank not in found]:
            who = ", ".join(map(str, missing))
            trouble = f"no answer for rank {who} in {PATIENCE_S:.0f} s: its agent or its process is gone"
        self._answer(tuple(found.values()), trouble)

    def _answer(self, evidence: tuple[RankEvidence, ...], trouble: str) -> None:
        if not self._closed.is_set():
            self._deliver(StackAnswer(evidence, " ".join(trouble.split())))
