"""Stopping a run between two steps, with a checkpoint: by signal, or by a file in the run's control folder.

SIGUSR1 or SIGTERM to any rank, or a file `control/save-and-stop` of the same user, ends training after the
current step. Every rank hears of it in the same step: the wish is reduced over the ranks once a step. A rank
that is stuck cannot come to the end of its step; after SIGTERM a thread ends it when the grace is over, so
that a hung run still dies of SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

CONTROL_NAME = "save-and-stop"
TERM_GRACE_S = 20.0
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopRequest:
    """Hears the wish to stop on one rank; `agreed` tells whether any rank heard it."""

    def __init__(
        self, run_dir: str | os.PathLike[str] | None, rank: int, grace_s: float = TERM_GRACE_S
    ) -> None:
        self._file = Path(run_dir) / "control" / CONTROL_NAME if run_dir and rank == 0 else None
        self._grace_s = grace_s
        self._wanted = False
        self._done = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _SIGNALS:
            signal.signal(number, self._heard)
        # The wake-up file is written by the C-level handler, so the watcher learns of a signal
        # also while the main thread is blocked in a collective and runs no Python.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        os.set_blocking(self._wake_read, True)
        threading.Thread(target=self._watch, name="ftdash-stop", daemon=True).start()

    def _heard(self, number: int, frame: object) -> None:
        self._wanted = True

    def _watch(self) -> None:
        while True:
            try:
                received = os.read(self._wake_read, 64)
            except OSError:
                return
            if not received:
                return
            if signal.SIGTERM in received and not self._done.wait(self._grace_s):
                os._exit(128 + signal.SIGTERM)

    def _control_file(self) -> bool:
        if self._file is None:
            return False
        try:
            return self._file.stat().st_uid == os.getuid()
        except OSError:
            return False

    def agreed(self, device: Any) -> bool:
        """Whether any rank was asked to stop; a collective, called by every rank once a step."""
        import torch
        import torch.distributed as dist

        wanted = self._wanted or self._control_file()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor([int(wanted)], dtype=torch.int32, device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            wanted = bool(flag.item())
        if wanted:
            self._done.set()  # not stuck: the checkpoint may take its time
        return wanted

    def close(self) -> None:
        """Training is over: signals mean what they meant before."""
        self._done.set()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        os.close(self._wake_write)
