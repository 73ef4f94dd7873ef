"""What the text of an out-of-memory error says, in the words of every torch since 1.x."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis.frames import read_frames
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Frame

_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9}
_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB|GB|B)\b"


@dataclass(frozen=True, slots=True)
class OomText:
    """Sizes in bytes, None where the text does not say. `others` is what other processes hold on the GPU."""

    wanted: int | None = None
    gpu: int | None = None
    capacity: int | None = None
    free: int | None = None
    in_use: int | None = None  # by this process, context and all
    allocated: int | None = None
    unallocated: int | None = None  # reserved by the allocator, and not given out
    others: int | None = None

    @property
    def fragmented(self) -> bool:
        """The allocator held enough, in pieces that were too small."""
        return bool(self.wanted and self.unallocated and self.unallocated >= self.wanted)


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def parse(text: str) -> OomText:
    """The sizes in one error message; a message of another kind gives an empty result."""
    allocated = _size(rf"{_SIZE} already allocated", text) or _size(
        rf"{_SIZE} (?:is|are) allocated by PyTorch", text
    )
    reserved = _size(rf"{_SIZE} reserved in total by PyTorch", text)
    unallocated = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    gpu = re.search(r"\bGPU (\d+)\b", text)
    in_use = _size(rf"this process has {_SIZE} memory in use", text)
    others = [
        round(float(number) * _UNITS[unit])
        for number, unit in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)
    ]
    return OomText(
        wanted=_size(rf"[Tt]ried to allocate {_SIZE}", text),
        gpu=int(gpu[1]) if gpu else None,
        capacity=_size(rf"total capaci?ty of {_SIZE}", text) or _size(rf"{_SIZE} total capacity", text),
        free=_size(rf"of which {_SIZE} is free", text) or _size(rf"{_SIZE} free", text),
        in_use=in_use or reserved or (sum(others) or None),
        allocated=allocated,
        unallocated=unallocated,
        others=sum(others) if others and in_use else None,  # the only one that is told may be this one
    )


_PLANNED = "; --plan FILE (the plan as JSON) gives those that fit"
_LESS_AT_ONCE = (
    "one of: a smaller micro-batch with more accumulation, shorter sequences, activation checkpointing, a "
    "fused or chunked loss, more sharding (ZeRO-3, FSDP)"
)
_BY_PHASE = {
    Phase.INIT: "one of: load on the CPU or on the meta device and shard before moving, a smaller dtype or "
    "quantised weights, more sharding",
    Phase.OPTIMIZER: "one of: sharded optimizer states (ZeRO, FSDP), an 8-bit optimizer, offload, LoRA "
    "instead of all weights",
    Phase.SAVE: "one of: a sharded state dict, gathering to the CPU (offload_to_cpu), saving adapters only",
    Phase.EVAL: "one of: a smaller evaluation batch, eval_accumulation_steps, keeping no logits "
    "(preprocess_logits_for_metrics)",
    Phase.GENERATE: "one of: fewer or shorter completions at once, a smaller share of memory for the "
    "inference engine (vllm_gpu_memory_utilization)",
}
_BY_PHASE[Phase.LOAD] = _BY_PHASE[Phase.INIT]


def out_of_memory_fix(frames: Sequence[Frame]) -> str:
    """What helps where GPU memory ran out, by the phase that the traceback shows; innermost frame first."""
    reading = read_frames(frames)
    fix = _BY_PHASE.get(reading.context) or _BY_PHASE.get(reading.step) or _LESS_AT_ONCE
    return fix + _PLANNED
