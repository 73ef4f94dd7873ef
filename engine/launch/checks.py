"""What must hold before any process of a run is started; each check raises LaunchError in one line."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ftdash.engine.launch.spec import Device, LaunchError

FREE_BYTES = 64 << 20  # logs and telemetry of a short run, with room for the files of the launcher
PARSED_BYTES = 64 << 20  # of a data file; what comes after is left to the training script
STATIC_PORT = 29500  # torchrun's, accelerate's and deepspeed's default
STATIC_FLAG = "--master_port"
PORT_FLAGS = ("--master_port", "--master-port", "--main_process_port", "--main-process-port")
_ENDPOINT_FLAGS = ("--rdzv_endpoint", "--rdzv-endpoint")
_FREEPORT_FLAGS = ("--standalone",)
_LAUNCHERS = re.compile(r"(?:^|/)(?:torchrun|accelerate|deepspeed)$|^torch\.distributed\.(?:run|launch)$")


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    messages: list[_Message]


def packages(names: Sequence[str]) -> None:
    """The training stack is an extra: a login node may not have it."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(f"{', '.join(missing)} not installed here: pip install 'ftdash[train]'")


def device(wanted: Device, ranks: int) -> str:
    """Says "cpu" or "cuda"; refuses more CUDA ranks than GPUs."""
    gpus = gpu_count()
    if wanted is Device.CPU or (wanted is Device.AUTO and not gpus):
        return "cpu"
    if not gpus:
        raise LaunchError("--device cuda: no NVIDIA GPU on this machine; use --device cpu or another backend")
    if ranks > gpus:
        raise LaunchError(f"--gpus {ranks}: this machine has {gpus}; use --gpus {gpus} or --device cpu")
    return "cuda"


def gpu_count() -> int:
    """GPUs that CUDA would show here: CUDA_VISIBLE_DEVICES over what the driver lists."""
    from ftdash.monitor.nvml import sample_gpus
    from ftdash.monitor.nvml.mapping import visible_devices

    found = sample_gpus()
    return len(visible_devices(os.environ, found)[0]) if found else 0


def data_rows(path: Path, ranks: int, flag: str = "--data") -> None:
    """The file is there, every line that is read parses, and no rank would be left without a row."""
    rows = 0
    decoder = msgspec.json.Decoder(_Row)
    try:
        with open(path, "rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.isspace():
                    continue
                try:
                    empty = not decoder.decode(line).messages
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise LaunchError(f"{flag} {path}: line {number}: {error}") from None
                if empty:
                    raise LaunchError(f"{flag} {path}: line {number}: no messages")
                rows += 1
                if handle.tell() > PARSED_BYTES and rows >= ranks:
                    return
    except OSError as error:
        raise LaunchError(f"{flag} {path}: {error.strerror or error}") from None
    if rows < ranks:
        raise LaunchError(f"{flag} {path}: {rows} rows for {ranks} ranks: every rank needs at least one")


def writable(path: Path, flag: str = "--out") -> None:
    """`path` is a folder one may write into, or can be made, and its disk is not full."""
    nearest = path
    while not nearest.exists():
        if nearest.parent == nearest:
            break
        nearest = nearest.parent
    if not nearest.is_dir():
        raise LaunchError(f"{flag} {path}: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise LaunchError(f"{flag} {path}: no permission to write to {nearest}")
    free = shutil.disk_usage(nearest).free
    if free < FREE_BYTES:
        raise LaunchError(
            f"{flag} {path}: the disk is full, {free >> 20} MiB left, {FREE_BYTES >> 20} needed"
        )


def executable(command: Sequence[str]) -> None:
    """The launcher's own program exists."""
    if not command[0] or shutil.which(command[0]) is None:
        raise LaunchError(f"-- {command[0] or repr('')}: no such program")


def port_is_free(port: int, flag: str) -> None:
    """Nobody listens on `port` here. Only a bind can tell; it is given back at once."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"{flag} {port}: a port is a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"{flag} {port}: the port is taken ({error.strerror}); name a free one"
            ) from None


def is_launcher(word: str) -> bool:
    """Whether this word of a command names a launcher: torchrun, accelerate, deepspeed or their modules."""
    return _LAUNCHERS.search(word) is not None


def rendezvous_port(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The port that this launcher command will listen on here, and the flag or variable that says so.

    None when it picks a free one itself, or when the command is no launcher that is known.
    """
    words = [word for raw in command for word in raw.split("=", 1)] if command else []
    if any(flag in words for flag in _FREEPORT_FLAGS):
        return None
    for flag, value in pairwise(words):
        if flag in PORT_FLAGS and value.isdigit():
            return (int(value), flag) if int(value) else None
        if flag in _ENDPOINT_FLAGS:
            host, _, port = value.rpartition(":")
            if port.isdigit() and int(port) and host in ("localhost", "127.0.0.1", socket.gethostname()):
                return int(port), flag
            return None
    if not any(map(is_launcher, command)):
        return None
    if (port := environ.get("PET_MASTER_PORT", "")).isdigit():
        return int(port), "PET_MASTER_PORT"
    return STATIC_PORT, STATIC_FLAG
