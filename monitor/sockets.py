"""How to name a unix socket in a folder whose path is longer than the 107 bytes that the kernel takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 100


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of `path` that a socket can be bound or connected to inside the block."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield os.fspath(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
