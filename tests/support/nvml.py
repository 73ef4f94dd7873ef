"""The NVML stand-in: compiled once a session, read through the real ctypes path in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "nvml" / "nvml_stub.c"

# Values that stand still, so that two readers see the same.
STEADY = """\
gpu * util_gpu 93
gpu * util_mem 41
gpu * mem_used_mib 61234
gpu * temp 63
gpu * power_w 612
gpu * clock_sm 1755
gpu * pcie_tx_kbs 4000000
gpu * pcie_rx_kbs 3000000
"""


def compile_stub(folder: Path) -> Path:
    """Build libnvidia-ml.so.1 in `folder`; returns the folder. Without a C compiler the test is skipped."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the NVML stand-in needs a C compiler (gcc or cc)")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    flags = ["-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]
    soname = "-Wl,-soname,libnvidia-ml.so.1"
    subprocess.run([compiler, *flags, soname, "-o", str(library), str(SOURCE), "-lm"], check=True)
    return folder


@dataclass
class Stub:
    """One state of the stand-in and the processes that look at it."""

    library: Path
    state: Path

    def set(self, text: str) -> None:
        """Replace the state file whole, as its readers expect."""
        fresh = self.state.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.state)

    def env(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_STUB_STATE": str(self.state),
            "NVML_STUB_POLL_MS": "1",
            **more,
        }

    def python(self, code: str, **env: str) -> Any:
        """Run Python code against the stand-in; what it prints is JSON."""
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.env(**env), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def sample(self, text: str, rounds: int = 1, **env: str) -> list[dict[str, Any]]:
        """The GPU samples of `rounds` samplings (the last one) with this state."""
        self.set(text)
        code = (
            "import msgspec, sys\n"
            "from ftdash.monitor.nvml.sampler import GpuSampler\n"
            "sampler = GpuSampler(deadline_s=2.0)\n"
            f"for _ in range({rounds}): samples = sampler.sample()\n"
            "sys.stdout.buffer.write(msgspec.json.encode(samples))\n"
        )
        found = self.python(code, **env)
        assert isinstance(found, list)
        return found
