"""A log file by line number: indexed as it grows, read lazily, whatever its lines are made of."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from pathlib import Path

from ftdash.monitor.logs.demux import Demultiplexer
from ftdash.tui.format import clean

CHUNK = 1 << 20
LONGEST = 8192  # bytes of a line that are read; of a longer one the beginning and the end
MOST_LINES = 4_000_000  # 32 MB of offsets; what comes after is left out, and said


class LogIndex:
    """Offsets of the lines of one file. `poll` reads what was added, at most `budget` bytes at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = array("Q", [0])  # start of each line, and of the unfinished one at the end
        self.size = 0  # bytes indexed
        # where it begins, and the file's end: what a screen follows is painted without asking the file system
        self._tail = (0, b"")
        self.full = False
        self.trouble = ""

    @property
    def count(self) -> int:
        """Lines, the unfinished last one included."""
        return len(self.starts) - (1 if self.starts[-1] == self.size else 0)

    def poll(self, budget: int = 16 * CHUNK) -> bool:
        """True when the index changed. A file that shrank was replaced: it is read anew."""
        before = (self.size, self.count)
        try:
            with self.path.open("rb", buffering=0) as handle:
                length = os.fstat(handle.fileno()).st_size
                if length < self.size:
                    self._forget()
                handle.seek(self.size)
                while budget > 0 and not self.full and (chunk := handle.read(min(CHUNK, budget))):
                    self._take(chunk)
                    budget -= len(chunk)
            self.trouble = ""
        except FileNotFoundError:
            self.trouble = ""
        except OSError as error:
            self.trouble = f"cannot read {self.path}: {error.strerror or error}"
        return (self.size, self.count) != before

    def _forget(self) -> None:
        self.starts = array("Q", [0])
        self.size = 0
        self._tail = (0, b"")
        self.full = False

    def _take(self, chunk: bytes) -> None:
        at = chunk.find(b"\n")
        while at >= 0:
            self.starts.append(self.size + at + 1)
            at = chunk.find(b"\n", at + 1)
        self.size += len(chunk)
        start, kept = self._tail
        joined = kept + chunk
        self._tail = (start + max(0, len(joined) - CHUNK), joined[-CHUNK:])
        if len(self.starts) > MOST_LINES:
            self.full = True

    def text(self, line: int) -> str:
        """The line as a screen shows it: after its last carriage return, without escapes, bounded."""
        start = self.starts[line]
        end = self.starts[line + 1] - 1 if line + 1 < len(self.starts) else self.size
        if end - start <= LONGEST:
            raw = self._read(start, end)
        else:
            half = LONGEST // 2
            raw = self._read(start, start + half) + b" ... " + self._read(end - half, end)
        raw = raw.rstrip(b"\r\n")
        return clean(raw[raw.rfind(b"\r") + 1 :].decode("utf-8", "replace"), LONGEST + 8)

    def _read(self, start: int, end: int) -> bytes:
        first, tail = self._tail  # at once: another thread may take more meanwhile
        if start >= first:
            return tail[start - first : end - first]
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.pread(fd, end - start, start)
        except OSError:
            return b""
        finally:
            os.close(fd)


class LogFilter:
    """The lines of an index that hold a text and come from a rank; extended as the index grows."""

    def __init__(self, needle: str = "", rank: int | None = None) -> None:
        self.needle = needle.lower()
        self.rank = rank
        self.lines = array("Q")
        self._next = 0
        self._demux = Demultiplexer()

    @property
    def passes_all(self) -> bool:
        return not self.needle and self.rank is None

    def extend(self, index: LogIndex, budget: int = 20_000) -> bool:
        """Look at up to `budget` more lines; True when there are more to look at."""
        if self._next > index.count:  # the file was replaced
            self.lines, self._next = array("Q"), 0
        end = min(index.count, self._next + budget)
        for line in range(self._next, end):
            if self.matches(index.text(line)):
                self.lines.append(line)
        self._next = end
        return end < index.count

    def matches(self, text: str) -> bool:
        """Whether one line passes."""
        if self.needle and self.needle not in text.lower():
            return False
        if self.rank is None:
            return True
        origin, _ = self._demux.origin(text)
        found = origin.rank if origin.rank is not None else origin.local_rank
        return found == self.rank

    def position(self, line: int) -> int:
        """Where `line`, or the next one that passes, stands among those that pass."""
        return bisect_left(self.lines, line)
