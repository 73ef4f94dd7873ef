"""GPU memory from the lines that trainers print, for runs that have no hook.

Formats: DeepSpeed's see_memory_usage ("MA … Max_MA … CA … Max_CA …", where GB is 2**30 bytes, with the host's
memory a line below), Megatron's report of a rank in MB of 2**20, and torchtitan's peak of each step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from ftdash.monitor.logs.lines import strip_ansi

_FIGURE = r"([\d,]+(?:\.\d+)?)"
_DEEPSPEED = re.compile(rf"\bMA {_FIGURE} GB\s+Max_MA {_FIGURE} GB\s+CA {_FIGURE} GB\s+Max_CA {_FIGURE} GB")
_DEEPSPEED_HOST = re.compile(rf"\bCPU Virtual Memory:\s+used = {_FIGURE} GB")
_MEGATRON = re.compile(
    rf"memory \(MB\) \| allocated: {_FIGURE} \| max allocated: {_FIGURE} \| reserved: {_FIGURE}"
    rf" \| max reserved: {_FIGURE}"
)
_TITAN = re.compile(rf"\bstep:\s*\d+\s.*\bmemory:\s*{_FIGURE}GiB\(")


@dataclass(frozen=True, slots=True)
class LoggedMemory:
    """Bytes as torch's allocator counts them on the rank that printed; None where it does not say."""

    allocated: int | None = None
    max_allocated: int | None = None
    reserved: int | None = None
    max_reserved: int | None = None
    host_used: int | None = None  # of the whole node
    source: str = ""  # deepspeed, megatron, torchtitan

    def over(self, older: LoggedMemory) -> LoggedMemory:
        """This line's values, the older ones where it has none."""
        missing = {
            item.name: getattr(older, item.name)
            for item in fields(self)
            if getattr(self, item.name) in (None, "")
        }
        return replace(self, **missing)


def parse_memory(text: str) -> LoggedMemory | None:
    """What one line says about memory; None for any other line."""
    if "GB" not in text and "(MB)" not in text and "GiB(" not in text:
        return None
    line = strip_ansi(text)
    for pattern, unit, source in ((_DEEPSPEED, 1 << 30, "deepspeed"), (_MEGATRON, 1 << 20, "megatron")):
        if match := pattern.search(line):
            allocated, most, reserved, most_reserved = (_bytes(figure, unit) for figure in match.groups())
            return LoggedMemory(allocated, most, reserved, most_reserved, source=source)
    if match := _DEEPSPEED_HOST.search(line):
        return LoggedMemory(host_used=_bytes(match[1], 1 << 30), source="deepspeed")
    if match := _TITAN.search(line):
        return LoggedMemory(max_reserved=_bytes(match[1], 1 << 30), source="torchtitan")
    return None


def _bytes(figure: str, unit: int) -> int:
    return round(float(figure.replace(",", "")) * unit)
