"""Starts the training script for real, with configs small enough to read, and reads what it left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftdash.engine.configs.commands import own_path
from ftdash.monitor import records

STEPS = 4
BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "mixed_precision": "no",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "use_cpu": False,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A training command that has ended, and the folders it wrote."""

    code: int
    output: str
    run_dir: Path
    output_dir: Path

    def of_kind(self, rank: int, kind: type) -> list[Any]:
        lines = (self.run_dir / "telemetry" / f"rank-{rank}.jsonl").read_bytes().splitlines()
        found = [records.decoder.decode(line) for line in lines]
        return [record for record in found if isinstance(record, kind)]

    def meta(self, rank: int = 0) -> records.Meta:
        (meta,) = self.of_kind(rank, records.Meta)
        return meta

    def losses(self, rank: int = 0) -> list[float]:
        return [step.loss for step in self.of_kind(rank, records.Step)]


def accelerate_yaml(folder: Path, processes: int, **fields: Any) -> Path:
    """An accelerate config; `fsdp_config` and the like are given as fields, None leaves one out."""
    path = folder / "accelerate.yaml"
    config = {**BASE, "num_processes": processes, **fields}
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def script(*flags: str, output_dir: Path, model: str = "tiny-qwen3", steps: int = STEPS) -> list[str]:
    """The script's arguments, from `-m` on."""
    common = ["--device", "cpu", "--seq-len", "96", "--micro-batch", "2", "--log-steps", "2"]
    named = ["--model", model, "--steps", str(steps), "--output-dir", str(output_dir)]
    return ["-m", "ftdash.engine.train", *common, *named, *flags]


def accelerate(config: Path) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]


def torchrun(processes: int) -> list[str]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]


def run(launcher: list[str], arguments: list[str], folder: Path, timeout_s: float = 240) -> Finished:
    """Run to the end. The tiny models are kept between tests, below the temporary FTDASH_HOME."""
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    env = {**os.environ, "FTDASH_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1", "PATH": own_path(os.environ)}
    done = subprocess.run(
        launcher + arguments, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output_dir = Path(arguments[arguments.index("--output-dir") + 1])
    return Finished(done.returncode, done.stdout + done.stderr, run_dir, output_dir)
