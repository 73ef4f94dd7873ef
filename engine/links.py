"""Link rates that nccl-tests measured on this site's machines; they replace the planner's assumed ones.

The planner counts the bytes that each rank sends in a ring, so the tests run with NCCL_ALGO=Ring: with NVLink
SHARP the reported bus bandwidth is not what goes over the wire (NVIDIA/nccl-tests#212).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec

from ftdash.engine import hardware
from ftdash.monitor.home import home
from ftdash.monitor.rundir import decode_json, write_atomic

PROGRAM = "all_reduce_perf"
LEAST_BYTES = 64 << 20  # smaller messages are bound by latency
ARGUMENTS = ("-b", "64M", "-e", "1G", "-f", "2")
TIMEOUT_S = 600.0

# Host and product of a rank.
_DEVICE = re.compile(r"Rank\s+\d+ .*?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^]]*]\s+(.+)")
_PREFIX = re.compile(r"^\[[\d,]+\](?:<\w+>:?)?\s?")  # mpirun's mark of the rank that wrote a line
_CLEAN = frozenset(("0", "0e+00", "N/A"))


class LinksError(ValueError):
    """nccl-tests could not be run, or its output cannot be used; one line."""


class LinkRate(msgspec.Struct, frozen=True):
    """`bytes_per_s` in one direction for one GPU; over `network`, one GPU's share of its node's adapters."""

    gpu: str  # as in --gpu
    link: str  # nvlink, pcie or network
    bytes_per_s: float
    ranks: int
    ranks_per_node: int


class LinksFile(msgspec.Struct):
    """links.json."""

    links: list[LinkRate]


def links_path() -> Path:
    return home() / "links.json"


def rates_of(gpu: str) -> tuple[LinkRate, ...]:
    """All that was measured for this GPU. Read once a process and home.

    The planner asks for every plan, so that the path, which takes longer than a plan's sums, is not built
    again.
    """
    where = tuple(map(os.environ.get, ("FTDASH_HOME", "XDG_STATE_HOME", "HOME")))
    path = _paths.get(where)
    if path is None:
        path = _paths[where] = links_path()
    return tuple(rate for rate in _stored(path) if rate.gpu == gpu)


_paths: dict[tuple[str | None, ...], Path] = {}


@cache
def _stored(path: Path) -> tuple[LinkRate, ...]:
    try:
        return tuple(decode_json(path.read_bytes(), LinksFile).links)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ()


def save(rate: LinkRate) -> Path:
    """Store it in the place of an older one of the same GPU and link; returns where."""
    path = links_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = [old for old in _stored(path) if (old.gpu, old.link) != (rate.gpu, rate.link)]
    write_atomic(path, msgspec.json.format(msgspec.json.encode(LinksFile([*kept, rate])), indent=2))
    _stored.cache_clear()
    return path


def run(program: str, gpus: int) -> str:
    """The output of nccl-tests on `gpus` GPUs of this machine. Raises LinksError."""
    found = shutil.which(program)
    if found is None:
        raise LinksError(f"--nccl-tests {program}: no such program: build nccl-tests, or name its path")
    if gpus < 2:
        raise LinksError(f"--nccl-tests: {gpus} GPUs here, and a link needs two")
    try:
        done = subprocess.run(
            [found, *ARGUMENTS, "-g", str(gpus)],
            env={**os.environ, "NCCL_ALGO": "Ring"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise LinksError(f"--nccl-tests {program}: no end after {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise LinksError(f"--nccl-tests {program}: {error.strerror or error}") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise LinksError(f"--nccl-tests {program} ended with {done.returncode}: {words[-1] if words else ''}")
    return done.stdout


def parse(text: str, gpu: str | None = None) -> LinkRate:
    """The rate in the output of all_reduce_perf: the median bus bandwidth of its large messages.

    Bus bandwidth is what each rank of a ring sends a second (nccl-tests, doc/PERFORMANCE.md); units there are
    1e9 bytes. `gpu` names the GPU as a plan's --gpu does, for a product that the catalogue does not know.
    Raises LinksError.
    """
    from statistics import median

    hosts: list[str] = []
    products: list[str] = []
    rates: list[float] = []
    for line in text.splitlines():
        line = _PREFIX.sub("", line).strip()
        if device := _DEVICE.search(line):
            hosts.append(device[1])
            products.append(device[2].strip())
        elif (rate := _row(line)) is not None:
            rates.append(rate)
    if not rates:
        raise LinksError(f"no row of {PROGRAM} with 64 MiB or more: run it with {' '.join(ARGUMENTS)}")
    if not median(rates):
        raise LinksError("the bus bandwidth is 0: one rank measures no link; run it on two GPUs or more")
    if not hosts:
        raise LinksError(f"no list of devices: is this the output of {PROGRAM}?")
    per_node = max(Counter(hosts).values())
    named = _gpu(products[0], gpu)
    bytes_per_s = median(rates) * 1e9
    if len(set(hosts)) > 1:
        return LinkRate(named.name, "network", bytes_per_s / per_node, len(hosts), per_node)
    kind = "nvlink" if named.intra_node_link(per_node).name == "nvlink" else "pcie"
    return LinkRate(named.name, kind, bytes_per_s, len(hosts), per_node)


def _row(line: str) -> float | None:
    """The better bus bandwidth of a row of large messages, in 1e9 bytes a second. Raises LinksError."""
    words = line.split()
    # size, count, type, redop, perhaps root; then time, algbw, busbw and #wrong, out of place and in place
    if len(words) < 12 or not words[0].isdigit() or not words[1].isdigit():
        return None
    try:
        rates = float(words[-6]), float(words[-2])
    except ValueError:
        return None
    if wrong := next((word for word in (words[-5], words[-1]) if word not in _CLEAN), None):
        raise LinksError(f"{PROGRAM} found {wrong} wrong values in {words[0]} bytes: the link corrupts data")
    return max(rates) if int(words[0]) >= LEAST_BYTES else None


def _gpu(product: str, name: str | None) -> hardware.Gpu:
    try:
        found = hardware.gpu(hardware.full_name(name)) if name else hardware.by_product(product, 0)
    except hardware.HardwareError as error:
        raise LinksError(str(error)) from None
    if found is None:
        raise LinksError(f"{product} is no GPU of the catalogue: give --gpu NAME")
    return found
