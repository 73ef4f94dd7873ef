"""Alerts about sick GPUs: lost, slowed down, with memory errors, on a degraded link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftdash.monitor.logs.hardware import XID_TEXTS
from ftdash.monitor.state import Alert, GpuState, RunState

# The power cap is how a GPU at full load normally runs; these are not normal.
SICK_THROTTLES = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")
PROGRAM_XIDS = (13, 31, 43, 45)  # usually the program's own fault, which its log tells better
BUSY_UTIL = 50  # percent; an idle link drops its generation to save power


def gpu_alerts(state: RunState, history: Any, limits: Any) -> Iterator[Alert]:
    """One alert a kind, naming the GPUs; `ranks` are those that run on them."""
    kinds: dict[str, list[tuple[GpuState, str, str]]] = {}
    for gpu in state.gpus:
        for code, severity, text in _findings(gpu):
            kinds.setdefault(code, []).append((gpu, severity, text))
    ranks_of: dict[tuple[str, str, int], list[int]] = {}
    for rank in state.ranks if kinds else ():
        if rank.gpu is not None:
            ranks_of.setdefault(_key(rank.gpu), []).append(rank.rank)
    for code, findings in kinds.items():
        severity = "error" if any(severity == "error" for _, severity, _ in findings) else "warning"
        texts = [f"{_name(gpu)} {text}" for gpu, _, text in findings[:4]]
        if len(findings) > 4:
            texts.append(f"{len(findings) - 4} more")
        ranks = sorted(rank for gpu, _, _ in findings for rank in ranks_of.get(_key(gpu), []))
        yield Alert(code, severity, "; ".join(texts), tuple(ranks))


def _key(gpu: GpuState) -> tuple[str, str, int]:
    return gpu.host, gpu.uuid, gpu.index


def _name(gpu: GpuState) -> str:
    return f"GPU {gpu.index} on {gpu.host}" if gpu.host else f"GPU {gpu.index}"


def _findings(gpu: GpuState) -> Iterator[tuple[str, str, str]]:
    serious = [code for code in gpu.xids if code not in PROGRAM_XIDS]
    if serious:
        text = XID_TEXTS.get(serious[-1], "see NVIDIA's Xid documentation")
        yield "gpu-xid", "error", f"reported Xid {serious[-1]}: {text}"
    if gpu.state == "lost":
        yield (
            "gpu-lost",
            "error",
            f"is lost ({gpu.error or 'fallen off the bus'}): reset it or reboot, exclude the node",
        )
        return
    if gpu.state == "error":
        yield "gpu-lost", "error", f"is in error: {gpu.error or 'the driver gives no reason'}"
        return
    sick = [reason for reason in gpu.throttle if reason in SICK_THROTTLES]
    if sick:
        clock = f", SM clock {gpu.sm_mhz} MHz" if gpu.sm_mhz else ""
        heat = f", {gpu.temp_c} °C" if gpu.temp_c is not None else ""
        yield "gpu-throttled", "warning", f"is slowed down: {', '.join(sick)}{clock}{heat}"
    if gpu.ecc_uncorrected:
        yield "gpu-ecc", "error", f"has {gpu.ecc_uncorrected} uncorrected memory errors"
    elif gpu.remap_failed:
        yield "gpu-ecc", "error", "could not remap a faulty memory row: have it replaced"
    elif gpu.remap_pending:
        yield "gpu-ecc", "warning", "has memory rows that wait for remapping: reset it when it is free"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        yield "pcie-degraded", "warning", f"runs on PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}"
    elif (
        gpu.pcie_gen and gpu.pcie_gen_max and gpu.pcie_gen < gpu.pcie_gen_max and (gpu.util or 0) >= BUSY_UTIL
    ):
        yield (
            "pcie-degraded",
            "warning",
            f"runs on PCIe generation {gpu.pcie_gen} of {gpu.pcie_gen_max} under load",
        )
    if gpu.nvlinks and gpu.nvlinks_up is not None and gpu.nvlinks_up < gpu.nvlinks:
        yield "nvlink-down", "warning", f"has {gpu.nvlinks - gpu.nvlinks_up} of {gpu.nvlinks} NVLinks down"
