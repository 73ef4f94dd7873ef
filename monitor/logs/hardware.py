"""Lines by which kernel, driver and scheduler report a sick GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

# NVIDIA's "Xid Errors" document, the ones that end or endanger a job.
XID_TEXTS = {
    13: "graphics engine exception (usually the program's own fault)",
    31: "memory page fault (usually the program's own fault)",
    43: "GPU stopped processing (the program's own fault)",
    45: "preemptive cleanup after an earlier error",
    48: "double-bit ECC error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    63: "ECC page or row retirement recorded",
    64: "ECC page or row retirement failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")
_LOST = re.compile(r"NVML: Failed to get usage\(15\)|GPU (?:\S+ )?is lost|GPU has fallen off the bus")


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A GPU fault that a log line reports; `bus` and `xid` where it says them."""

    text: str
    bus: str = ""
    xid: int | None = None


def gpu_fault(line: str) -> GpuFault | None:
    """The fault that a kernel or slurmstepd line reports; None for any other line."""
    if match := _XID.search(line):
        code = int(match["code"])
        text = XID_TEXTS.get(code, "see NVIDIA's Xid documentation")
        return GpuFault(f"Xid {code}: {text}", match["bus"], code)
    if _LOST.search(line):
        return GpuFault("a GPU of this node is lost")
    return None
