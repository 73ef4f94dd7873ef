"""Sampling 8 and 16 stand-in GPUs at 1 Hz: processor time of ours beside nvitop's, at the same moments."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.support.nvml import Stub, compile_stub

SECONDS = 20.0
WARM_S = 4.0

MOVING = """\
gpu * util_gpu noise:88:100:1
gpu * util_mem noise:40:70:1
gpu * mem_used_mib sin:60000:76000:30
gpu * temp sin:58:72:60
gpu * power_w noise:520:690:1
gpu * clock_sm noise:1700:1980:1
gpu * pcie_tx_kbs noise:1000000:9000000:1
gpu * nvlink_tx_mibs sin:20000:200000:10
gpu * proc self 30000 C sm=noise:40:99
"""

OURS = """
import time
from ftdash.monitor.nvml.sampler import GpuSampler
sampler = GpuSampler()
while True:
    assert sampler.sample()
    time.sleep(1.0)
"""

THEIR_API = """
import time
from nvitop import Device
devices = Device.all()
while True:
    for device in devices:
        device.as_snapshot(); device.processes()
    time.sleep(1.0)
"""


class Watched:
    """A process whose processor time and memory are read from outside, so that all pay the same."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process
        self._then = 0.0

    def mark(self) -> None:
        self._then = self._cpu_s()

    def report(self, seconds: float) -> str:
        cpu = (self._cpu_s() - self._then) / seconds
        memory = psutil.Process(self.process.pid).memory_info().rss / 2**20
        return f"{self.name:<28} {60 * cpu:6.3f} CPU s a minute ({cpu:5.2%} of a core)  {memory:5.1f} MiB"

    def _cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def in_terminal(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a full-screen program in a pseudo-terminal whose output is thrown away."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**env, "TERM": "xterm-256color", "LINES": "60", "COLUMNS": "200"},
        start_new_session=True,
    )
    os.close(follower)

    def drain() -> None:
        try:
            while os.read(leader, 65536):
                pass
        except OSError:
            os.close(leader)

    threading.Thread(target=drain, daemon=True).start()
    return process


def measure(stub: Stub, gpus: int) -> list[str]:
    """One line for each program, all run at the same time."""
    stub.set(f"gpus {gpus}\n{MOVING}")
    env = stub.env(NVML_STUB_POLL_MS="50")
    nvitop = str(Path(sys.executable).parent / "nvitop")
    watched = [
        Watched("ftdash sampler, 1 Hz", subprocess.Popen([sys.executable, "-c", OURS], env=env)),
        Watched("nvitop API, 1 Hz", subprocess.Popen([sys.executable, "-c", THEIR_API], env=env)),
        Watched("nvitop screen, 1 s", in_terminal([sys.executable, nvitop, "--interval", "1"], env)),
    ]
    try:
        time.sleep(WARM_S)
        for entry in watched:
            entry.mark()
        time.sleep(SECONDS)
        return [entry.report(SECONDS) for entry in watched]
    finally:
        for entry in watched:
            entry.process.terminate()
            entry.process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = compile_stub(Path(folder) / "lib")
        for gpus in (8, 16):
            print(f"  {gpus} GPUs")
            for line in measure(Stub(library, Path(folder) / "state"), gpus):
                print(f"    {line}")


if __name__ == "__main__":
    main()
