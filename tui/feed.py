"""Reads a run in a thread and hands the newest state to the screen: at most one update waits at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from ftdash.engine.launch.again import NewAgents
from ftdash.engine.launch.reading import reader_for
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunState

PERIOD_S = 1.0
HANGS_S = 3.0  # a poll takes less than half a second where the file system answers
IDLE_PERIOD_S = 5.0  # while no pane shows the run: enough for the tab's badge
BEHIND_PERIOD_S = 0.1  # while a long run's history is still being read


class RunFeed:
    """Polls one run. `deliver` is called on the reader's thread and must only post a message.

    A slow screen gets the newest state when it comes to ask (`take`), never a queue of old ones.
    """

    def __init__(self, run: RunDir, deliver: Callable[[], object]) -> None:
        self.run = run
        self.watched = True
        self._deliver = deliver
        self._newest: RunState | None = None
        self._trouble = ""
        self._waiting = False
        self._polling_since = 0.0  # monotonic; 0 between two polls
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._attended: Collection[int] = ()
        self._agents = NewAgents(run)
        # A daemon: a file system that hangs must not keep the terminal from its owner.
        self._thread = threading.Thread(target=self._follow, name="run-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def watch(self, visible: bool) -> None:
        """Whether a pane that shows the run is on the screen."""
        was, self.watched = self.watched, visible
        if visible and not was:
            self._wake.set()

    def attend(self, ranks: Collection[int]) -> None:
        """The ranks that somebody looks at: in a run of a thousand they are read oftener than the others."""
        self._attended = ranks

    def take(self) -> RunState | None:
        """The newest state; the next one may be announced from now on."""
        with self._lock:
            self._waiting = False
            return self._newest

    @property
    def waits_s(self) -> float:
        """How long the reader has been waiting for the file system, seconds."""
        since = self._polling_since
        return time.monotonic() - since if since else 0.0

    @property
    def hangs(self) -> bool:
        """Whether the run directory gives no answer: no newer state is delivered meanwhile."""
        return self.waits_s > HANGS_S

    @property
    def trouble(self) -> str:
        """Trouble with the run directory in one line, "" when all is well."""
        if self.hangs:
            return f"no answer for {self.waits_s:.0f} s from the file system of {self.run.path}"
        return self._trouble

    def peek(self) -> RunState | None:
        """The newest state, without marking it as shown."""
        with self._lock:
            return self._newest

    def _follow(self) -> None:
        self._polling_since = time.monotonic()
        reader = reader_for(self.run, patient=False)
        try:
            while not self._closed:
                self._poll(reader)
                self._wake.wait(self._pause_s(reader))
                self._wake.clear()
        finally:
            reader.close()

    def _pause_s(self, reader: RunReader) -> float:
        if not self.watched:
            return IDLE_PERIOD_S
        return BEHIND_PERIOD_S if reader.behind else PERIOD_S

    def _poll(self, reader: RunReader) -> None:
        self._polling_since = time.monotonic()
        reader.attend(self._attended)
        try:
            state, trouble = self._agents.look(reader.poll()), ""
        except (RunError, OSError) as error:
            state, trouble = None, " ".join(str(error).split())
        except Exception as error:  # a reader's fault is a line on the screen, not the end of it
            state, trouble = None, f"cannot read {self.run.path}: {type(error).__name__}: {error}"
        self._polling_since = 0.0
        self._announce(state, trouble)

    def _announce(self, state: RunState | None, trouble: str) -> None:
        """Keep a newer state, if there is one, and tell the screen unless it has yet to take the last."""
        with self._lock:
            if state is not None:
                self._newest = state
            self._trouble = trouble
            if self._waiting:
                return
            self._waiting = True
        if not self._closed:
            self._deliver()
