"""Samples this node once a second: every rank's process and its heartbeat, the GPUs, the host's memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.agent.watch import Watched
from ftdash.monitor.beat import Beat, memory_of, read_beat
from ftdash.monitor.procs import RankProcess
from ftdash.monitor.records import Event, Exit, GpuSample, Node, RankSample, Record, encode_line
from ftdash.monitor.rundir import RunDir

ROTATE_BYTES = 64 << 20
KEPT_LINES = 20_000  # that a full or vanished file system refuses: a quarter of an hour of 16 ranks


class NodeFile:
    """The node's telemetry; writing never raises.

    Lines that a full or vanished file system refuses are kept and tried again; what is beyond `KEPT_LINES` is
    lost, which is told later.

    Past `ROTATE_BYTES` the file is put aside and a new one begun with the events and exits so far, so that
    the telemetry of a run of months stays small.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._fd = -1
        self._torn = False
        self._unwritten: list[bytes] = []
        self._kept: list[bytes] = []

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            line = encode_line(record)
            self._unwritten.append(line)
            if isinstance(record, Event | Exit):
                self._kept = [*self._kept[-200:], line]
        told = [self._loss()] if self.dropped else []
        if not self._unwritten:
            return
        written, whole = self._append(b"".join([*self._unwritten, *told]))
        if whole:
            self.dropped = 0
            self._unwritten.clear()
            return
        del self._unwritten[:written]
        self.dropped += max(0, len(self._unwritten) - KEPT_LINES)
        del self._unwritten[KEPT_LINES:]

    def _loss(self) -> bytes:
        text = f"{self.dropped} node samples were lost: the disk is full or failing"
        return encode_line(Event(t=time.time(), severity="warning", code="telemetry-dropped", text=text))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> tuple[int, bool]:
        """(whole lines that reached the file, whether all did)."""
        prefix = b"\n" if self._torn else b""
        sent = 0
        try:
            if self._fd < 0:
                self._open()
                prefix = b"\n" if self._torn else b""
            if prefix:
                os.write(self._fd, prefix)
                self._torn = False
            while sent < len(data):
                sent += os.write(self._fd, data[sent:])
            if os.fstat(self._fd).st_size > ROTATE_BYTES:
                self._rotate()
        except OSError:
            self._torn = self._torn or (sent > 0 and data[sent - 1 : sent] != b"\n")
            with contextlib.suppress(OSError):
                self.close()
            self._fd = -1
            return data[:sent].count(b"\n"), sent == len(data)
        return 0, True

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            os.replace(self.path, self.path.with_suffix(".jsonl.old"))
            self.close()
            self._open()
            os.write(self._fd, b"".join(self._kept))


class GpuWatch:
    """Asks for the GPUs in a thread of its own: a driver that hangs must not hang the agent."""

    def __init__(self, ask: Callable[[], list[GpuSample]], period_s: float) -> None:
        self._ask = ask
        self._period_s = period_s
        self._newest: list[GpuSample] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def take(self) -> list[GpuSample]:
        """Samples that were not taken before."""
        newest, self._newest = self._newest, []
        return newest

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                self._newest = self._ask()
            except Exception as error:
                self._newest = [GpuSample(t=time.time(), index=0, state="error", error=str(error))]
            if not self._newest:
                return  # no GPU here
            self._closing.wait(max(0.0, self._period_s - (time.monotonic() - started)))


class RankSampler:
    """Turns the watched ranks into samples; keeps what is needed for differences."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.devices: list[GpuSample] = []
        self._cpu: dict[int, tuple[float, float]] = {}  # pid: (monotonic time, CPU seconds)
        self._gpus: dict[int, tuple[str, str]] = {}  # pid: UUID, why that is unsure
        self._beats: dict[int, str] = {}  # pid: where its beat is in memory
        self._workers: dict[int, bool | None] = {}  # pid: whether it is a data loader's, None after one look
        self._omp: dict[int, int] = {}

    def sample(self, ranks: Iterable[Watched]) -> list[RankSample]:
        """One sample for each rank whose process is there."""
        found = []
        for watched in ranks:
            process = watched.process
            stat = procs.read_stat(process.pid)
            if stat is None or stat.start != process.start:
                continue
            counters = procs.read_counters(process.pid)
            family = procs.descendants(process.pid)
            beat = self._beat_of(process)
            gpu_uuid, gpu_unsure = self._gpu_of(process.pid)
            found.append(
                RankSample(
                    t=time.time(),
                    rank=process.rank,
                    pid=process.pid,
                    rss=stat.rss,
                    cpu=self._cpu_percent(process.pid, stat.cpu_s),
                    threads=stat.threads,
                    state=stat.state,
                    read_bytes=counters.read_bytes,
                    write_bytes=counters.write_bytes,
                    ctx_switches=counters.ctx_switches,
                    descendants=family,
                    beat_t=beat.t if beat else 0.0,
                    beat_step=beat.step if beat else 0,
                    beat_phase=beat.phase if beat else "",
                    gpu_uuid=gpu_uuid,
                    gpu_unsure=gpu_unsure,
                    cpus_allowed=procs.cpus_allowed(process.pid),
                    loader_workers=sum(map(self._is_worker, family)),
                    omp_threads=self._omp_threads(process.pid),
                )
            )
        return found

    def _is_worker(self, pid: int) -> bool:
        """Asked twice of each process: between fork and exec any child looks like its parent."""
        known = self._workers.get(pid)
        if known is not None:
            return known
        found = procs.is_loader_worker(pid)
        self._workers[pid] = found if pid in self._workers else None
        return found

    def _omp_threads(self, pid: int) -> int:
        if pid not in self._omp:
            said = procs.environ(pid).get("OMP_NUM_THREADS", "").split(",")[0]
            self._omp[pid] = int(said) if said.isdigit() else 0
        return self._omp[pid]

    def _beat_of(self, process: RankProcess) -> Beat | None:
        """Straight from the rank's memory once that is known: no look at a shared file system each second."""
        path = self.run.beat_file(process.rank)
        memory = self._beats.get(process.pid)
        if memory is None and (found := memory_of(path)) is not None:
            memory = self._beats[process.pid] = found
        return read_beat(path, memory)

    def _cpu_percent(self, pid: int, cpu_s: float) -> float:
        now = time.monotonic()
        then, before = self._cpu.get(pid, (now, cpu_s))
        self._cpu[pid] = (now, cpu_s)
        return round(100.0 * (cpu_s - before) / (now - then), 1) if now > then else 0.0

    def _gpu_of(self, pid: int) -> tuple[str, str]:
        """The rank's GPU by its environment, asked once, and why it is unsure; both empty without GPUs."""
        if not self.devices:
            return "", ""
        if pid not in self._gpus:
            from ftdash.monitor.nvml.mapping import gpu_of_process

            found = gpu_of_process(pid, self.devices)
            self._gpus[pid] = (found.uuid or "", "" if found.sure else found.why)
        return self._gpus[pid]


def node_sample(host: str) -> Node:
    total, available = procs.host_memory()
    return Node(
        t=time.time(),
        host=host,
        agent_pid=os.getpid(),
        load=os.getloadavg()[0],
        memory_total=total,
        memory_available=available,
    )
