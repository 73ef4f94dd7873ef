"""The screen in a real terminal: start, key press to repaint, and what Monitor costs at 8 and 1,024 ranks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.cluster import Cluster

STARTS = 9
KEYS = 80
WATCHED_S = 20
ROWS, COLUMNS = 50, 160

FTDASH = ("-m", "ftdash.tui.cli")
ANSWER = b"Does it fit?"  # stands on the Plan pane when it is live
# The least that a Textual app can do: what is beyond its time is ours.
MINIMAL = (
    "-c",
    f"""
from textual.app import App
from textual.widgets import Static
class Minimal(App):
    def compose(self):
        yield Static("{ANSWER.decode()}")
Minimal().run()
""",
)


class Terminal:
    """A Python program, `ftdash` or another, on the other side of a pseudo terminal."""

    def __init__(self, home: Path, *arguments: str, program: tuple[str, ...] = FTDASH) -> None:
        environ = {**os.environ, "FTDASH_HOME": str(home), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation is compiled, and so is this checkout
        self.started = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # The size stands before the program looks at it.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            os.execve(sys.executable, [sys.executable, *program, *arguments], environ)

    def read(self, patience_s: float) -> bytes:
        """What has been written, waiting for it at most `patience_s`."""
        ready, _, _ = select.select([self.fd], [], [], patience_s)
        return os.read(self.fd, 1 << 16) if ready else b""

    def until(self, marker: bytes, patience_s: float = 20.0) -> float:
        """Seconds since the start at which `marker` had been written."""
        found, deadline = b"", time.perf_counter() + patience_s
        while marker not in found:
            assert time.perf_counter() < deadline, found[-500:]
            found = found[-200:] + self.read(0.1)
        return time.perf_counter() - self.started

    def drain(self, quiet_s: float) -> None:
        """Read until nothing comes for `quiet_s`."""
        while self.read(quiet_s):
            pass

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@contextlib.contextmanager
def terminal(home: Path, *arguments: str, program: tuple[str, ...] = FTDASH) -> Iterator[Terminal]:
    opened = Terminal(home, *arguments, program=program)
    try:
        yield opened
    finally:
        opened.close()


def starts(home: Path) -> None:
    """From exec to the plain first frame, and to the live Plan pane with its answer; in turn with the least
    Textual app, so that both meet the same machine."""
    first, live, least = [], [], []
    with terminal(home) as screen:
        screen.until(ANSWER)  # whatever was not compiled yet is now
    for _ in range(STARTS):
        with terminal(home) as screen:
            first.append(screen.until(b"1 Plan"))
            live.append(screen.until(ANSWER))
        with terminal(home, program=MINIMAL) as screen:
            least.append(screen.until(ANSWER))
    shown_ms, live_ms, least_ms = (statistics.median(taken) * 1e3 for taken in (first, live, least))
    print(
        f"  first frame {shown_ms:.0f} ms, live screen {live_ms:.0f} ms;"
        f" an app of one line of text, started in turn, {least_ms:.0f} ms"
    )


def keys(home: Path) -> None:
    """From a key on a slider to the first byte of the repaint, all answers included in it."""
    waits = []
    with terminal(home) as screen:
        screen.until(ANSWER)
        screen.drain(1.0)
        os.write(screen.fd, b"\t")  # from the model to the parameters
        screen.drain(0.5)
        for number in range(KEYS):
            sent = time.perf_counter()
            os.write(screen.fd, b"\x1b[C" if number % 40 < 20 else b"\x1b[D")
            assert screen.read(2.0)
            waits.append(time.perf_counter() - sent)
            screen.drain(0.3)
    waits.sort()
    p95 = waits[int(len(waits) * 0.95)]
    print(f"  key to repaint: median {statistics.median(waits) * 1e3:.0f} ms, p95 {p95 * 1e3:.0f} ms")


def monitor(home: Path, ranks: int) -> None:
    """Monitor on a run that writes a step of every rank each second."""
    cluster = Cluster(ranks, experts=64, start_t=time.time() - 5)
    run = cluster.create(home / "runs", f"wide-{ranks}", steps=5)
    with terminal(home, "--run", str(run.path), "--pane", "monitor") as screen:
        seen = screen.until(b"Ranks")
        process = psutil.Process(screen.pid)
        step, deadline = 6, time.monotonic() + 8
        spent = 0.0
        written = 0
        for phase_s in (8, WATCHED_S):
            before, written, deadline = sum(process.cpu_times()[:2]), 0, time.monotonic() + phase_s
            due = time.monotonic()
            while time.monotonic() < deadline:
                if time.monotonic() >= due:
                    cluster.start_t = time.time() - step  # the records are of now
                    cluster.append(run, step)
                    step, due = step + 1, due + 1.0
                written += len(screen.read(0.05))
            spent = sum(process.cpu_times()[:2]) - before
        rss = process.memory_info().rss
    print(
        f"  Monitor, {ranks:,} ranks at 1 Hz: {spent / WATCHED_S:.1%} of a core, {rss / 2**20:.0f} MiB,"
        f" {written / WATCHED_S / 1024:.1f} KiB/s to the terminal, first view {seen:.2f} s"
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ftdash-bench-") as folder:
        home = Path(folder)
        starts(home)
        keys(home)
        monitor(home, 8)
        monitor(home, 1_024)


if __name__ == "__main__":
    main()
