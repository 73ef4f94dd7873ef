"""The beat file: a rank's last sign of progress, 64 mapped bytes that cost the rank one memory write.

Layout, little endian: sequence (u32), a tag (4 bytes), time (f64, UTC seconds), step (i64), phase (32 bytes,
UTF-8, zero-padded), 4 spare bytes, sequence again (u32). Writer and reader share no lock: a reader takes the
block only when both sequences agree and a second look gives the same bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple

SIZE = 64
TAG = b"beat"
_LAYOUT = struct.Struct("<I4sdq32s4xI")
_MASK = 0xFFFFFFFF

assert _LAYOUT.size == SIZE


class Beat(NamedTuple):
    """When (UTC seconds) a rank last changed its phase, in which step, and to which phase."""

    t: float
    step: int
    phase: str


class BeatWriter:
    """Owns one beat file; `beat` is a plain memory write, with no system call. Raises OSError on creation."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Reserve the block: on a full disk a write into a hole would kill the process with SIGBUS.
            os.posix_fallocate(fd, 0, SIZE)
            self._map = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._sequence = 0
        self._encoded: dict[str, bytes] = {}

    def beat(self, step: int, phase: str) -> None:
        encoded = self._encoded.get(phase)
        if encoded is None:
            encoded = self._encoded[phase] = phase.encode()[:32]
        self._sequence = sequence = (self._sequence + 1) & _MASK
        _LAYOUT.pack_into(self._map, 0, sequence, TAG, time.time(), step, encoded, sequence)

    def close(self) -> None:
        self._map.close()


def read_beat(path: str | os.PathLike[str]) -> Beat | None:
    """The rank's last beat; None when the file is missing, too short, or not a beat file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        block = os.pread(fd, SIZE, 0)
        for _ in range(16):
            again = os.pread(fd, SIZE, 0)
            if len(again) == SIZE and again == block and again[:4] == again[-4:]:
                break
            block = again
        else:
            return None
    except OSError:
        return None
    finally:
        os.close(fd)
    _, tag, t, step, phase, _ = _LAYOUT.unpack(block)
    if tag != TAG:
        return None
    return Beat(t, step, phase.rstrip(b"\0").decode(errors="replace"))
