"""All GPUs of this machine, sampled so that one slow, hanging or lost GPU costs the others nothing."""

from __future__ import annotations

import threading
import time

import msgspec

from ftdash.monitor.nvml.device import Device
from ftdash.monitor.nvml.library import Library
from ftdash.monitor.records import GpuSample

START_S = 2.0  # how long the first sample waits for NVML and for each GPU's first answer
DEADLINE_S = 0.5
SILENT_S = 10.0  # a GPU that has not answered for this long is in error, not merely slow


class GpuSampler:
    """Samples every GPU; `reason` says in one sentence why there is none.

    Each GPU is read in a thread of its own: `sample()` returns within `deadline_s`, and a GPU that has
    not answered by then is shown with its last values, their own time `t`, and an `error` that says so.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._library = Library()
        self._workers: list[_Worker] = []

    @property
    def reason(self) -> str:
        return self._library.reason

    @property
    def driver_version(self) -> str:
        return self._library.driver_version

    @property
    def cuda_version(self) -> str:
        """The newest CUDA that the driver supports, such as "12.8"; empty when unknown."""
        return self._library.cuda_version

    def sample(self) -> list[GpuSample]:
        """One sample a GPU and MIG instance, in driver order; empty without a driver (see `reason`)."""
        first = not self._workers
        deadline_s = max(START_S, self.deadline_s) if first else self.deadline_s
        until = time.monotonic() + deadline_s
        if not self._library.start(deadline_s):
            return []
        if first:
            self._workers = [_Worker(index) for index in range(self._library.device_count)]
        for worker in self._workers:
            worker.ask()
        samples: list[GpuSample] = []
        for worker in self._workers:
            samples.extend(worker.answer(until))
        return samples

    def close(self) -> None:
        """Let the threads end. NVML stays loaded: it is shared by the whole process."""
        for worker in self._workers:
            worker.stop()
        self._workers = []


class _Worker:
    """Reads one device when asked. A call that hangs in the driver holds only this thread."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = Device(index)
        self._go = threading.Event()
        self._done = threading.Event()
        self._done.set()
        self._asked_at = 0.0
        self._samples: list[GpuSample] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=f"nvml-gpu-{index}", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        if self._done.is_set():
            self._done.clear()
            self._asked_at = time.monotonic()
            self._go.set()

    def answer(self, until: float) -> list[GpuSample]:
        if self._done.wait(max(0.0, until - time.monotonic())):
            return self._samples
        late_s = time.monotonic() - self._asked_at
        text = f"driver has not answered for {late_s:.1f} s"
        if not self._samples:
            return [GpuSample(t=time.time(), index=self._index, state="error", error=text)]
        state = "error" if late_s > SILENT_S else None
        return [
            msgspec.structs.replace(sample, error=f"{text}: older values", state=state or sample.state)
            for sample in self._samples
        ]

    def stop(self) -> None:
        self._stopped = True
        self._go.set()

    def _work(self) -> None:
        while True:
            self._go.wait()
            self._go.clear()
            if self._stopped:
                return
            try:
                self._samples = self._device.read()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self._samples = [GpuSample(t=time.time(), index=self._index, state="error", error=text)]
            self._done.set()
