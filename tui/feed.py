"""Reads a run in a thread and hands the newest state to the screen: at most one update waits at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftdash.engine.launch.reading import reader_for
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunState

PERIOD_S = 1.0
IDLE_PERIOD_S = 5.0  # while no pane shows the run: enough for the tab's badge


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
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
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

    def take(self) -> RunState | None:
        """The newest state; the next one may be announced from now on."""
        with self._lock:
            self._waiting = False
            return self._newest

    @property
    def trouble(self) -> str:
        """Trouble with the run directory in one line, "" when all is well."""
        return self._trouble

    def peek(self) -> RunState | None:
        """The newest state, without marking it as shown."""
        with self._lock:
            return self._newest

    def _follow(self) -> None:
        reader = reader_for(self.run)
        try:
            while not self._closed:
                self._poll(reader)
                self._wake.wait(PERIOD_S if self.watched else IDLE_PERIOD_S)
                self._wake.clear()
        finally:
            reader.close()

    def _poll(self, reader: RunReader) -> None:
        try:
            state, trouble = reader.poll(), ""
        except (RunError, OSError) as error:
            state, trouble = None, " ".join(str(error).split())
        except Exception as error:  # a reader's fault is a line on the screen, not the end of it
            state, trouble = None, f"cannot read {self.run.path}: {type(error).__name__}: {error}"
        with self._lock:
            if state is not None:
                self._newest = state
            self._trouble = trouble
            if self._waiting:
                return
            self._waiting = True
        if not self._closed:
            self._deliver()
