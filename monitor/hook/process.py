"""What opens a rank's process to diagnosis: stack dumps on a signal, ptrace by its user, torch's server."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
from pathlib import Path
from typing import IO, Any

from ftdash.monitor.sockets import short_path

WORKER_SERVER_ENV = "FTDASH_WORKER_SERVER"  # "0": no debug server of torch, which tells the flight recorder
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_served = 0  # the process whose flight recorder is told: a forked child is another one


def dump_stacks_on_signal(path: Path) -> IO[str] | None:
    """Let SIGUSR2 append the stacks of all threads to `path`; None where that cannot be had.

    The returned file must stay open for as long as the handler is registered.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = open(path, "a", encoding="utf-8")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=handle, all_threads=True)
    except (OSError, RuntimeError, ValueError):
        return None
    return handle


def forget_stack_dumps(handle: IO[str] | None) -> None:
    """Take the handler away and ignore the signal, which would else kill an interpreter shutting down."""
    if handle is not None:
        with contextlib.suppress(Exception):
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        handle.close()


def allow_ptrace() -> None:
    """Let processes of the same user attach where Yama would refuse; without Yama the kernel says EINVAL."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def own_rank() -> int:
    """RANK, else what the default process group says: ranks of `spawn` are told theirs as an argument."""
    if (said := os.environ.get("RANK", "")).isdigit():
        return int(said)
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        return dist.get_rank() if dist.is_initialized() else 0
    return 0


def collective_timeout_s() -> float:
    """How long a collective of the default process group may take, seconds; 0 where torch does not say."""
    with contextlib.suppress(Exception):
        from torch.distributed import group

        world: Any = group.WORLD
        timeouts = [world._get_backend(device).options._timeout for device in world._device_types]
        return min(timeout.total_seconds() for timeout in timeouts)
    return 0.0


def serve_flight_recorder(folder: Path, rank: int) -> bool:
    """Have torch's debug server tell this process's flight recorder on `folder`/rank-<R>.sock, to its end.

    False where torch has no such server, where FTDASH_WORKER_SERVER is "0", or where another living process
    serves the rank: its parent, say.
    """
    global _served
    if _served == os.getpid():
        return True
    path = folder / f"rank-{rank}.sock"
    if os.environ.get(WORKER_SERVER_ENV) == "0" or _answers(path):
        return False
    server = start_worker_server(path)
    if server is None:
        return False
    # Never taken down: a forked child that ends would wait for a thread that it does not have.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    _served = os.getpid()
    return True


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), short_path(path) as short, socket.socket(socket.AF_UNIX) as probe:
        probe.connect(short)
        return True
    return False


def start_worker_server(path: Path) -> object | None:
    """Torch's debug HTTP server on a unix socket; private API, so None when anything about it has changed."""
    try:
        import torch.distributed.debug._handlers  # noqa: F401
        from torch._C._distributed_c10d import _WorkerServer

        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with short_path(path) as short:
            return _WorkerServer(short, -1)
    except Exception:
        return None
