"""What the planner knows of GPUs and of the links between them."""

from __future__ import annotations

from functools import cache

import msgspec
from msgspec.structs import replace

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


class Link(msgspec.Struct, frozen=True):
    """One way that bytes leave a GPU: `bytes_per_s` in one direction, for one GPU."""

    name: str
    bytes_per_s: float
    latency_s: float


class Gpu(msgspec.Struct, frozen=True):
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
    bridge_bytes_per_s: float = 0.0  # of an NVLink bridge between two cards, which few machines have
    peer_to_peer: bool = True  # over PCIe; GeForce drivers have none, so that all goes through host memory
    unified: bool = False  # memory shared with the CPU: offload frees none of it
    socket_gpus: int = 0  # GPUs on one CPU socket of this machine; 0: not known
    nics: int | None = None  # RDMA adapters of this machine; None: not known

    @property
    def has_nvlink(self) -> bool:
        return self.nvlink_bytes_per_s > 0

    def intra_node_link(self, gpus: int) -> Link:
        """What `gpus` GPUs of one node talk over: NVLink where it joins them all, else PCIe."""
        if self.has_nvlink and gpus <= self.nvlink_peers:
            return Link("nvlink", self.nvlink_bytes_per_s, NVLINK_LATENCY_S)
        rate = self.pcie_bytes_per_s
        if self.socket_gpus and gpus > self.socket_gpus:
            rate = min(rate, SOCKET_BYTES_PER_S)
        return Link(f"pcie{self.pcie_generation}", rate, PCIE_LATENCY_S)

    def inter_node_link(self, gpus_per_node: int, kind: str | None = None) -> Link:
        """One GPU's share of the network between nodes. Raises HardwareError for an unknown `kind`."""
        known = link_kind(kind or self.inter_node)
        share = float(gpus_per_node) if known.shared_by_node else 1.0
        if self.nics and not known.shared_by_node:
            share = max(1.0, gpus_per_node / self.nics)
        return Link(known.name, known.bytes_per_s / share, known.latency_s)


# Base latencies of one hop in NCCL's own tuning table (NVIDIA/nccl, src/graph/tuning.cc, Simple protocol).
NVLINK_LATENCY_S = 3.4e-6
PCIE_LATENCY_S = 5.7e-6


# What NCCL reckons between the sockets of a dual-CPU machine (src/graph/topo.h, SKL_QPI_BW).
SOCKET_BYTES_PER_S = 10e9


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
    bridge_bytes_per_s: float = 0.0
    peer_to_peer: bool = True
    unified: bool = False


class _Catalogue(msgspec.Struct, frozen=True):
    note: str
    gpus: tuple[_GpuRow, ...]
    links: tuple[LinkKind, ...]


@cache
def _catalogue() -> _Catalogue:
    return msgspec.json.decode((presets.FOLDER / "gpus.json").read_bytes(), type=_Catalogue)


@cache
def _known() -> dict[str, Gpu]:
    fields = [name for name in Gpu.__struct_fields__ if name in _GpuRow.__struct_fields__]
    return {row.name: Gpu(**{name: getattr(row, name) for name in fields}) for row in _catalogue().gpus}


def gpu_names() -> tuple[str, ...]:
    """All names that --gpu takes, `local` last."""
    return (*_known(), LOCAL)


# One lane and direction in bytes/s after the line code, by PCIe generation (PCI-SIG base specifications).
PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_LANES = (1, 2, 4, 8, 16)


def with_pcie(device: Gpu, slot: str) -> Gpu:
    """The GPU in a slot of `slot` generation and lanes, such as "3x8". Raises HardwareError."""
    generation, _, lanes = slot.partition("x")
    if not (generation.isascii() and generation.isdigit() and lanes.isascii() and lanes.isdigit()):
        generation = lanes = "0"
    rate = PCIE_LANE_BYTES_PER_S.get(int(generation[:3]))
    if rate is None or int(lanes[:3]) not in _LANES:
        raise HardwareError(
            f"--pcie {slot}: generation and lanes such as 4x16; generations "
            f"{', '.join(map(str, PCIE_LANE_BYTES_PER_S))}, lanes {', '.join(map(str, _LANES))}"
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
        from ftdash.engine.local_gpu import local_gpu

        return local_gpu(tuple(_known()))
    found = _known().get(name)
    if found is None:
        raise HardwareError(f"--gpu {name}: one of {', '.join(gpu_names())}")
    return found


def full_name(name: str) -> str:
    """The GPU that `name` stands for: itself, or the only one whose name goes on with a dash (`l40s`,
    `h100-pcie`). Raises HardwareError with the valid names."""
    if name in gpu_names():
        return name
    fits = [known for known in _known() if known.startswith(f"{name.lower()}-")]
    if len(fits) != 1:
        raise HardwareError(f"--gpu {name}: one of {', '.join(fits or gpu_names())}")
    return fits[0]


def by_product(product: str, memory_bytes: int) -> Gpu | None:
    """The known GPU behind a product name such as "NVIDIA A100-SXM4-80GB", the nearest in memory."""
    bare = product.removeprefix("NVIDIA ").removeprefix("Tesla ")
    fits = [row for row in _catalogue().gpus if bare in row.product]
    if not fits:
        return None
    nearest = min(fits, key=lambda row: abs(row.memory_bytes - memory_bytes))
    return _known()[nearest.name]
