"""What the planner knows of GPUs and of the links between them, and what NVML says of this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import msgspec

from ftdash import presets

LOCAL = "local"


class HardwareError(ValueError):
    """A GPU or link that is not known: one line naming the flag and the valid values."""


class LinkKind(msgspec.Struct, frozen=True):
    """A network between nodes. `bytes_per_s` is one direction, for one GPU, or for the whole node
    when `shared_by_node`."""

    name: str
    bytes_per_s: float
    latency_s: float
    shared_by_node: bool
    source: str


@dataclass(frozen=True, slots=True)
class Link:
    """One way that bytes leave a GPU: `bytes_per_s` in one direction, for one GPU."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. Rates are dense FLOP/s with fp32 accumulation; None: no such units.

    `memory_bytes` is what CUDA reports as the device's total, which is less than the size on the box.
    `nvlink_bytes_per_s` is one direction, for one GPU, over all of its links (half of the vendor's
    total); `nvlink_peers` is how many GPUs that fabric joins (2 for a bridge, 0 without).
    `pcie_bytes_per_s` is one direction of the link to the host.
    """

    name: str
    memory_bytes: int
    bf16_flops: float | None
    fp16_flops: float
    fp8_flops: float | None
    fp4_flops: float | None
    tf32_flops: float | None
    fp32_flops: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nvlink_peers: int
    pcie_generation: int
    pcie_bytes_per_s: float
    max_power_w: float
    inter_node: str
    source: str

    @property
    def has_nvlink(self) -> bool:
        return self.nvlink_bytes_per_s > 0

    def intra_node_link(self, gpus: int) -> Link:
        """What `gpus` GPUs of one node talk over: NVLink where it joins them all, else PCIe."""
        if self.has_nvlink and gpus <= self.nvlink_peers:
            return Link("nvlink", self.nvlink_bytes_per_s, NVLINK_LATENCY_S)
        return Link(f"pcie{self.pcie_generation}", self.pcie_bytes_per_s, PCIE_LATENCY_S)

    def inter_node_link(self, gpus_per_node: int, kind: str | None = None) -> Link:
        """One GPU's share of the network between nodes. Raises HardwareError for an unknown `kind`."""
        known = link_kind(kind or self.inter_node)
        share = gpus_per_node if known.shared_by_node else 1
        return Link(known.name, known.bytes_per_s / share, known.latency_s)


# Base latencies of one hop in NCCL's own tuning table (NVIDIA/nccl, src/graph/tuning.cc, Simple protocol).
NVLINK_LATENCY_S = 3.4e-6
PCIE_LATENCY_S = 5.7e-6


class _GpuRow(msgspec.Struct, frozen=True):
    name: str
    product: tuple[str, ...]
    memory_bytes: int
    fp16_flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nvlink_peers: int
    pcie_generation: int
    pcie_bytes_per_s: float
    max_power_w: float
    inter_node: str
    source: str
    bf16_flops: float | None = None
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    tf32_flops: float | None = None


class _Catalogue(msgspec.Struct, frozen=True):
    note: str
    gpus: tuple[_GpuRow, ...]
    links: tuple[LinkKind, ...]


@cache
def _catalogue() -> _Catalogue:
    return msgspec.json.decode((presets.FOLDER / "gpus.json").read_bytes(), type=_Catalogue)


@cache
def _known() -> dict[str, Gpu]:
    fields = Gpu.__dataclass_fields__
    return {row.name: Gpu(**{name: getattr(row, name) for name in fields}) for row in _catalogue().gpus}


def gpu_names() -> tuple[str, ...]:
    """All names that --gpu takes, `local` last."""
    return (*_known(), LOCAL)


_LANES = (1, 2, 4, 8, 16)


def with_pcie(device: Gpu, slot: str) -> Gpu:
    """The GPU in a slot of `slot` generation and lanes, such as "3x8". Raises HardwareError."""
    generation, _, lanes = slot.partition("x")
    if not (generation.isascii() and generation.isdigit() and lanes.isascii() and lanes.isdigit()):
        generation = lanes = "0"
    rate = _PCIE_LANE_BYTES_PER_S.get(int(generation[:3]))
    if rate is None or int(lanes[:3]) not in _LANES:
        raise HardwareError(
            f"--pcie {slot}: generation and lanes such as 4x16; generations "
            f"{', '.join(map(str, _PCIE_LANE_BYTES_PER_S))}, lanes {', '.join(map(str, _LANES))}"
        )
    return _with_pcie(device, int(generation), rate * int(lanes))


@cache
def _with_pcie(device: Gpu, generation: int, rate: float) -> Gpu:
    return replace(device, pcie_generation=generation, pcie_bytes_per_s=rate)


def link_names() -> tuple[str, ...]:
    return tuple(link.name for link in _catalogue().links)


def link_kind(name: str) -> LinkKind:
    """A network by name. Raises HardwareError."""
    for link in _catalogue().links:
        if link.name == name:
            return link
    raise HardwareError(f"link {name!r} is not known: {', '.join(link_names())}")


def gpu(name: str) -> Gpu:
    """A GPU by its name; `local` asks NVML. Raises HardwareError with the valid names."""
    if name == LOCAL:
        return _local()
    found = _known().get(name)
    if found is None:
        raise HardwareError(f"--gpu {name}: one of {', '.join(gpu_names())}")
    return found


def by_product(product: str, memory_bytes: int) -> Gpu | None:
    """The known GPU behind a product name such as "NVIDIA A100-SXM4-80GB", the nearest in memory."""
    bare = product.removeprefix("NVIDIA ").removeprefix("Tesla ")
    fits = [row for row in _catalogue().gpus if bare in row.product]
    if not fits:
        return None
    nearest = min(fits, key=lambda row: abs(row.memory_bytes - memory_bytes))
    return _known()[nearest.name]


def _local() -> Gpu:
    """The smallest GPU that NVML sees here, with the memory, PCIe link and power limit it reports."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise HardwareError(
            f"--gpu local: NVML finds no NVIDIA driver here ({error}); name one: {', '.join(_known())}"
        ) from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if not handles:
            raise HardwareError(f"--gpu local: NVML sees no GPU; name one: {', '.join(_known())}")
        return min((_read_device(pynvml, handle) for handle in handles), key=lambda found: found.memory_bytes)
    except pynvml.NVMLError as error:
        raise HardwareError(f"--gpu local: NVML failed: {error}; name one: {', '.join(_known())}") from None
    finally:
        pynvml.nvmlShutdown()


# One lane and direction in bytes/s after the line code, by PCIe generation (PCI-SIG base specifications).
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def _read_device(pynvml: ModuleType, handle: Any) -> Gpu:
    product = pynvml.nvmlDeviceGetName(handle)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        usable = memory.total - memory.reserved
    except pynvml.NVMLError:  # drivers before 510 do not tell what they reserve
        usable = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    known = by_product(product, usable)
    if known is None:
        raise HardwareError(
            f"--gpu local: the rates of {product!r} are not known; name one: {', '.join(_known())}"
        )
    found = replace(known, memory_bytes=usable, source=f"NVML: {product}; rates: {known.source}")
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        if generation in _PCIE_LANE_BYTES_PER_S and lanes:
            rate = _PCIE_LANE_BYTES_PER_S[generation] * lanes
            found = replace(found, pcie_generation=generation, pcie_bytes_per_s=rate)
    except pynvml.NVMLError:
        pass
    try:
        limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        found = replace(found, max_power_w=limit_w)
    except pynvml.NVMLError:
        pass
    if found.has_nvlink and not _active_nvlinks(pynvml, handle):
        found = replace(found, nvlink_bytes_per_s=0.0, nvlink_peers=0)
    return found


def _active_nvlinks(pynvml: ModuleType, handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            break
    return active
