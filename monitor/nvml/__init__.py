"""What NVML knows about this machine's GPUs, and which rank runs on which of them."""

from __future__ import annotations

from ftdash.monitor.nvml.sampler import GpuSampler
from ftdash.monitor.records import GpuSample

_sampler: GpuSampler | None = None


def sampler() -> GpuSampler:
    """The process's own sampler, made on first use."""
    global _sampler
    if _sampler is None:
        _sampler = GpuSampler()
    return _sampler


def sample_gpus() -> list[GpuSample]:
    """All GPUs of this machine now; empty without a driver, `sampler().reason` then says why."""
    return sampler().sample()
