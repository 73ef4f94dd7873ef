"""Standard output of a command: its reader may leave (`| head`), its disk may be full, it may be closed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _ReaderLeft(SystemExit):
    """Nobody reads on, as is usual in a pipe: the command ends, and nothing is to be told."""


class _Stdout(io.FileIO):
    """File descriptor 1. The first write that fails ends the command, whichever library made it."""

    told = False
    ended = False  # what is left in buffers goes nowhere from here on

    def write(self, data) -> int:
        if self.ended:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            raise _ReaderLeft(0) from None
        except OSError as error:
            if not self.told:
                sys.stderr.write(f"ftdash: standard output: {error.strerror or error}\n")
            self.told = True
            raise SystemExit(2) from None


@contextmanager
def standard_output() -> Iterator[None]:
    """What is written within goes out, or the process ends: with 0 where the reader has left, with one line
    on stderr and 2 where the output cannot be written. Closed streams (`>&-`) are as /dev/null."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    own = sys.__stdout__
    if own is None or sys.stdout is not own:  # it is closed, or somebody collects it
        yield
        return
    raw = _Stdout(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=own.encoding,
        errors=own.errors,
        line_buffering=own.line_buffering,
        write_through=own.write_through,
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except _ReaderLeft:
            pass  # the status that the command ends with stays
        finally:
            raw.ended = True
            sys.stdout = own
