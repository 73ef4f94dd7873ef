"""What NVML says of this machine: its smallest GPU, and the links, sockets and adapters around it."""

from __future__ import annotations

import os
import re
from functools import cache
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from ftdash.engine.hardware import PCIE_LANE_BYTES_PER_S, Gpu, HardwareError, by_product
from ftdash.monitor.nvml.topology import Join, Topology, read_topology


@cache
def local_gpu(names: tuple[str, ...]) -> Gpu:
    """The smallest GPU that NVML sees here, with the memory, PCIe link and power limit it reports, and how
    the machine's GPUs are joined. Asked once. Raises HardwareError, which lists `names`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise HardwareError(
            f"--gpu local: NVML finds no NVIDIA driver here ({error}); name one: {', '.join(names)}"
        ) from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if not handles:
            raise HardwareError(f"--gpu local: NVML sees no GPU; name one: {', '.join(names)}")
        found = min(
            (_read_device(pynvml, handle, names) for handle in handles), key=lambda found: found.memory_bytes
        )
        instances = found.source.startswith(INSTANCE)
        topology = read_topology() if len(handles) > 1 and not instances else None
        return joined(found, topology) if topology is not None else found
    except pynvml.NVMLError as error:
        raise HardwareError(f"--gpu local: NVML failed: {error}; name one: {', '.join(names)}") from None
    finally:
        pynvml.nvmlShutdown()


INSTANCE = "NVML: MIG instance "
_PROFILE = re.compile(r"\b(\d)g\.\d+gb")  # such as 3g.40gb: three of seven compute slices
COMPUTE_SLICES = 7  # of every GPU that splits (NVIDIA Multi-Instance GPU user guide, "Partitioning")


def _smallest_instance(pynvml: ModuleType, handle: Any, whole: Gpu) -> Gpu | None:
    """The smallest MIG instance of a GPU as a GPU of its own; None where it is not split.

    Compute goes by its slices, bandwidth by its memory; instances reach each other neither over NVLink nor
    peer to peer (NVIDIA Multi-Instance GPU user guide, "Application Considerations"). Raises HardwareError
    for a GPU that is split and has no instance yet.
    """
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        places = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:  # no MIG in this GPU or driver
        return None
    found = []
    for place in range(places):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            name, size = pynvml.nvmlDeviceGetName(instance), pynvml.nvmlDeviceGetMemoryInfo(instance).total
        except pynvml.NVMLError:  # an empty place
            continue
        profile = _PROFILE.search(name)
        share = size / whole.memory_bytes
        slices = int(profile[1]) / COMPUTE_SLICES if profile else share
        found.append(_part(whole, name, size, min(1.0, slices), min(1.0, share)))
    if not found:
        raise HardwareError("--gpu local: the GPU is split (MIG) and has no instance yet: create one")
    return min(found, key=lambda part: part.memory_bytes)


def _part(whole: Gpu, name: str, size: int, slices: float, share: float) -> Gpu:
    def cut(rate: float | None) -> float | None:
        return None if rate is None else rate * slices

    return replace(
        whole,
        memory_bytes=size,
        bf16_flops=cut(whole.bf16_flops),
        fp16_flops=whole.fp16_flops * slices,
        fp8_flops=cut(whole.fp8_flops),
        fp4_flops=cut(whole.fp4_flops),
        tf32_flops=cut(whole.tf32_flops),
        fp32_flops=whole.fp32_flops * slices,
        memory_bytes_per_s=whole.memory_bytes_per_s * share,
        nvlink_bytes_per_s=0.0,
        nvlink_peers=0,
        bridge_bytes_per_s=0.0,
        peer_to_peer=False,
        source=f"{INSTANCE}{name}; {whole.source}",
    )


def _usable_bytes(pynvml: ModuleType, handle: Any) -> int:
    """What NVML says that a process may have; all of the machine's memory where the GPU shares it (GB10,
    Jetson: NVML answers "not supported", or nothing)."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        usable = int(memory.total - memory.reserved)
    except pynvml.NVMLError:  # drivers before 510 do not tell what they reserve
        try:
            usable = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        except pynvml.NVMLError_NotSupported:
            usable = 0
    return usable or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_device(pynvml: ModuleType, handle: Any, names: tuple[str, ...]) -> Gpu:
    whole = _read_gpu(pynvml, handle, names)
    return _smallest_instance(pynvml, handle, whole) or whole


def _read_gpu(pynvml: ModuleType, handle: Any, names: tuple[str, ...]) -> Gpu:
    product = pynvml.nvmlDeviceGetName(handle)
    usable = _usable_bytes(pynvml, handle)
    known = by_product(product, usable)
    if known is None:
        raise HardwareError(
            f"--gpu local: the rates of {product!r} are not known; name one: {', '.join(names)}"
        )
    found = replace(known, memory_bytes=usable, source=f"NVML: {product}; rates: {known.source}")
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        if generation in PCIE_LANE_BYTES_PER_S and lanes:
            rate = PCIE_LANE_BYTES_PER_S[generation] * lanes
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


def joined(gpu: Gpu, topology: Topology) -> Gpu:
    """The GPU with what joins it to its peers here: how many NVLink reaches, how many share a CPU socket, and
    how many RDMA adapters the machine has. A bridge that is up counts although the card is sold without."""
    nvlink = max((_reach(topology, place.index, {Join.NVLINK}) for place in topology.gpus), default=1)
    socket = max((_reach(topology, place.index, _ONE_SOCKET) for place in topology.gpus), default=1)
    rate = gpu.nvlink_bytes_per_s or gpu.bridge_bytes_per_s
    known = any(pair.join is not Join.UNKNOWN for pair in topology.pairs)
    return replace(
        gpu,
        nvlink_bytes_per_s=rate if nvlink > 1 else 0.0,
        nvlink_peers=nvlink if nvlink > 1 else 0,
        socket_gpus=socket if known else 0,
        nics=len(topology.nics) or None,
    )


_ONE_SOCKET = {Join.NVLINK, Join.PIX, Join.PXB, Join.PHB, Join.NODE}


def _reach(topology: Topology, index: int, joins: set[Join]) -> int:
    """How many GPUs, itself included, a GPU reaches by one of these joins."""
    return 1 + sum(pair.join in joins for pair in topology.pairs if index in (pair.a, pair.b))


def _active_nvlinks(pynvml: ModuleType, handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            break
    return active
