"""The beat: a rank's last sign of progress, 64 bytes of memory that cost the rank one memory write.

While the rank lives the beat is in a memfd of its own, and `telemetry/rank-<R>.beat` says where below /proc:
a mapped file of the run directory would stop training for as long as a network file system hangs, for a page
that is being written back takes no store. A reader on another machine finds no such memory and takes what
that node's agent has reported. The last beat of a rank that ends in order is left in the file itself.

Layout, little endian: sequence (u32), a tag (4 bytes), time (f64, UTC seconds), step (i64), phase (32 bytes,
UTF-8, zero-padded), whose beat it is (u32), sequence again (u32). Writer and reader share no lock: a reader
takes the block only when both sequences agree and a second look gives the same bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

SIZE = 64
TAG = b"beat"
MEMORY = "ftdash-beat"
POINTER = b"memory "  # begins a file that says where the beat is; links are refused by some file systems
_LAYOUT = struct.Struct("<I4sdq32sII")
_MASK = 0xFFFFFFFF

assert _LAYOUT.size == SIZE


class Beat(NamedTuple):
    """When (UTC seconds) a rank last changed its phase, in which step, and to which phase."""

    t: float
    step: int
    phase: str


class BeatWriter:
    """Owns one beat; `beat` is a plain memory write, with no system call. Raises OSError on creation."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._fd = os.memfd_create(MEMORY)
        os.ftruncate(self._fd, SIZE)
        self._map = mmap.mmap(self._fd, SIZE)
        self._sequence = 0
        self._identity = _identity(self._path)
        self._encoded: dict[str, bytes] = {}
        self._leave(POINTER + f"/proc/{os.getpid()}/fd/{self._fd}".encode())

    def beat(self, step: int, phase: str) -> None:
        encoded = self._encoded.get(phase)
        if encoded is None:
            encoded = self._encoded[phase] = phase.encode()[:32]
        self._sequence = sequence = (self._sequence + 1) & _MASK
        _LAYOUT.pack_into(self._map, 0, sequence, TAG, time.time(), step, encoded, self._identity, sequence)

    def close(self) -> None:
        """Leave the last beat as a file. Raises OSError where it cannot be written."""
        self._leave(self._map[:])
        self._map.close()
        os.close(self._fd)

    def _leave(self, data: bytes) -> None:
        new = f"{self._path}.new"
        with open(new, "wb", buffering=0) as file:
            file.write(data)
        os.replace(new, self._path)


def memory_of(path: str | os.PathLike[str]) -> str | None:
    """Where the beat at `path` is kept in memory, for readers that come often; None: in the file."""
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(SIZE + 1)
    except OSError:
        return None
    return os.fsdecode(text[len(POINTER) :]) if text.startswith(POINTER + b"/proc/") else None


def read_beat(path: str | os.PathLike[str], memory: str | None = None) -> Beat | None:
    """The rank's last beat; None when it is missing, too short, no beat, or in another machine's memory.

    With `memory`, what `memory_of` gave, the file system of `path` is not asked.
    """
    try:
        where = memory or memory_of(path)
        # the same path on another machine may be anything: a pipe would block, a device do worse
        if where is not None and not os.readlink(where).startswith(f"/memfd:{MEMORY}"):
            return None
        fd = os.open(where or path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
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
    _, tag, t, step, phase, identity, _ = _LAYOUT.unpack(block)
    if tag != TAG or identity != _identity(path):
        return None
    return Beat(t, step, phase.rstrip(b"\0").decode(errors="replace"))


def _identity(path: str | os.PathLike[str]) -> int:
    """A number for run and rank: memory at the same place on another machine may be another run's beat."""
    parts = Path(path).absolute().parts
    return zlib.crc32(os.fsencode("/".join((*parts[-3:-2], *parts[-1:]))))
