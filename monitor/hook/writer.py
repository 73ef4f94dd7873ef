"""A bounded line queue and the daemon thread that writes it out: a slow or full disk never stops a rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any


def plain(value: Any) -> Any:
    """A value as telemetry stores it: non-finite floats become "nan", "inf" or "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return value


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one line. Values are scalars, lists of integers or flat dicts of strings."""
    stored = {key: plain(value) for key, value in record.items()}
    return json.dumps(stored, separators=(",", ":")).encode() + b"\n"


class LineWriter:
    """Appends records to one file from a daemon thread; `put` never blocks and never raises.

    Lines that a full or vanished file system refuses are kept and tried again. A record that finds `capacity`
    others waiting is dropped and counted; the count is told in an event record once writing works again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int = 4096,
        period_s: float = 0.2,
        last: Callable[[], object] | None = None,
    ) -> None:
        """`last` is called in the thread once everything is written, for what else is left to write."""
        self.path = os.fspath(path)
        self._last = last
        self.dropped = 0
        self._capacity = capacity
        self._period_s = period_s
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._unwritten: list[bytes] = []
        self._told = 0
        self._torn = False
        self._fd = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftdash-telemetry", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        if len(self._waiting) >= self._capacity:
            self.dropped += 1
        else:
            self._waiting.append(record)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is waiting, for at most `timeout_s`; a disk that hangs is left to the daemon thread."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._period_s)
            with contextlib.suppress(Exception):
                self._flush()
        with contextlib.suppress(Exception):
            if self._last is not None:
                self._last()
            if self._fd >= 0:
                os.close(self._fd)

    def _flush(self) -> None:
        while self._waiting:
            record = self._waiting.popleft()
            try:
                self._unwritten.append(encode(record))
            except (TypeError, ValueError):
                self.dropped += 1
        told = [self._loss()] if self.dropped > self._told else []
        if not self._unwritten and not told:
            return
        written, whole = self._append(b"".join([*self._unwritten, *told]))
        if whole:
            self._told = self.dropped
            self._unwritten.clear()
            return
        del self._unwritten[:written]
        self.dropped += max(0, len(self._unwritten) - self._capacity)
        del self._unwritten[self._capacity :]

    def _loss(self) -> bytes:
        text = f"{self.dropped} telemetry records dropped so far: the disk is full or too slow"
        event = {"kind": "event", "t": time.time(), "v": 1, "severity": "warning"}
        return encode({**event, "code": "telemetry-dropped", "text": text})

    def _append(self, data: bytes) -> tuple[int, bool]:
        """(whole lines that reached the file, whether all did); after a torn write a new line is begun.

        The file is opened anew after an error: the one that was open may be on a file system that is gone.
        """
        prefix = b"\n" if self._torn else b""
        sent = 0
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if prefix:
                os.write(self._fd, prefix)
                self._torn = False
            while sent < len(data):
                sent += os.write(self._fd, data[sent:])
        except OSError:
            self._torn = self._torn or (sent > 0 and data[sent - 1 : sent] != b"\n")
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                with contextlib.suppress(OSError):
                    os.close(fd)
            return data[:sent].count(b"\n"), False
        return 0, True
