"""Which GPU a rank runs on, by what its own environment says, never by NVML's index or process ids.

NVML counts GPUs by PCI bus id. CUDA counts the visible ones, by default the fastest first, so the two
agree for certain only under CUDA_DEVICE_ORDER=PCI_BUS_ID or when all cards are alike
(CUDA C++ Programming Guide, "CUDA Environment Variables"). In a container NVML's process ids are the
host's (NVIDIA/nvidia-docker#179).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftdash.monitor.procs import environ
from ftdash.monitor.records import GpuSample

INIT_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the first pid namespace (linux/proc_ns.h, PROC_PID_INIT_INO)


@dataclass(frozen=True, slots=True)
class GpuOfRank:
    """The answer: a UUID, or None when the rank sees no GPU. `why` is for a person."""

    uuid: str | None
    sure: bool
    why: str


def visible_devices(
    variables: Mapping[str, str], devices: Sequence[GpuSample]
) -> tuple[list[GpuSample], bool, str]:
    """The devices that CUDA shows to a process with this environment, in CUDA's order.

    Returns the devices, whether their order is certain, and the reason when it is not. As in CUDA, the
    list ends at the first entry that names nothing; a repeated entry hides everything.
    """
    gpus = [device for device in devices if device.mig_index is None]
    instances = [device for device in devices if device.mig_index is not None]
    sure, why = _order_is_certain(variables, gpus)
    asked = variables.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return gpus, sure, why
    chosen: list[GpuSample] = []
    by_number = False
    for token in (part.strip() for part in asked.split(",")):
        if token.lstrip("+").isdigit():
            by_number = True
            number = int(token)
            found = gpus[number] if number < len(gpus) else None
        else:
            found = _by_uuid(token, gpus, instances)
        if found is None:
            break
        if any(found is other for other in chosen):
            return [], True, f"CUDA_VISIBLE_DEVICES={asked} names a GPU twice: CUDA then shows none"
        chosen.append(found)
    if not by_number:
        return chosen, True, ""
    return chosen, sure, why


def gpu_of_rank(
    variables: Mapping[str, str],
    devices: Sequence[GpuSample],
    *,
    device: str = "",
    device_uuid: str = "",
    local_rank: int | None = None,
) -> GpuOfRank:
    """The GPU of a rank: by the UUID that it reported itself, else by its environment.

    `device` is what the rank says, such as "cuda:0"; without it the ordinal is LOCAL_RANK, or 0 when the
    rank sees one GPU only.
    """
    if device_uuid:
        wanted = _bare(device_uuid)
        for known in devices:
            if _bare(known.uuid) == wanted:
                return GpuOfRank(known.uuid, True, "by the UUID that the rank reported")
    if device.startswith("cpu"):
        return GpuOfRank(None, True, "the rank runs on the CPU")
    visible, sure, why = visible_devices(variables, devices)
    if not visible:
        return GpuOfRank(None, sure, why or "no GPU is visible to this rank")
    kind, _, number = device.partition(":")
    if kind == "cuda" and number.isdigit():
        ordinal, source = int(number), device
    elif len(visible) == 1:
        ordinal, source = 0, "the only GPU that it sees"
    else:
        rank_text = variables.get("LOCAL_RANK", "") if local_rank is None else str(local_rank)
        if not rank_text.isdigit():
            return GpuOfRank(None, False, f"mapping unsure: {len(visible)} GPUs visible and no LOCAL_RANK")
        ordinal, source = int(rank_text), f"LOCAL_RANK={rank_text}"
    if ordinal >= len(visible):
        return GpuOfRank(None, False, f"mapping unsure: {source}, but only {len(visible)} GPUs are visible")
    found = visible[ordinal]
    if found.mig:
        return GpuOfRank(found.uuid, False, "mapping unsure: MIG splits the GPU and no instance is named")
    return GpuOfRank(found.uuid, sure, f"mapping unsure: {why}" if not sure else f"by {source}")


def gpu_of_process(pid: int, devices: Sequence[GpuSample], *, device: str = "") -> GpuOfRank:
    """As `gpu_of_rank`, for a process of this machine."""
    variables = environ(pid)
    if not variables:
        return GpuOfRank(None, False, f"mapping unsure: the environment of process {pid} cannot be read")
    return gpu_of_rank(variables, devices, device=device)


def pids_by_namespace(pid: int) -> list[int]:
    """The process's ids from this namespace inwards (NSpid of /proc/PID/status); empty when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as handle:
            for line in handle:
                if line.startswith(b"NSpid:"):
                    return [int(part) for part in line.split()[1:]]
    except (OSError, ValueError):
        return []
    return []


def same_pid_namespace_as_driver() -> bool:
    """True outside of containers, where the driver's process ids are this machine's own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INIT_PID_NAMESPACE
    except OSError:
        return False


def may_be_gpu_process(pid: int) -> bool:
    """True when the process holds an NVIDIA device file open, or may not be looked at."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if os.readlink(entry.path).startswith("/dev/nvidia"):
                        return True
                except OSError:
                    continue
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def hidden_processes(samples: Sequence[GpuSample]) -> str:
    """A sentence when the driver reports processes that do not exist here; empty otherwise."""
    hidden = {process.pid for sample in samples for process in sample.processes if not process.visible}
    if not hidden:
        return ""
    what = "1 GPU process is" if len(hidden) == 1 else f"{len(hidden)} GPU processes are"
    return f"{what} hidden by the pid namespace; ranks are found by environment"


def _order_is_certain(variables: Mapping[str, str], gpus: Sequence[GpuSample]) -> tuple[bool, str]:
    if variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(gpus) < 2:
        return True, ""
    names = {gpu.name for gpu in gpus}
    if len(names) == 1 and "" not in names:
        return True, ""
    if "" in names:
        return False, "a GPU does not tell its name, and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    return False, f"{len(names)} kinds of GPU, counted fastest first: CUDA_DEVICE_ORDER is not PCI_BUS_ID"


def _bare(uuid: str) -> str:
    text = uuid.lower()
    return text.removeprefix("gpu-") if text.startswith("gpu-") else text


def _by_uuid(token: str, gpus: Sequence[GpuSample], instances: Sequence[GpuSample]) -> GpuSample | None:
    """A device by (the unique beginning of) its UUID: GPU-…, MIG-…, or the older MIG-GPU-…/GI/CI."""
    if token.startswith("MIG-GPU-"):
        parent_uuid, _, place = token.removeprefix("MIG-").partition("/")
        slices = [item for item in instances if item.parent_uuid == parent_uuid]
        number = place.partition("/")[0]
        return next((item for item in slices if number.isdigit() and item.gpu_instance == int(number)), None)
    pool = instances if token.startswith("MIG-") else gpus if token.startswith("GPU-") else ()
    matches = [item for item in pool if item.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None
