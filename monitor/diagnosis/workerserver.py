"""What a rank's own worker server of torch.distributed tells: flight recorder, stacks without ptrace.

A job has one where its script runs under `torch.distributed.elastic.control_plane.worker_main` (the socket
is then named by TORCH_WORKER_SERVER_SOCKET), or where ftdash launched it.
It answers from a thread of its own, also while the main thread is blocked.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.flight import FlightError, read_dump
from ftdash.monitor.diagnosis.model import FlightDump
from ftdash.monitor.rundir import RUN_DIR_ENV
from ftdash.monitor.sockets import short_path

SOCKET_ENV = "TORCH_WORKER_SERVER_SOCKET"
_TIMEOUT_S = 2.0
_MOST_BYTES = 64 << 20
_AT_ONCE = 8


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_TIMEOUT_S)
        with short_path(Path(self._path)) as short:
            self.sock.connect(short)


def socket_of(pid: int, rank: int | None) -> str:
    """Where the process's server listens, "" when it has none. Only a socket of its own user counts."""
    environ = procfs.environment(pid)
    paths = [environ.get(SOCKET_ENV, "")]
    if (run_dir := environ.get(RUN_DIR_ENV)) and rank is not None:
        paths.append(str(Path(run_dir) / "control" / f"rank-{rank}.sock"))
    for path in filter(None, paths):
        try:
            if Path(path).is_socket() and Path(path).stat().st_uid == procfs.uid_of(pid):
                return path
        except OSError:
            continue
    return ""


def ask(path: str, handler: str) -> bytes:
    """The answer of one handler. Raises OSError when there is none."""
    connection = _UnixConnection(path)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        data = answer.read(_MOST_BYTES)
        if answer.status != 200:
            raise OSError(f"{handler}: status {answer.status}")
        return data
    except http.client.HTTPException as error:
        raise OSError(f"{handler}: {error}") from None
    finally:
        connection.close()


def flight_dumps(ranks: Sequence[tuple[int, int]]) -> tuple[FlightDump, ...]:
    """The flight recorders of (rank, pid), of those that have a server and answer."""

    def one(item: tuple[int, int]) -> FlightDump | None:
        rank, pid = item
        if not (path := socket_of(pid, rank)):
            return None
        try:
            return read_dump(msgspec.json.decode(ask(path, "fr_trace_json")), rank)
        except (OSError, FlightError, msgspec.DecodeError, RecursionError):
            return None

    if not ranks:
        return ()
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks))) as pool:
        return tuple(dump for dump in pool.map(one, ranks) if dump is not None)


def stacks(pid: int, rank: int | None) -> str:
    """The stacks of all threads as text, "" where they cannot be had."""
    if not (path := socket_of(pid, rank)):
        return ""
    try:
        return ask(path, "dump_traceback").decode("utf-8", "replace")
    except OSError:
        return ""
