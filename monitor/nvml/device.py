"""One GPU as NVML describes it: its readings, fast and slow ones, its MIG instances, its processes."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from ftdash.monitor.nvml.library import Calls, DeviceLost, nvml
from ftdash.monitor.nvml.mapping import may_be_gpu_process, same_pid_namespace_as_driver
from ftdash.monitor.records import GpuProcess, GpuSample

SLOW_S = 5.0  # fields that move slowly, or that the driver takes milliseconds for, are read this often
LOST_RETRY_S = 30.0
MAX_XIDS = 64

# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down (nvml.h, nvmlClocksEventReasons).
# Idle, application clocks and display clocks are somebody's choice, not a throttle.
THROTTLE_BITS = (
    (0x04, "power cap"),
    (0x08, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "thermal (software)"),
    (0x40, "thermal (hardware)"),
    (0x80, "power brake"),
)

# GPUs whose memory is the system's own: NVML either refuses their memory info or gives misleading totals
# (XuehaiPan/nvitop#208, Syllo/nvtop#449).
UNIFIED_NAMES = ("GB10", "Thor", "Orin", "DGX Spark", "Tegra", "Xavier")


class _ProcessInfoV1(ctypes.Structure):
    """nvmlProcessInfo_v1_t, for drivers older than 450.66."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]


def throttle_reasons(mask: int) -> list[str]:
    """The throttle reasons in a clocks-event mask, in words."""
    return [text for bit, text in THROTTLE_BITS if mask & bit]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def system_available_bytes() -> int | None:
    """MemAvailable of /proc/meminfo, in bytes."""
    try:
        with open("/proc/meminfo", "rb") as handle:
            for line in handle:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


class Device:
    """Reads one GPU. Nothing here can fail for another GPU, and no single call can lose the others."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._handle: Any = None
        self._calls = Calls()
        self._slow = GpuSample(t=0.0, index=index)
        self._slow_at = -SLOW_S
        self._lost_at: float | None = None
        self._lost_why = ""
        self._uuid = ""
        self._name = ""
        self._link_count: int | None = None
        self._link_bytes: tuple[float, int, int] | None = None  # when, KiB sent, KiB received
        self._instances: list[Instance] = []
        self._events: Any = None
        self._xids: list[int] = []

    def read(self) -> list[GpuSample]:
        """The GPU and its MIG instances now. A lost GPU is one sample that says so."""
        now = time.time()
        if self._lost_at is not None:
            if time.monotonic() - self._lost_at < LOST_RETRY_S:
                return [self._lost(now)]
            self._lost_at = None
        try:
            return self._read(now)
        except DeviceLost as error:
            self._handle = self._events = None
            self._instances = []
            self._slow_at = -SLOW_S
            self._lost_at = time.monotonic()
            self._lost_why = str(error)
            return [self._lost(now)]

    def _lost(self, now: float) -> GpuSample:
        return GpuSample(
            t=now,
            index=self.index,
            uuid=self._uuid,
            name=self._name,
            bus_id=self._slow.bus_id,
            state="lost",
            error=self._lost_why,
            xids=list(self._xids),
        )

    def _read(self, now: float) -> list[GpuSample]:
        lib, calls = nvml(), self._calls
        calls.begin()
        if self._handle is None:
            self._handle = calls.ask("handle", lib.nvmlDeviceGetHandleByIndex, self.index)
            if self._handle is None:
                why = calls.unavailable.get("handle", "no handle")
                return [GpuSample(t=now, index=self.index, uuid=self._uuid, state="error", error=why)]
        handle = self._handle
        if time.monotonic() - self._slow_at >= SLOW_S:
            self._read_slow(handle)
        slow = self._slow
        sample = GpuSample(
            **{field: getattr(slow, field) for field in _SLOW_FIELDS},
            t=now,
            index=self.index,
            uuid=self._uuid,
            name=self._name,
        )
        _read_memory(calls, handle, sample)
        if not sample.mig:
            rates = calls.ask("utilisation", lib.nvmlDeviceGetUtilizationRates, handle)
            if rates is not None:
                sample.util, sample.util_memory = int(rates.gpu), int(rates.memory)
        milliwatts = calls.ask("power", lib.nvmlDeviceGetPowerUsage, handle)
        sample.power_w = milliwatts / 1000 if milliwatts is not None else None
        sample.temp_c = calls.ask(
            "temperature", lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU
        )
        sample.sm_mhz = calls.ask("sm clock", lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM)
        sample.throttle = throttle_reasons(self._throttle_mask(handle) or 0)
        sample.xids = self._read_xids(handle)
        sample.unavailable = dict(calls.unavailable)
        if calls.failed and not calls.answered:
            sample.state, sample.error = "error", calls.last_error
        return [sample, *self._read_instances(sample)]

    def _read_xids(self, handle: Any) -> list[int]:
        """Xid errors since the sampler began, the newest last, where the driver hands out events."""
        lib, calls = nvml(), self._calls
        if self._events is None and "xid events" not in calls.unavailable:
            events = calls.ask("xid events", lib.nvmlEventSetCreate)
            kind = lib.nvmlEventTypeXidCriticalError
            if events is not None and _register(calls, handle, kind, events):
                self._events = events
        while self._events is not None and len(self._xids) < MAX_XIDS:
            try:
                event = lib.nvmlEventSetWait_v2(self._events, 0)
            except lib.NVMLError as error:
                if error.value == lib.NVML_ERROR_GPU_IS_LOST:
                    raise DeviceLost(str(error)) from None
                break  # a timeout: nothing more has happened
            self._xids.append(int(event.eventData))
        return list(self._xids)

    def _throttle_mask(self, handle: Any) -> int | None:
        lib = nvml()
        mask = self._calls.ask("throttle", lib.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None and self._calls.unavailable.get("throttle") == "not in this driver":
            mask = self._calls.ask(
                "throttle (old name)", lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle
            )
            if mask is not None:
                self._calls.unavailable.pop("throttle", None)
        return mask

    def _read_slow(self, handle: Any) -> None:
        lib, calls = nvml(), self._calls
        self._slow_at = time.monotonic()
        self._uuid = _text(calls.ask("uuid", lib.nvmlDeviceGetUUID, handle)) or self._uuid
        self._name = _text(calls.ask("name", lib.nvmlDeviceGetName, handle)) or self._name
        slow = GpuSample(t=time.time(), index=self.index)
        pci = calls.ask("bus id", lib.nvmlDeviceGetPciInfo, handle)
        slow.bus_id = _text(pci.busId) if pci is not None else self._slow.bus_id
        limit = calls.ask("power limit", lib.nvmlDeviceGetEnforcedPowerLimit, handle)
        slow.power_limit_w = limit / 1000 if limit is not None else None
        slow.sm_max_mhz = calls.ask("max sm clock", lib.nvmlDeviceGetMaxClockInfo, handle, lib.NVML_CLOCK_SM)
        slow.numa_node = numa_node(slow.bus_id)
        self._read_pcie(handle, slow)
        self._read_errors(handle, slow)
        self._read_links(handle, slow)
        mode = calls.ask("mig mode", lib.nvmlDeviceGetMigMode, handle)
        slow.mig = bool(mode and mode[0])
        self._instances = self._find_instances(handle) if slow.mig else []
        slow.unified = any(mark.lower() in self._name.lower() for mark in UNIFIED_NAMES)
        slow.processes = _processes(calls, handle)
        self._slow = slow

    def _read_pcie(self, handle: Any, slow: GpuSample) -> None:
        lib, calls = nvml(), self._calls
        slow.pcie_gen = calls.ask("pcie generation", lib.nvmlDeviceGetCurrPcieLinkGeneration, handle)
        slow.pcie_width = calls.ask("pcie width", lib.nvmlDeviceGetCurrPcieLinkWidth, handle)
        slow.pcie_gen_max = calls.ask("pcie max generation", lib.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        slow.pcie_width_max = calls.ask("pcie max width", lib.nvmlDeviceGetMaxPcieLinkWidth, handle)
        # Each of these two makes the driver count for 20 ms, hence not in every sample (nvml.h).
        sent = calls.ask("pcie sent", lib.nvmlDeviceGetPcieThroughput, handle, lib.NVML_PCIE_UTIL_TX_BYTES)
        got = calls.ask("pcie received", lib.nvmlDeviceGetPcieThroughput, handle, lib.NVML_PCIE_UTIL_RX_BYTES)
        slow.pcie_tx_bytes_s = sent * 1000 if sent is not None else None
        slow.pcie_rx_bytes_s = got * 1000 if got is not None else None

    def _read_errors(self, handle: Any, slow: GpuSample) -> None:
        lib, calls = nvml(), self._calls
        for field, name, kind in (
            ("ecc corrected", "ecc_corrected", lib.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("ecc uncorrected", "ecc_uncorrected", lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            count = calls.ask(field, lib.nvmlDeviceGetTotalEccErrors, handle, kind, lib.NVML_VOLATILE_ECC)
            setattr(slow, name, count)
        rows = calls.ask("remapped rows", lib.nvmlDeviceGetRemappedRows, handle)
        if rows is not None:
            corrected, uncorrected, pending, failed = rows
            slow.remapped_rows = int(corrected) + int(uncorrected)
            slow.remap_pending, slow.remap_failed = bool(pending), bool(failed)
        fields = calls.ask(
            "memory temperature", lib.nvmlDeviceGetFieldValues, handle, [lib.NVML_FI_DEV_MEMORY_TEMP]
        )
        if fields is not None and fields[0].nvmlReturn == lib.NVML_SUCCESS:
            slow.memory_temp_c = int(fields[0].value.uiVal)

    def _read_links(self, handle: Any, slow: GpuSample) -> None:
        """NVLink: how many, how many up, and bytes a second from counters two slow reads apart."""
        lib, calls = nvml(), self._calls
        everything = 0xFFFFFFFF  # the scope that sums all links
        asked = [
            (lib.NVML_FI_DEV_NVLINK_LINK_COUNT, 0),
            (lib.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, everything),
            (lib.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, everything),
        ]
        fields = calls.ask("nvlink", lib.nvmlDeviceGetFieldValues, handle, asked)
        if fields is None:
            return
        if fields[0].nvmlReturn != lib.NVML_SUCCESS:
            calls.unavailable["nvlink"] = "not supported"
            return
        slow.nvlinks = int(fields[0].value.uiVal)
        slow.nvlinks_up = self._links_up(handle, slow.nvlinks)
        if all(fields[i].nvmlReturn == lib.NVML_SUCCESS for i in (1, 2)):
            now, sent, got = time.monotonic(), int(fields[1].value.ullVal), int(fields[2].value.ullVal)
            if self._link_bytes is not None:
                then, sent_then, got_then = self._link_bytes
                if now > then and sent >= sent_then and got >= got_then:
                    slow.nvlink_tx_bytes_s = int((sent - sent_then) * 1024 / (now - then))
                    slow.nvlink_rx_bytes_s = int((got - got_then) * 1024 / (now - then))
            self._link_bytes = (now, sent, got)

    def _links_up(self, handle: Any, count: int) -> int | None:
        """One call for all links where the driver knows the field, one a link where it does not."""
        lib, calls = nvml(), self._calls
        if not count:
            return 0
        asked = [(lib.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(count)]
        states = calls.ask("nvlink states", lib.nvmlDeviceGetFieldValues, handle, asked)
        if states is not None and all(state.nvmlReturn == lib.NVML_SUCCESS for state in states):
            return sum(1 for state in states if state.value.uiVal)
        found = [calls.ask("nvlink state", lib.nvmlDeviceGetNvLinkState, handle, i) for i in range(count)]
        return sum(1 for state in found if state) if any(state is not None for state in found) else None

    def _find_instances(self, handle: Any) -> list[Instance]:
        lib, calls = nvml(), self._calls
        count = calls.ask("mig instances", lib.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        known = {instance.place: instance for instance in self._instances}
        found = []
        for place in range(count):
            try:
                child = lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            except lib.NVMLError as error:
                if error.value in (lib.NVML_ERROR_GPU_IS_LOST, lib.NVML_ERROR_RESET_REQUIRED):
                    raise DeviceLost(str(error)) from None
                continue  # a place without an instance is answered with "not found"
            instance = known.get(place) or Instance(self.index, place)
            instance.handle = child
            found.append(instance)
        return found

    def _read_instances(self, parent: GpuSample) -> list[GpuSample]:
        return [instance.read(parent) for instance in self._instances]


class Instance:
    """One MIG instance: memory and processes of its own; utilisation, power and clocks are the GPU's."""

    def __init__(self, index: int, place: int) -> None:
        self.index = index
        self.place = place
        self.handle: Any = None
        self._calls = Calls()

    def read(self, parent: GpuSample) -> GpuSample:
        lib, calls = nvml(), self._calls
        calls.begin()
        sample = GpuSample(
            t=parent.t,
            index=self.index,
            mig_index=self.place,
            gpu_instance=calls.ask("gpu instance", lib.nvmlDeviceGetGpuInstanceId, self.handle),
            parent_uuid=parent.uuid,
            bus_id=parent.bus_id,
            numa_node=parent.numa_node,
            uuid=_text(calls.ask("uuid", lib.nvmlDeviceGetUUID, self.handle)),
            name=_text(calls.ask("name", lib.nvmlDeviceGetName, self.handle)),
        )
        _read_memory(calls, self.handle, sample)
        sample.processes = _processes(calls, self.handle)
        calls.unavailable["utilisation"] = "not supported for a MIG instance"
        sample.unavailable = dict(calls.unavailable)
        if calls.failed and not calls.answered:
            sample.state, sample.error = "error", calls.last_error
        return sample


def _register(calls: Calls, handle: Any, kind: int, events: Any) -> bool:
    """Ask for events of one device; pynvml's function gives nothing back when it worked."""
    before = calls.answered
    calls.ask("xid events", nvml().nvmlDeviceRegisterEvents, handle, kind, events)
    return calls.answered > before


def _read_memory(calls: Calls, handle: Any, sample: GpuSample) -> None:
    """Memory by v2 (used without the driver's own part), by v1 on old drivers, shared memory as such."""
    lib = nvml()
    info = calls.ask("memory", lib.nvmlDeviceGetMemoryInfo, handle, lib.nvmlMemory_v2)
    if info is not None:
        sample.memory_reserved = int(info.reserved)
    elif calls.unavailable.get("memory") in ("not in this driver", "Argument version mismatch"):
        info = calls.ask("memory (old)", lib.nvmlDeviceGetMemoryInfo, handle)
        if info is not None:
            calls.unavailable.pop("memory", None)
    refused = info is None and calls.unavailable.get("memory") == "not supported"
    if sample.unified or refused or (info is not None and not info.total):
        sample.unified = True
        sample.memory_reserved = None
        known = [process.memory for process in sample.processes if process.memory is not None]
        sample.memory_used = sum(known) if known else None
        sample.memory_available = system_available_bytes()
        calls.unavailable["memory"] = "unified: shared with the CPU"
    elif info is not None:
        sample.memory_used, sample.memory_total = int(info.used), int(info.total)


def _processes(calls: Calls, handle: Any) -> list[GpuProcess]:
    """Compute processes by the newest call that the driver has: v3, v2 (450.66), v1."""
    lib = nvml()
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        field = f"processes ({name[-2:]})"
        found = calls.ask(field, getattr(lib, name), handle)
        if found is not None:
            break
        why = calls.unavailable.pop(field, "")
        if why and why != "not in this driver":
            calls.unavailable["processes"] = why
            return []
    else:
        found = calls.ask("processes", _processes_v1, handle)
    if found is None:
        return []
    calls.unavailable.pop("processes", None)
    same = same_pid_namespace_as_driver()
    return [
        GpuProcess(
            pid=int(item.pid),
            memory=int(item.usedGpuMemory) if item.usedGpuMemory is not None else None,
            visible=os.path.exists(f"/proc/{item.pid}") and (same or may_be_gpu_process(int(item.pid))),
        )
        for item in found
    ]


class _Found:
    def __init__(self, pid: int, used: int | None) -> None:
        self.pid = pid
        self.usedGpuMemory = used


def _processes_v1(handle: Any) -> list[_Found]:
    lib = nvml()
    function = lib._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")
    count = ctypes.c_uint(0)
    code = function(handle, ctypes.byref(count), None)
    if code == lib.NVML_SUCCESS:
        return []
    if code != lib.NVML_ERROR_INSUFFICIENT_SIZE:
        raise lib.NVMLError(code)
    count.value = count.value * 2 + 5
    room = (_ProcessInfoV1 * count.value)()
    lib._nvmlCheckReturn(function(handle, ctypes.byref(count), room))
    unknown = lib.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    return [_Found(item.pid, None if item.used == unknown else item.used) for item in room[: count.value]]


def numa_node(bus_id: str) -> int | None:
    """The NUMA node of a PCI device by sysfs, whose bus ids have a domain of four digits."""
    if not bus_id:
        return None
    domain, _, rest = bus_id.partition(":")
    try:
        with open(f"/sys/bus/pci/devices/{domain[-4:].lower()}:{rest.lower()}/numa_node", "rb") as handle:
            node = int(handle.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


_SLOW_FIELDS = (
    "bus_id",
    "power_limit_w",
    "sm_max_mhz",
    "numa_node",
    "pcie_gen",
    "pcie_width",
    "pcie_gen_max",
    "pcie_width_max",
    "pcie_tx_bytes_s",
    "pcie_rx_bytes_s",
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_rows",
    "remap_pending",
    "remap_failed",
    "memory_temp_c",
    "nvlinks",
    "nvlinks_up",
    "nvlink_tx_bytes_s",
    "nvlink_rx_bytes_s",
    "mig",
    "unified",
    "processes",
)
