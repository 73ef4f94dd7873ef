"""Follows an append-only file of lines: keeps its descriptor and offset, and never its content.

A half-written last line waits for its end; a truncated or replaced file is read from its beginning; a line
longer than the limit is skipped. So memory stays bounded whatever is written.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

CHUNK_BYTES = 1 << 20
# What a rank adds in a second fits: a read of a megabyte costs its allocation even when it finds 300 bytes.
FIRST_BYTES = 8 << 10
MAX_LINE_BYTES = 4 << 20
IDLE_READS_PER_STAT = 8  # an idle file is looked up by name this often, to see that it was replaced


class Tail:
    """One followed file. `read` gives complete lines only; `skipped` counts over-long lines."""

    __slots__ = (
        "_fd",
        "_first_bytes",
        "_identity",
        "_idle",
        "_large",
        "_skipping",
        "behind",
        "error",
        "keep_open",
        "offset",
        "path",
        "restarts",
        "skipped",
    )

    def __init__(self, path: Path, keep_open: bool = True, first_bytes: int = FIRST_BYTES) -> None:
        self.path = path
        self._first_bytes = first_bytes
        self.keep_open = keep_open  # False where descriptors are scarce: opened for each read
        self.offset = 0
        self.behind = True  # there may be more than was read so far
        self.skipped = 0
        self.restarts = 0
        self.error = ""
        self._fd = -1
        self._identity: tuple[int, int] | None = None  # device and inode of the file that `offset` is for
        self._idle = 0
        self._large = False
        self._skipping = False

    def read(self, limit: int = 0) -> bytes:
        """The complete lines that were added, at most about `limit` bytes of them; empty for none.

        Without a limit: a little at first, a megabyte where that was not all.
        """
        if self._fd < 0 and not self._open():
            self.behind = False
            return b""
        limit = limit or (CHUNK_BYTES if self._large else self._first_bytes)
        try:
            data = os.pread(self._fd, limit, self.offset)
            if data.endswith(b"\n") and len(data) < limit and not self._skipping:
                # The usual case, met in a thousand files a second.
                self.offset += len(data)
                self._idle = 0
                if self.behind:
                    self.behind = self._large = False
                return data
            return self._whole_lines(data, limit)
        except OSError as error:
            self.error = f"cannot read {self.path}: {error.strerror or error}"
            self.behind = False
            self.close()
            return b""
        finally:
            if not self.keep_open:
                self.close()

    def read_range(self, start: int, end: int) -> bytes:
        """Bytes [start, end) as they are now, without moving the offset; empty when they cannot be read."""
        if self._fd < 0 and not self._open():
            return b""
        try:
            return os.pread(self._fd, end - start, start)
        except OSError:
            return b""
        finally:
            if not self.keep_open:
                self.close()

    def size(self) -> int:
        """Bytes in the file now; 0 when it is not there."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def skip_to(self, offset: int) -> None:
        """Go on with the first line that begins at or behind `offset`."""
        if offset <= self.offset:
            return
        near = self.read_range(offset - 1, offset - 1 + CHUNK_BYTES)
        end = near.find(b"\n") + 1
        self._skipping = not end
        self.offset = offset - 1 + (end or len(near))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, limit: int) -> bytes:
        return self._whole_lines(os.pread(self._fd, limit, self.offset), limit)

    def _whole_lines(self, data: bytes, limit: int) -> bytes:
        """The complete lines in what was read at the offset; reads more where there is none yet."""
        if not data:
            self.behind = self._large = False
            self._check_replaced()
            return b""
        self._idle = 0
        self.behind = self._large = len(data) >= limit
        if self._skipping:
            end = data.find(b"\n") + 1
            self._skipping = not end
            self.offset += end or len(data)
            data = data[end:] if end else b""
            if not end and self.behind:
                return self._read(limit)
        end = data.rfind(b"\n") + 1
        if not end and self.behind:
            if limit < CHUNK_BYTES:
                return self._read(CHUNK_BYTES)
            if limit < MAX_LINE_BYTES:
                return self._read(MAX_LINE_BYTES)
            self.skipped += 1
            self._skipping = True
            self.offset += len(data)
            return self._read(CHUNK_BYTES)
        self.offset += end
        return data[:end]

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.error = f"cannot read {self.path}: {error.strerror or error}"
            return False
        self.error = ""
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.error = f"cannot read {self.path}: not a regular file"  # a pipe or a device never ends
            self.close()
            return False
        identity = (found.st_dev, found.st_ino)
        if self._identity is not None and identity != self._identity:
            self._restart()
        self._identity = identity
        return True

    def _check_replaced(self) -> None:
        now = os.fstat(self._fd)
        if now.st_size < self.offset:
            self._restart()
            return
        self._idle += 1
        if self._idle % IDLE_READS_PER_STAT:
            return
        try:
            named = os.stat(self.path)
        except OSError:
            return
        if (named.st_dev, named.st_ino) != self._identity:
            self.close()
            self.behind = True

    def _restart(self) -> None:
        self.offset = 0
        self.restarts += 1
        self._skipping = False
        self.behind = True
