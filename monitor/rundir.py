"""The run directory: the one contract between launcher, ranks, agents and screens.

    $FTDASH_HOME/runs/<run-id>/        0700
        run.json                       manifest, replaced atomically
        config/                        what was generated for this run
        logs/                          stdout and stderr of launcher and ranks
        telemetry/rank-<R>.jsonl       records of that rank's hook
        telemetry/rank-<R>.beat        that rank's last sign of progress (64 bytes, mapped)
        telemetry/node-<host>.jsonl    records of that node's agent
        stacks/<time>/rank-<R>.json    stack dumps
        flight/                        flight recorder dumps
        control/                       requests to agents, one file each

One writer a file. A file is append-only or replaced whole; a reader survives a half-written last
line, a missing file and a truncated one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftdash.monitor.home import home
from ftdash.monitor.records import FORMAT_VERSION

T = TypeVar("T")

RUN_DIR_ENV = "FTDASH_RUN_DIR"
NODES_ENV = "FTDASH_NODES"  # how many nodes the run has, told to their agents

# Environment values that may be stored: nothing else of a user's environment reaches the disk.
ENV_ALLOWED = re.compile(
    r"^(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|NVIDIA_VISIBLE_DEVICES"
    r"|WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|TORCH_DISTRIBUTED_DEBUG|TORCH_NCCL_[A-Z_]+|TORCH_FR_[A-Z_]+"
    r"|NCCL_[A-Z0-9_]+|ACCELERATE_[A-Z_]+|FSDP_[A-Z_]+|SLURM_JOB_ID|SLURM_NNODES"
    r"|SLURM_PROCID|SLURM_NODEID|SLURM_JOB_NODELIST|SLURMD_NODENAME)$"
)
ENV_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


class RunError(Exception):
    """A run cannot be read or written; the text is one line for a person."""


class RankExit(msgspec.Struct, omit_defaults=True):
    """How one rank's process, or the launcher, ended. `code` is negative for a signal."""

    rank: int | None
    code: int
    t: float
    host: str = ""


STATES = ("starting", "running", "finished", "failed", "stopped")


class Manifest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """run.json. `state`: starting, running, finished, failed, stopped (stalled is derived by readers)."""

    run: str
    v: int = FORMAT_VERSION
    created: float = 0.0
    name: str = ""
    command: list[str] = []
    backend: str = "local"
    attached: bool = False  # somebody else's job: watched, never ended from here
    state: str = "starting"
    world_size: int = 1
    hosts: list[str] = []
    plan: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    env: dict[str, str] = {}
    launcher_pid: int = 0
    agent_pids: dict[str, int] = {}
    exit_code: int | None = None
    exits: list[RankExit] = []
    first_failing_rank: int | None = None
    reason: str = ""  # one line: why it failed or was stopped
    started: float = 0.0
    ended: float = 0.0
    slurm_job_id: str = ""
    output_dir: str = ""
    directory: str = ""  # where a launcher command of somebody's own was started, "" for a plan
    max_steps: int = 0


def runs_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of runs by its real path: a run's processes are known by the path in their environment."""
    return Path(os.path.realpath(root or home() / "runs"))


def safe_name(text: str, limit: int = 40) -> str:
    """Text made fit for a file name: letters, digits, dot, dash; never empty, never hidden."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
    return cleaned[:limit].rstrip("-.") or "run"


def new_run_id(name: str) -> str:
    """A run id that sorts by time, such as 20261129-141502-tiny-moe-3f2a."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{safe_name(name)}-{secrets.token_hex(2)}"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` with `data` in one step: a reader sees the old file or the new one, never a part.

    Raises OSError that names `path`, also where it is the writing that fails.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def decode_json(data: bytes, kind: type[T]) -> T:
    """The value of type `kind` in a file. Raises msgspec.DecodeError for all that is none, also where
    it is nested so deeply that it cannot be read."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


class RunDir:
    """The paths of one run, and its manifest."""

    FOLDERS = ("config", "logs", "telemetry", "stacks", "flight", "control")

    def __init__(self, path: str | os.PathLike[str], node_rank: int = 0) -> None:
        """`node_rank` tells the files of one node's launcher and agent from those of the others."""
        self.path = Path(path)
        self._node = f"-{node_rank}" if node_rank else ""

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def manifest_path(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @property
    def flight(self) -> Path:
        return self.path / "flight"

    @property
    def control(self) -> Path:
        return self.path / "control"

    def rank_file(self, rank: int) -> Path:
        return self.telemetry / f"rank-{rank}.jsonl"

    def beat_file(self, rank: int) -> Path:
        return self.telemetry / f"rank-{rank}.beat"

    @property
    def exit_marker(self) -> Path:
        """The launcher's exit status as a number, written even when no agent is left to see it."""
        return self.logs / f"launcher{self._node}.exit"

    @property
    def launcher_log(self) -> Path:
        return self.logs / f"launcher{self._node}.log"

    @property
    def agent_log(self) -> Path:
        return self.logs / f"agent{self._node}.log"

    def rank_log(self, rank: int, stream: str = "stdout") -> Path:
        """A link that the agent makes to where this rank's `stdout` or `stderr` goes."""
        return self.logs / f"rank-{rank}.{stream}.log"

    def check_owner(self) -> None:
        """Raises RunError unless the directory is there and ours: a foreign one is not to be trusted."""
        try:
            owner = self.path.stat().st_uid
        except OSError as error:
            raise RunError(f"cannot read run directory {self.path}: {error.strerror or error}") from error
        if owner != os.getuid():
            raise RunError(
                f"run directory {self.path} belongs to another user (uid {owner}): only its owner may open it"
            )

    def node_file(self, host: str) -> Path:
        return self.telemetry / f"node-{safe_name(host, 80)}.jsonl"

    @classmethod
    def create(cls, manifest: Manifest, root: str | os.PathLike[str] | None = None) -> RunDir:
        """Make the folders of a new run and write its manifest. Raises RunError in one line."""
        base = runs_root(root)
        run = cls(base / manifest.run)
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            run.path.mkdir(mode=0o700)
            for folder in cls.FOLDERS:
                (run.path / folder).mkdir(mode=0o700)
            run.write_manifest(manifest)
        except OSError as error:
            raise RunError(f"cannot create run directory {run.path}: {error.strerror or error}") from error
        return run

    def write_manifest(self, manifest: Manifest) -> None:
        write_atomic(self.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def read_manifest(self) -> Manifest:
        """Raises RunError, naming the file, when it is missing, broken or not ours to read."""
        try:
            manifest = decode_json(self.manifest_path.read_bytes(), Manifest)
        except FileNotFoundError:
            raise RunError(f"no run.json in {self.path}: not a run directory") from None
        except OSError as error:
            raise RunError(f"cannot read {self.manifest_path}: {error.strerror or error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{self.manifest_path} is broken: {error}") from None
        if manifest.state not in STATES:
            raise RunError(f"{self.manifest_path} is broken: state {manifest.state[:40]!r}")
        return manifest


def find_run(name: str, root: str | os.PathLike[str] | None = None) -> RunDir:
    """A run by directory, id, unique prefix or part of its id, or "last". Raises RunError in one line."""
    if name not in ("", "last") and (Path(name) / "run.json").is_file():
        return RunDir(os.path.realpath(name))
    runs = list_runs(root)
    if not runs:
        raise RunError(f"no runs in {runs_root(root)}")
    if name in ("", "last"):
        return runs[-1]
    exact = [run for run in runs if run.run_id == name]
    matches = (
        exact or [run for run in runs if run.run_id.startswith(name)] or [r for r in runs if name in r.run_id]
    )
    if not matches:
        raise RunError(f"no run named {name!r} in {runs_root(root)}")
    if len(matches) > 1:
        raise RunError(
            f"{name!r} names {len(matches)} runs, the newest {matches[-1].run_id}: say more of the id"
        )
    return matches[0]


def list_runs(root: str | os.PathLike[str] | None = None, newest: int | None = None) -> list[RunDir]:
    """All runs, or the newest ones, oldest first; ids sort by time. A folder without run.json is no run."""
    base = runs_root(root)
    try:
        with os.scandir(base) as entries:
            names = sorted(
                (entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")),
                reverse=True,
            )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {base}: {error.strerror or error}") from error
    with_manifest = (name for name in names if os.path.isfile(f"{base}/{name}/run.json"))
    return [RunDir(base / name) for name in islice(with_manifest, newest)][::-1]


def stored_env(environ: dict[str, str]) -> dict[str, str]:
    """The part of an environment that may be written to disk (an allow-list)."""
    return {
        key: value
        for key, value in sorted(environ.items())
        if ENV_ALLOWED.match(key) and not ENV_SECRET.search(key)
    }
