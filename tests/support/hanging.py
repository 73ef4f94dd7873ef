"""A file system that really hangs: sshfs on a local sftp-server, stopped and continued by signal.

While it is stopped every look-up, read and write that is not answered from the kernel's caches waits, as it
does on a network file system whose server is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")


def why_not() -> str:
    """Why there can be no such file system here; empty when there can."""
    if shutil.which("sshfs") is None or not SFTP_SERVER.exists():
        return "sshfs or sftp-server is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no FUSE for this user"
    return ""


class HangingFileSystem:
    """`place` is the mounted folder; `hang` and `resume` may be called again and again."""

    def __init__(self, base: Path) -> None:
        self.place = base / "shared"
        self._behind = base / "behind"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rescue: threading.Timer | None = None
        self.rescued = False

    def mount(self) -> None:
        self.place.mkdir()
        self._behind.mkdir()
        ours, its = socket.socketpair()
        with ours, its:
            self._spawn([str(SFTP_SERVER)], ours)
            # without a cache of attributes, as a file system that several machines write to is mounted
            options = "passive,cache=no,attr_timeout=0,entry_timeout=0"
            self._spawn(["sshfs", f"nobody:{self._behind}", str(self.place), "-f", "-o", options], its)
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.place):
            assert time.monotonic() < deadline, "sshfs did not mount"
            time.sleep(0.02)

    def _spawn(self, argv: list[str], end: socket.socket) -> None:
        self._processes.append(subprocess.Popen(argv, stdin=end, stdout=end, start_new_session=True))

    def hang(self, rescue_s: float = 60.0) -> None:
        """After `rescue_s` it goes on by itself, and `rescued` says so: a test that waits for it must end."""
        self._rescue = threading.Timer(rescue_s, self._save)
        self._rescue.daemon = True
        # dirty pages go out by themselves within half a minute; here they are sent, and wait, at once
        ours, its = socket.socketpair()
        with ours, its:
            self._spawn(["sh", "-c", 'read -r _; exec sync -f "$0"', str(self.place)], its)
            self._server.send_signal(signal.SIGSTOP)
            self._rescue.start()
            ours.send(b"\n")

    def _save(self) -> None:
        self.rescued = True
        self._server.send_signal(signal.SIGCONT)

    def resume(self) -> None:
        if self._rescue is not None:
            self._rescue.cancel()
        self._server.send_signal(signal.SIGCONT)

    @property
    def _server(self) -> subprocess.Popen[bytes]:
        return self._processes[1]

    def unmount(self) -> None:
        self.resume()
        subprocess.run(["fusermount3", "-u", "-z", str(self.place)], check=False)
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def hanging_file_system(base: Path) -> Iterator[HangingFileSystem]:
    """Mounted below `base`, and gone afterwards."""
    system = HangingFileSystem(base)
    try:
        system.mount()
        yield system
    finally:
        system.unmount()
