"""`ftdash doctor`: what this machine offers, and what is wrong with it."""

from __future__ import annotations

import argparse
import platform
import socket
from typing import Any

import msgspec

from ftdash.monitor.machine import Finding, look_around
from ftdash.monitor.nvml import sample_gpus, sampler
from ftdash.monitor.records import GpuSample
from ftdash.monitor.wording import gib
from ftdash.tui.commands.run_json import print_json

_MARKS = {"error": "✗", "warning": "▲", "note": "·"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit status 0 whenever it could report, whatever it found."""
    gpus = sample_gpus()
    driver = f"driver {sampler().driver_version or '?'}, CUDA {sampler().cuda_version or '?'}"
    findings = look_around(gpus, sampler().reason, driver)
    if args.json:
        print_json(
            {
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "driver": sampler().driver_version,
                "cuda": sampler().cuda_version,
                "gpu_reason": sampler().reason,
                "gpus": [_gpu_json(gpu) for gpu in gpus],
                "findings": [msgspec.to_builtins(finding) for finding in findings],
            }
        )
    else:
        print("\n".join([*map(_gpu_line, gpus), *map(_finding_line, findings)]))
    return 0


def _gpu_json(gpu: GpuSample) -> dict[str, Any]:
    """All fields; null is what the driver does not say, and `unavailable` tells why."""
    fields = {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name not in ("t", "v")}
    fields["processes"] = msgspec.to_builtins(gpu.processes)
    return fields


def _gpu_line(gpu: GpuSample) -> str:
    name = f"GPU {gpu.index}" if gpu.mig_index is None else f"GPU {gpu.index} instance {gpu.mig_index}"
    if gpu.state == "lost":
        return f"{name}  LOST  {gpu.name}  {gpu.error}"
    if gpu.unified:
        shared = f", {gib(gpu.memory_available)} available" if gpu.memory_available is not None else ""
        memory = f"memory n/a (unified{shared})"
    elif gpu.memory_used is not None and gpu.memory_total is not None:
        memory = f"{gib(gpu.memory_used)} of {gib(gpu.memory_total)}"
    else:
        memory = "memory n/a"
    util = f"{gpu.util}%" if gpu.util is not None else "util n/a"
    power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else "power n/a"
    error = f"  {gpu.error}" if gpu.error else ""
    return f"{name}  {gpu.state}  {gpu.name}  {memory}  {util}  {power}{error}"


def _finding_line(finding: Finding) -> str:
    fix = f" → {finding.fix}" if finding.fix else ""
    return f"{_MARKS[finding.severity]} {finding.severity}: {finding.where}: {finding.text}{fix}"
