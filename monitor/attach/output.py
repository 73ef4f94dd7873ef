"""What a process prints, read from the file that its standard output is, if it is a file."""

from __future__ import annotations

import os
import stat as stat_module
from dataclasses import dataclass

from ftdash.monitor import procs
from ftdash.monitor.logs.demux import Demultiplexer
from ftdash.monitor.logs.hardware import gpu_fault
from ftdash.monitor.logs.lines import LineSplitter
from ftdash.monitor.logs.progress import ProgressFollower
from ftdash.monitor.logs.tracebacks import ElasticReport, TracebackCollector

FIRST_BYTES = 1 << 20  # of a log's end, read when it is met first
MAX_RANKS = 4096
MORE_BYTES = 4 << 20  # read at most at a time


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A regular file that a process writes to. Two processes with the same `key` share it."""

    pid: int
    fd: int
    path: str
    key: tuple[int, int]


def output_files(pid: int) -> list[OutputFile]:
    """The regular files behind standard output and error, each once. Pipes and terminals are not touched."""
    found: list[OutputFile] = []
    for fd in (1, 2):
        link = f"/proc/{pid}/fd/{fd}"
        try:
            status = os.stat(link)
            path = os.readlink(link)
        except OSError:
            continue
        key = (status.st_dev, status.st_ino)
        if stat_module.S_ISREG(status.st_mode) and all(other.key != key for other in found):
            found.append(OutputFile(pid, fd, path.removesuffix(" (deleted)"), key))
    return found


def files_behind_pipe(pid: int) -> list[OutputFile]:
    """Where a pipe on standard output leads, one step on: the files of `tee log` and the like that read it.

    Looks at processes whose standard input is that pipe, and at the regular files that they write.
    """
    try:
        pipe = os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return []
    if not pipe.startswith("pipe:"):
        return []
    found: list[OutputFile] = []
    for reader in procs.all_pids():
        try:
            if reader == pid or os.readlink(f"/proc/{reader}/fd/0") != pipe:
                continue
            numbers = [int(name) for name in os.listdir(f"/proc/{reader}/fd")]
        except OSError:
            continue
        for fd in sorted(numbers):
            link = f"/proc/{reader}/fd/{fd}"
            try:
                status = os.stat(link)
                if stat_module.S_ISREG(status.st_mode) and _written(reader, fd):
                    found.append(OutputFile(reader, fd, os.readlink(link), (status.st_dev, status.st_ino)))
            except OSError:
                continue
    return found


def _written(pid: int, fd: int) -> bool:
    """True when the descriptor is open for writing (fdinfo's flags, octal)."""
    with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as handle:
        for line in handle:
            if line.startswith(b"flags:"):
                return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False


class LogFollower:
    """Follows one file and keeps progress by rank. Reading opens the file anew, read-only."""

    def __init__(self, file: OutputFile) -> None:
        self.file = file
        self.error = ""
        self.whole = ProgressFollower()  # lines that name no rank
        self.ranks: dict[int, ProgressFollower] = {}
        self.rank_of_pid: dict[int, int] = {}  # by every id that a rank's process has, in containers too
        self.tracebacks = TracebackCollector()
        self.elastic = ElasticReport()
        self.gpu_fault = ""  # a line of the kernel or of slurmstepd about a sick GPU
        self.last_line = ""
        self._offset: int | None = None
        self._lines = LineSplitter()
        self._demux = Demultiplexer()

    def poll(self) -> None:
        """Read what was added since the last poll; of a large file, first its end only."""
        try:
            with open(f"/proc/{self.file.pid}/fd/{self.file.fd}", "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if self._offset is None:
                    self._offset = max(0, size - FIRST_BYTES)
                elif size < self._offset:
                    self._offset, self._lines = 0, LineSplitter()
                handle.seek(self._offset)
                data = handle.read(MORE_BYTES)
        except OSError as error:
            self.error = f"cannot read {self.file.path}: {error.strerror}"
            return
        self.error = ""
        self._offset += len(data)
        for line in self._lines.feed(data):
            self._take(line)
        if self._lines.tail:
            self._take_progress(self._lines.tail, ended=False)

    def _take(self, line: str) -> None:
        if line.strip():
            self.last_line = line
        if fault := gpu_fault(line):
            self.gpu_fault = fault.text
        for origin, text in self._demux.lines(line):
            self.tracebacks.feed(origin, text)
            self.elastic.feed(text)
        self._take_progress(line)

    def first_failure(self) -> str:
        """The first failing rank and its exception, else what torchrun's report calls the root cause."""
        if first := self.tracebacks.first_failure():
            return f"{first.origin.label()}: {first.exception}: {first.text}"
        if root := self.elastic.root_cause():
            return f"rank {root.rank} on {root.host}: exit code {root.exit_code}"
        return ""

    def _take_progress(self, line: str, *, ended: bool = True) -> None:
        for origin, text in self._demux.lines(line):
            rank = origin.rank
            if rank is None and origin.pid is not None:
                rank = self.rank_of_pid.get(origin.pid)
            if rank is None:
                self.whole.feed(text, ended=ended)
            elif text:
                known = self.ranks.get(rank)
                follower = known or ProgressFollower()
                if follower.feed(text, ended=ended) and known is None and len(self.ranks) < MAX_RANKS:
                    self.ranks[rank] = follower
