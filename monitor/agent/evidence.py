"""Takes evidence by itself when this node's ranks stop making progress, before a watchdog ends them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftdash.monitor.agent.vigil import Vigil
from ftdash.monitor.diagnosis.deadline import CollectiveTimeout, known_timeout
from ftdash.monitor.records import HANG_CODE, HANG_OVER_CODE, Event, RankSample
from ftdash.monitor.rundir import RunDir

if TYPE_CHECKING:
    from ftdash.monitor.diagnosis.model import Verdict

_SLOW_CODE, _FAILED_CODE = "slow", "hang-evidence-failed"
_ASK_TIMEOUT_S = 30.0  # between looks for the timeout while no rank has told it


class HangWatch:
    """Looks at each second's samples; dumps run in a thread, what they say comes back as events."""

    def __init__(self, run: RunDir, host: str, *, alone: bool) -> None:
        """`alone`: the run has no other nodes, so what is seen here is all there is."""
        self._run = run
        self._host = host
        self._alone = alone
        self._vigil = Vigil()
        self._timeout = CollectiveTimeout()
        self._ask_at = 0.0
        self._thread: threading.Thread | None = None
        self._taken: tuple[Path, Verdict] | None = None
        self._error = ""
        self._folder: Path | None = None

    def look(self, samples: Sequence[RankSample], now: float) -> list[Event]:
        """What there is to tell. `now` is monotonic."""
        events = self._hear()
        if not self._timeout.seconds and now >= self._ask_at and samples:
            self._timeout = known_timeout(self._run, [sample.pid for sample in samples])
            self._ask_at = now + _ASK_TIMEOUT_S
        quiet_s = self._vigil.look(samples, now, self._timeout.seconds)
        if self._folder is not None and self._vigil.moved_since:
            events.append(self._over(self._folder))
            self._folder = None
        if quiet_s is not None and self._thread is None:
            ranks = [(sample.rank, sample.pid) for sample in samples]
            self._thread = threading.Thread(target=self._take, args=(ranks, quiet_s), daemon=True)
            self._thread.start()
        return events

    def _take(self, ranks: list[tuple[int, int]], quiet_s: float) -> None:
        from ftdash.monitor.diagnosis import incident

        try:
            self._taken = incident.take(
                self._run, ranks, host=self._host, quiet_s=quiet_s, timeout_s=self._timeout.seconds
            )
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _hear(self) -> list[Event]:
        if self._thread is None or self._thread.is_alive():
            return []
        from ftdash.monitor.diagnosis import incident

        self._thread = None
        if self._taken is None:
            return [
                _event("error", _FAILED_CODE, f"the run stands still, and no evidence was had: {self._error}")
            ]
        (folder, verdict), self._taken = self._taken, None
        working = verdict.kind in incident.AT_WORK
        if working:
            self._vigil.be_patient()
        if working and self._alone:
            incident.drop(folder)
            return [_event("note", _SLOW_CODE, f"no step for long, and it is at work: {verdict.reason}")]
        self._folder = folder
        incident.forget_old(self._run)
        text = f"{verdict.kind}: {verdict.reason}; evidence is in stacks/{folder.name}"
        if limit := self._timeout.words():
            text += f"; {limit}"
        return [_event("note" if working else "error", _SLOW_CODE if working else HANG_CODE, text)]

    def _over(self, folder: Path) -> Event:
        from ftdash.monitor.diagnosis import incident

        with contextlib.suppress(OSError):
            incident.mark_over(folder)
        return _event("note", HANG_OVER_CODE, "the run moves again")


def _event(severity: str, code: str, text: str) -> Event:
    return Event(t=time.time(), severity=severity, code=code, text=text)
