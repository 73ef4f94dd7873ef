"""Has every process that makes a process group tell its flight recorder, from that moment on.

Torch records each rank's collectives by group and sequence number, and tells them to whoever asks its worker
server. The server is a thread of torch's own that answers also while the main thread is blocked, so it has to
be there before the hang.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any


def listen(c10d: ModuleType) -> None:
    """Torch's process groups are there: serve once the default one is made."""
    made = c10d.init_process_group

    @functools.wraps(made)
    def heard(*args: Any, **kwargs: Any) -> Any:
        done = made(*args, **kwargs)
        with contextlib.suppress(Exception):
            _serve()
        return done

    c10d.init_process_group = heard  # type: ignore[attr-defined]


def _serve() -> None:
    from ftdash.monitor.hook import process
    from ftdash.monitor.hook.core import RUN_DIR_ENV

    process.serve_flight_recorder(Path(os.environ[RUN_DIR_ENV]) / "control", process.own_rank())
