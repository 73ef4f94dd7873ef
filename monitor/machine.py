"""What this machine offers to training and to ftdash, and what is wrong with it."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.alerts_gpu import gpu_alerts
from ftdash.monitor.diagnosis import permission
from ftdash.monitor.diagnosis.collect import pyspy_path
from ftdash.monitor.nvml.mapping import hidden_processes
from ftdash.monitor.nvml.shown import gpu_state
from ftdash.monitor.records import GpuSample
from ftdash.monitor.rundir import RUN_DIR_ENV, Manifest, RunError, list_runs, runs_root
from ftdash.monitor.state import RunPhase, RunState
from ftdash.monitor.wording import gib

# Versions seen working together (the repository's constraints.txt; a test keeps the two alike).
TRIED = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "datasets": "5.2.0",
    "py-spy": "0.4.3",
    "nvidia-ml-py": "13.615.71",
    "textual": "8.2.8",
}
TRAINING = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")

SHM_BYTES = 1 << 30  # loader workers and NCCL share memory there; Docker's default is 64 MiB
MEMLOCK_BYTES = 64 << 20  # RDMA registers (locks) its buffers
FILES = 4096  # descriptors: one a rank file, loader worker and socket
LOOKED_AT_RUNS = 100
PYSPY_S = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know about this machine. `severity`: error, warning, note. `fix` may be empty."""

    code: str
    severity: str
    where: str
    text: str
    fix: str = ""


def look_around(gpus: Sequence[GpuSample], gpu_reason: str, driver: str) -> list[Finding]:
    """Everything, errors first. Takes a few tens of milliseconds and loads no training library."""
    found = [
        *_gpus(gpus, gpu_reason, driver),
        *_pyspy(),
        *_shared_memory(),
        *_limits(),
        *_processors(),
        *_clock(),
        *_runs_folder(),
        *_versions(),
        *_slurm(),
        *_stale_runs(),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _gpus(gpus: Sequence[GpuSample], reason: str, driver: str) -> Iterator[Finding]:
    if not gpus:
        yield Finding("no-gpu", "note", "NVML", reason)
        return
    yield Finding("driver", "note", "NVML", driver)
    states = tuple(gpu_state(gpu, socket.gethostname()) for gpu in gpus)
    state = RunState("", "", Manifest(run=""), RunPhase.RUNNING, time.time(), gpus=states)
    for alert in gpu_alerts(state, None, None):
        yield Finding(alert.code, alert.severity, "NVML", alert.text)
    if len({gpu.name for gpu in gpus if gpu.name and gpu.mig_index is None}) > 1 and (
        os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        yield Finding(
            "gpu-order",
            "warning",
            "CUDA_DEVICE_ORDER",
            "GPUs of different kinds: CUDA counts the fastest first, nvidia-smi by bus",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    if any(gpu.unified for gpu in gpus):
        yield Finding(
            "gpu-unified", "note", "NVML", "GPU memory is shared with the CPU: memory n/a (unified)"
        )
    if hidden := hidden_processes(gpus):
        yield Finding("gpu-pids-hidden", "note", "NVML", hidden)


def _pyspy() -> Iterator[Finding]:
    """Tries py-spy on this very process: it is no child of py-spy, as a rank is none."""
    tool = pyspy_path()
    if tool is None:
        yield Finding("pyspy-missing", "warning", "py-spy", "py-spy is not installed", "pip install py-spy")
        return
    environ = {key: value for key, value in os.environ.items() if key != "RUST_BACKTRACE"}
    command = [tool, "dump", "--nonblocking", "--json", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PYSPY_S, env=environ)
    except subprocess.TimeoutExpired:
        yield Finding("pyspy-slow", "warning", "py-spy", f"py-spy gave no stack within {PYSPY_S:.0f} s")
        return
    except OSError as error:
        yield Finding("pyspy-broken", "warning", tool, f"py-spy does not start: {error.strerror}")
        return
    version = _version("py-spy") or ""
    if done.returncode == 0:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        yield Finding("pyspy", "note", "py-spy", f"py-spy {version} reads stacks of Python {python} here")
        return
    failure = permission.explain(os.getpid(), done.stderr, version)
    yield Finding(
        "stacks-denied", "warning", "ptrace", f"stacks cannot be read: {failure.text}", failure.remedy
    )


def _shared_memory() -> Iterator[Finding]:
    usage = _usage(Path("/dev/shm"))
    if usage is None:
        yield Finding(
            "shm", "warning", "/dev/shm", "there is no /dev/shm: loader workers cannot share batches"
        )
        return
    free, total = usage
    if total < SHM_BYTES:
        fix = "docker run --ipc=host, or --shm-size=16g"
        text = f"{gib(total)} only: loader workers and NCCL die with a bus error when it is full"
        yield Finding("shm", "warning", "/dev/shm", text, fix)
    elif free < 0.1 * total:
        yield Finding("shm", "warning", "/dev/shm", f"{gib(free)} free of {gib(total)}", "ls -l /dev/shm")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < MEMLOCK_BYTES:
        severity = "warning" if os.path.isdir("/sys/class/infiniband") else "note"
        text = f"{gib(soft)} of memory may be locked: RDMA and pinned offload need more"
        yield Finding("ulimit-memlock", severity, "ulimit -l", text, "ulimit -l unlimited")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        enough = hard == resource.RLIM_INFINITY or hard >= FILES
        fix = (
            f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else hard}"
            if enough
            else "ask for a larger limit"
        )
        yield Finding("ulimit-files", "warning", "ulimit -n", f"{soft} open files at most", fix)


def _processors() -> Iterator[Finding]:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if allowed < present:
        severity = "warning" if allowed == 1 else "note"
        fix = (
            "srun --cpus-per-task=N, as sbatch's own value is not passed on"
            if "SLURM_JOB_ID" in os.environ
            else ""
        )
        yield Finding(
            "cpu-affinity",
            severity,
            "sched_getaffinity",
            f"{allowed} of {present} processors may be used",
            fix,
        )


class _Timex(ctypes.Structure):
    """struct timex (adjtimex(2)); only its size and that `modes` is zero matter here."""

    _fields_ = [("modes", ctypes.c_uint), ("rest", ctypes.c_ubyte * 252)]


def clock_synchronised() -> bool | None:
    """What the kernel says of its clock; None when it does not say."""
    try:
        libc = ctypes.CDLL(None)
        code = libc.adjtimex(ctypes.byref(_Timex()))
    except (OSError, AttributeError):
        return None
    return None if code < 0 else code != 5  # TIME_ERROR: not synchronised


def _clock() -> Iterator[Finding]:
    if clock_synchronised() is False:
        text = "the clock is not synchronised: events of several nodes cannot be put in order"
        yield Finding("clock", "note", "adjtimex", text, "start chrony or systemd-timesyncd")


def _runs_folder() -> Iterator[Finding]:
    root = runs_root()
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("runs-folder", "error", str(root), "cannot be written", "export FTDASH_HOME=DIR")
        return
    usage = _usage(place)
    if usage is not None and (usage[0] < 1 << 30 or usage[0] < 0.03 * usage[1]):
        yield Finding("disk", "warning", str(root), f"{gib(usage[0])} free of {gib(usage[1])} for runs")


def _usage(path: Path) -> tuple[int, int] | None:
    """Bytes free and in all on the file system of `path`."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return None
    return usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    installed = {name: _version(name) for name in TRIED}
    missing = [name for name in TRAINING if installed[name] is None]
    if missing:
        fix = "pip install 'ftdash[train]'"
        yield Finding("no-training", "note", "packages", f"not installed: {', '.join(missing)}", fix)
    for name, tried in TRIED.items():
        version = installed[name]
        if version is not None and version.partition("+")[0] != tried:
            yield Finding("version", "note", name, f"{version} is installed, {tried} was tried")


def _slurm() -> Iterator[Finding]:
    if job := os.environ.get("SLURM_JOB_ID"):
        yield Finding("slurm", "note", "Slurm", f"inside job {job}")
    elif shutil.which("sbatch"):
        yield Finding("slurm", "note", "Slurm", "this is a host from which jobs can be submitted")


def _stale_runs() -> Iterator[Finding]:
    """Runs of this host that are stored as running while no process of theirs lives."""
    try:
        runs = list_runs()[-LOOKED_AT_RUNS:]
    except RunError:
        return
    host = socket.gethostname()
    open_runs = []
    for run in runs:
        try:
            manifest = run.read_manifest()
        except RunError as error:
            yield Finding("run-broken", "warning", run.run_id, str(error))
            continue
        if manifest.state in ("starting", "running") and manifest.hosts in ([], [host]):
            open_runs.append(run)
    if not open_runs:
        return
    living = {procs.environ(pid).get(RUN_DIR_ENV) for pid in procs.all_pids()}
    for run in open_runs:
        if str(run.path) not in living and str(run.path.resolve()) not in living:
            text = "stored as running, but no process of it lives on this machine"
            yield Finding("run-stale", "warning", run.run_id, text, f"ftdash stop {run.run_id}")
