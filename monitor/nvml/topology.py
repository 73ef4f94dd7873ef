"""How the GPUs of this machine are joined: NVLink and PCIe between pairs, NUMA nodes, the NICs near them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ftdash.monitor.nvml.device import numa_node
from ftdash.monitor.nvml.library import Calls, DeviceLost, Library, nvml

START_S = 5.0


class Join(StrEnum):
    """The best way between two GPUs, the names of `nvidia-smi topo -m`."""

    NVLINK = "nvlink"
    PIX = "pix"  # one PCIe switch
    PXB = "pxb"  # several PCIe switches
    PHB = "phb"  # one PCIe host bridge
    NODE = "node"  # one NUMA node
    SYS = "sys"  # across NUMA nodes
    UNKNOWN = "unknown"


# nvmlGpuTopologyLevel_t of nvml.h
_LEVELS = {0: Join.PIX, 10: Join.PIX, 20: Join.PXB, 30: Join.PHB, 40: Join.NODE, 50: Join.SYS}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one GPU sits. `nvlinks` counts the links that are up."""

    index: int
    uuid: str
    bus_id: str
    numa_node: int | None
    nvlinks: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two GPUs, by index, `a` < `b`. `nvlinks` are direct links, or those into a common NVSwitch."""

    a: int
    b: int
    join: Join
    nvlinks: int = 0


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device and the GPUs of its NUMA node."""

    name: str
    numa_node: int | None
    near: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """All places, pairs and NICs; lost GPUs are left out."""

    gpus: tuple[Place, ...]
    pairs: tuple[Pair, ...]
    nics: tuple[Nic, ...]

    def join(self, a: int, b: int) -> Join:
        """How two GPUs are joined, in either order."""
        wanted = (min(a, b), max(a, b))
        return next((pair.join for pair in self.pairs if (pair.a, pair.b) == wanted), Join.UNKNOWN)


def read_topology(library: Library | None = None) -> Topology | None:
    """Ask NVML and sysfs; None without a driver. Takes tens of milliseconds: ask once."""
    started = library or Library()
    if not started.start(START_S):
        return None
    gpus = [gpu for index in range(started.device_count) if (gpu := _Gpu.read(index)) is not None]
    by_bus = {gpu.place.bus_id: gpu.place.index for gpu in gpus}
    pairs = tuple(_pair(a, b, by_bus) for i, a in enumerate(gpus) for b in gpus[i + 1 :])
    return Topology(tuple(gpu.place for gpu in gpus), pairs, tuple(_nics([gpu.place for gpu in gpus])))


@dataclass(frozen=True, slots=True)
class _Gpu:
    place: Place
    handle: Any
    calls: Calls
    remotes: tuple[str, ...]  # the bus id at the other end of each link that is up

    @classmethod
    def read(cls, index: int) -> _Gpu | None:
        """None for a GPU that is lost or gives no handle."""
        lib, calls = nvml(), Calls()
        try:
            handle = calls.ask("handle", lib.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                return None
            pci = calls.ask("bus id", lib.nvmlDeviceGetPciInfo, handle)
            uuid = calls.ask("uuid", lib.nvmlDeviceGetUUID, handle) or ""
            remotes = []
            for link in range(lib.NVML_NVLINK_MAX_LINKS):
                state = calls.ask(f"link {link}", lib.nvmlDeviceGetNvLinkState, handle, link)
                if state is None:
                    break
                if state:
                    far = calls.ask(f"far end {link}", lib.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
                    remotes.append(_text(far.busId) if far is not None else "")
        except DeviceLost:
            return None
        bus_id = _text(pci.busId) if pci is not None else ""
        place = Place(index, _text(uuid), bus_id, numa_node(bus_id), len(remotes))
        return cls(place, handle, calls, tuple(remotes))


def _pair(a: _Gpu, b: _Gpu, by_bus: dict[str, int]) -> Pair:
    """Links that end at the other GPU are direct; ends that are no GPU are switches, which join all."""
    direct = sum(by_bus.get(far) == b.place.index for far in a.remotes)
    switched = [sum(bool(far) and far not in by_bus for far in gpu.remotes) for gpu in (a, b)]
    links = direct or (min(switched) if set(a.remotes) & set(b.remotes) else 0)
    if links:
        return Pair(a.place.index, b.place.index, Join.NVLINK, links)
    lib = nvml()
    try:
        level = a.calls.ask("topology", lib.nvmlDeviceGetTopologyCommonAncestor, a.handle, b.handle)
    except DeviceLost:
        level = None
    join = _LEVELS.get(level, Join.UNKNOWN) if level is not None else Join.UNKNOWN
    return Pair(a.place.index, b.place.index, join)


def _nics(places: list[Place]) -> list[Nic]:
    root = "/sys/class/infiniband"
    found = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    for name in names:
        node: int | None
        try:
            with open(f"{root}/{name}/device/numa_node", "rb") as handle:
                node = int(handle.read())
        except (OSError, ValueError):
            node = None
        near = tuple(place.index for place in places if node is not None and place.numa_node == node)
        found.append(Nic(name, node, near))
    return found


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
