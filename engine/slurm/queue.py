"""The queue as a screen shows it: asked seldom, more seldom of a slow controller, in a thread of its own."""

from __future__ import annotations

import getpass
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ftdash.engine.slurm import client

MIN_INTERVAL_S = 10.0  # sites ask users not to poll the controller faster
MAX_INTERVAL_S = 300.0
SLOW_S = 2.0  # an answer that takes longer doubles the interval


@dataclass(frozen=True, slots=True)
class QueueView:
    """The last answer; `asked` is when it was given (UTC seconds), `error` what went wrong since."""

    jobs: tuple[client.Job, ...] = ()
    partitions: tuple[client.Partition, ...] = ()
    asked: float = 0.0
    error: str = ""


def ask(user: str) -> QueueView:
    """The queue of one user and the state of all partitions. Raises SlurmError."""
    return QueueView(
        jobs=tuple(client.jobs(user)),
        partitions=tuple(client.partitions(client.nodes())),
        asked=time.time(),
    )


class QueueWatch:
    """Asks in a thread of its own when an answer is wanted and due. `view` never blocks."""

    def __init__(
        self,
        ask: Callable[[str], QueueView] = ask,
        user: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._user = user or getpass.getuser()
        self._clock = clock
        self._view = QueueView()
        self._due = 0.0
        self._interval_s = MIN_INTERVAL_S
        self._busy = threading.Lock()

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def view(self) -> QueueView:
        """The last known queue, at once; starts a fresh question when one is due and none is running."""
        if self._clock() >= self._due and self._busy.acquire(blocking=False):
            threading.Thread(target=self._refresh, name="slurm-queue", daemon=True).start()
        return self._view

    def _refresh(self) -> None:
        started = self._clock()
        slow = True
        try:
            self._view = self._ask(self._user)
            slow = self._clock() - started > SLOW_S
        except client.SlurmError as error:
            self._view = replace(self._view, error=str(error))
        finally:
            self._interval_s = min(self._interval_s * 2, MAX_INTERVAL_S) if slow else MIN_INTERVAL_S
            self._due = self._clock() + self._interval_s
            self._busy.release()
