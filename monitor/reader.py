"""Reads a run directory step by step and says what the run is doing now."""

from __future__ import annotations

from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunState


class RunReader:
    """Follows one run. Each `poll` reads only what was added since the last one; memory is bounded."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def poll(self) -> RunState:
        """The run as it is now. Raises RunError when the run directory cannot be read at all."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the descriptors back."""
