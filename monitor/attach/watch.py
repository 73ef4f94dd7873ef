"""What can be known of a training job without its cooperation: processes, GPUs, logs, sampled over time."""

from __future__ import annotations

import contextlib
import os
import stat as stat_module
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.attach.find import Job, Rank, find_jobs, shown_command
from ftdash.monitor.attach.output import LogFollower, OutputFile, files_behind_pipe, output_files
from ftdash.monitor.hostname import node_name
from ftdash.monitor.logs.progress import ProgressFollower
from ftdash.monitor.nvml.mapping import gpu_of_rank, hidden_processes, pids_by_namespace
from ftdash.monitor.records import GpuSample


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as seen from outside. Bytes, percent of a core, bytes a second; None is not known."""

    rank: int
    local_rank: int
    pid: int
    host: str
    command: str
    state: str  # R, S, D, T as in /proc
    rss: int
    cpu: float | None
    read_bytes_s: float | None
    write_bytes_s: float | None
    threads: int
    descendants: tuple[int, ...]
    gpu: GpuSample | None
    gpu_why: str
    progress: ProgressFollower | None
    log: str


@dataclass(frozen=True, slots=True)
class JobView:
    """One job: its ranks on this machine, its launcher, what its log says."""

    job: Job
    ranks: tuple[RankView, ...]
    launcher: str
    progress: ProgressFollower | None
    log: str
    log_why: str  # why there is no log, or what is wrong with it
    first_failure: str
    gpu_fault: str


@dataclass(frozen=True, slots=True)
class Attached:
    """Everything that one look gave."""

    t: float
    jobs: tuple[JobView, ...]
    gpus: tuple[GpuSample, ...]
    notices: tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    t: float
    cpu_s: float
    read_bytes: int
    write_bytes: int


class Watcher:
    """Looks at jobs again and again; rates need two looks. Only reads: no signal, no ptrace, no write."""

    def __init__(
        self,
        pids: Sequence[int] | None = None,
        gpus: Callable[[], list[GpuSample]] | None = None,
        *,
        slurm_job: str = "",
        logs: Sequence[Path] = (),
    ) -> None:
        """`slurm_job`: only ranks of this job. `logs`: where output goes that leaves this node in pipes."""
        self._pids = pids
        self._gpus = gpus
        self._slurm_job = slurm_job
        self._log_paths = logs
        self._given: dict[Path, OutputFile] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._logs: dict[tuple[int, int], LogFollower] = {}
        self._piped: dict[tuple[int, int], list[OutputFile]] = {}
        self._host = node_name()

    def look(self) -> Attached:
        """The jobs as they are now."""
        gpus = self._gpus() if self._gpus is not None else []
        found = find_jobs(pids=self._pids)
        jobs = [job for job in found if self._slurm_job in ("", job.slurm_job_id)]
        seen: dict[tuple[int, int], _Seen] = {}
        used: set[tuple[int, int]] = set()
        views = tuple(self._job(job, gpus, seen, used) for job in jobs)
        self._seen = seen
        self._logs = {key: log for key, log in self._logs.items() if key in used}
        hidden = hidden_processes(gpus)
        return Attached(time.time(), views, tuple(gpus), (hidden,) if hidden else ())

    def _job(
        self,
        job: Job,
        gpus: Sequence[GpuSample],
        seen: dict[tuple[int, int], _Seen],
        used: set[tuple[int, int]],
    ) -> JobView:
        files = {rank.rank: output_files(rank.pid) for rank in job.ranks}
        shared = output_files(job.launcher_pid) if job.launcher_pid is not None else []
        shared += self._given_logs()
        own = [file for rank in job.ranks for file in files[rank.rank]]
        if not own and not shared:
            shared = self._behind_pipes(job)
        for file in _unique([*own, *shared]):
            log = self._logs.get(file.key)
            if log is None:
                log = self._logs[file.key] = LogFollower(file)
            log.rank_of_pid = {pid: rank.rank for rank in job.ranks for pid in pids_by_namespace(rank.pid)}
            log.poll()
            used.add(file.key)
        best = self._best(_unique([*own, *shared]))
        ranks = tuple(self._rank(rank, files[rank.rank] or shared, gpus, seen) for rank in job.ranks)
        logs = [self._logs[file.key] for file in _unique([*own, *shared])]
        return JobView(
            job=job,
            ranks=ranks,
            launcher=shown_command(job.launcher_command, job.ranks[0].variables),
            progress=_telling(best, None) if best else None,
            log=best.file.path if best else "",
            log_why=(best.error if best else "its output goes to a pipe or a terminal, not to a file"),
            first_failure=next(filter(None, (log.first_failure() for log in logs)), ""),
            gpu_fault=next(filter(None, (log.gpu_fault for log in logs)), ""),
        )

    def _given_logs(self) -> list[OutputFile]:
        """The files that were named, each held open once it is there."""
        for path in self._log_paths:
            if path in self._given:
                continue
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                status = os.fstat(fd)
                if stat_module.S_ISREG(status.st_mode):
                    key = (status.st_dev, status.st_ino)
                    self._given[path] = OutputFile(os.getpid(), fd, str(path), key)
                else:
                    os.close(fd)
        return list(self._given.values())

    def _behind_pipes(self, job: Job) -> list[OutputFile]:
        """Files behind pipes are looked for once a job: it takes a scan of all processes."""
        key = (job.ranks[0].pid, job.ranks[0].start)
        if key not in self._piped:
            writers = [job.ranks[0].pid, *([job.launcher_pid] if job.launcher_pid is not None else [])]
            self._piped[key] = [file for pid in writers for file in files_behind_pipe(pid)]
        return self._piped[key]

    def _best(self, files: Iterable[OutputFile]) -> LogFollower | None:
        """The log that tells a step or a loss, else any."""
        logs = [self._logs[file.key] for file in files]
        telling = [
            log for log in logs if (p := _telling(log, None)) and (p.latest.step or p.latest.loss is not None)
        ]
        return next(iter(telling or logs), None)

    def _rank(
        self,
        rank: Rank,
        files: Sequence[OutputFile],
        gpus: Sequence[GpuSample],
        seen: dict[tuple[int, int], _Seen],
    ) -> RankView:
        stat = procs.read_stat(rank.pid)
        counters = procs.read_counters(rank.pid)
        family = procs.descendants(rank.pid)
        now = time.monotonic()
        key = (rank.pid, rank.start)
        cpu = read = written = None
        if stat is not None:
            seen[key] = _Seen(now, stat.cpu_s, counters.read_bytes, counters.write_bytes)
            before = self._seen.get(key)
            if before is not None and now > before.t:
                span = now - before.t
                cpu = max(0.0, 100.0 * (stat.cpu_s - before.cpu_s) / span)
                read = max(0.0, (counters.read_bytes - before.read_bytes) / span)
                written = max(0.0, (counters.write_bytes - before.write_bytes) / span)
        where = gpu_of_rank(rank.variables, gpus, local_rank=rank.local_rank) if gpus else None
        gpu = next((gpu for gpu in gpus if where and gpu.uuid and gpu.uuid == where.uuid), None)
        log = self._best(files)
        return RankView(
            rank=rank.rank,
            local_rank=rank.local_rank,
            pid=rank.pid,
            host=self._host,
            command=shown_command(rank.command, rank.variables),
            state=stat.state if stat is not None else "X",
            rss=stat.rss if stat is not None else 0,
            cpu=cpu,
            read_bytes_s=read,
            write_bytes_s=written,
            threads=stat.threads if stat is not None else 0,
            descendants=tuple(family),
            gpu=gpu,
            gpu_why=where.why if where else "",
            progress=_telling(log, rank.rank) if log else None,
            log=log.file.path if log else "",
        )


def _telling(log: LogFollower, rank: int | None) -> ProgressFollower | None:
    """The follower that knows something: of this rank, of the job, of its lowest rank."""
    if rank is not None and rank in log.ranks:
        return log.ranks[rank]
    if log.whole.latest.source or not log.ranks:
        return log.whole
    return log.ranks[min(log.ranks)]


def _unique(files: Iterable[OutputFile]) -> list[OutputFile]:
    found: dict[tuple[int, int], OutputFile] = {}
    for file in files:
        found.setdefault(file.key, file)
    return list(found.values())
