"""What the NVML library itself says: whether it can be loaded, its versions, and how one call may fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

NEVER = float("inf")
ASK_AGAIN_S = 60.0  # a call that was not supported or not permitted is tried again this much later
RETRY_INIT_S = 30.0


class DeviceLost(Exception):
    """The driver says that this GPU is gone: its handle must not be used again."""


def nvml() -> Any:
    """The pynvml module, loaded on first use (30 ms)."""
    import pynvml

    return pynvml


def reason_sentence(error: Exception) -> str:
    """Why NVML cannot be used, as one sentence for a person."""
    lib = nvml()
    code = getattr(error, "value", None)
    if code == lib.NVML_ERROR_LIBRARY_NOT_FOUND:
        if os.path.exists("/dev/kfd"):
            return "no NVIDIA driver library here; an AMD GPU is present, which NVML cannot read"
        return "no NVIDIA driver library (libnvidia-ml.so.1) on this machine"
    if code == lib.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA kernel driver is not loaded on this machine"
    if code == lib.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "NVIDIA library and kernel driver differ in version: the driver was updated; reboot"
    if code == lib.NVML_ERROR_NO_PERMISSION:
        return "no permission to open the NVIDIA devices (/dev/nvidiactl)"
    if code == lib.NVML_ERROR_FUNCTION_NOT_FOUND:
        return "the NVIDIA driver library is too old or incomplete: it has no nvmlInit"
    return f"NVML does not start: {error}"


class Library:
    """Starts NVML once, in a thread of its own so that a busy driver cannot block the caller."""

    def __init__(self) -> None:
        self.reason = "NVML is not started yet"
        self.driver_version = ""
        self.cuda_version = ""
        self.device_count = 0
        self.ready = False
        self._thread: threading.Thread | None = None
        self._failed_at: float | None = None

    def start(self, deadline_s: float) -> bool:
        """True once NVML answers; otherwise False and `reason` says why, after at most `deadline_s`."""
        if self.ready:
            return True
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_INIT_S:
            return False
        if self._thread is None:
            self.reason = "NVML is still starting"
            self._failed_at = None
            self._thread = threading.Thread(target=self._start, name="nvml-init", daemon=True)
            self._thread.start()
        self._thread.join(deadline_s)
        if not self._thread.is_alive():
            self._thread = None
        return self.ready

    def _start(self) -> None:
        try:
            lib = nvml()
        except ImportError:
            self._fail("the Python package nvidia-ml-py is not installed")
            return
        try:
            lib.nvmlInit()
            self.device_count = lib.nvmlDeviceGetCount()
        except lib.NVMLError as error:
            self._fail(reason_sentence(error))
            return
        self.driver_version = _quiet(lib.nvmlSystemGetDriverVersion, "")
        cuda = _quiet(lib.nvmlSystemGetCudaDriverVersion_v2, 0)
        self.cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        self.reason = "" if self.device_count else "the NVIDIA driver is loaded but shows no GPU"
        self.ready = True

    def _fail(self, reason: str) -> None:
        self._failed_at = time.monotonic()
        self.reason = reason


def _quiet(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except nvml().NVMLError:
        return otherwise


class Calls:
    """The calls to one device: each is probed for itself, and what cannot be had is not asked every time.

    `unavailable` maps a field to why it is missing. An error that may pass (unknown, timeout, in use)
    loses only this one value; DeviceLost is raised when the driver says that the GPU is gone.
    """

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}
        self.failed = 0  # calls of this round that failed with an error that may pass
        self.answered = 0
        self.last_error = ""
        self._silent_until: dict[str, float] = {}

    def begin(self) -> None:
        self.failed = self.answered = 0
        self.last_error = ""

    def ask(self, field: str, function: Callable[..., T], *args: Any) -> T | None:
        """The value of `function(*args)`, or None with the reason noted under `field`."""
        until = self._silent_until.get(field)
        if until is not None and time.monotonic() < until:
            return None
        lib = nvml()
        try:
            value = function(*args)
        except lib.NVMLError as error:
            self._note(field, error)
            return None
        self.answered += 1
        if until is not None or field in self.unavailable:
            self._silent_until.pop(field, None)
            self.unavailable.pop(field, None)
        return value

    def _note(self, field: str, error: Any) -> None:
        lib = nvml()
        code = error.value
        if code in (lib.NVML_ERROR_GPU_IS_LOST, lib.NVML_ERROR_RESET_REQUIRED):
            raise DeviceLost(str(error)) from None
        if code == lib.NVML_ERROR_FUNCTION_NOT_FOUND:
            self.unavailable[field] = "not in this driver"
            self._silent_until[field] = NEVER
        elif code == lib.NVML_ERROR_NOT_SUPPORTED:
            self.unavailable[field] = "not supported"
            self._silent_until[field] = time.monotonic() + ASK_AGAIN_S
        elif code == lib.NVML_ERROR_NO_PERMISSION:
            self.unavailable[field] = "no permission"
            self._silent_until[field] = time.monotonic() + ASK_AGAIN_S
        else:
            self.failed += 1
            self.last_error = str(error)
            self.unavailable[field] = str(error)
