"""A GPU sample as the state that screens and alerts read."""

from __future__ import annotations

from ftdash.monitor.records import GpuSample
from ftdash.monitor.state import GpuState


def gpu_state(sample: GpuSample, host: str = "") -> GpuState:
    """The state of the GPU, or MIG instance, that was sampled on `host`."""
    return GpuState(
        index=sample.index,
        uuid=sample.uuid,
        name=sample.name,
        host=host,
        state=sample.state,
        memory_used=sample.memory_used,
        memory_total=sample.memory_total,
        util=sample.util,
        power_w=sample.power_w,
        power_limit_w=sample.power_limit_w,
        temp_c=sample.temp_c,
        sm_mhz=sample.sm_mhz,
        throttle=tuple(sample.throttle),
        error=sample.error,
        memory_reserved=sample.memory_reserved,
        unified=sample.unified,
        mig_index=sample.mig_index,
        pcie_gen=sample.pcie_gen,
        pcie_width=sample.pcie_width,
        pcie_gen_max=sample.pcie_gen_max,
        pcie_width_max=sample.pcie_width_max,
        nvlinks=sample.nvlinks,
        nvlinks_up=sample.nvlinks_up,
        ecc_uncorrected=sample.ecc_uncorrected,
        remap_pending=sample.remap_pending,
        remap_failed=sample.remap_failed,
        xids=tuple(sample.xids),
        unavailable=tuple(f"{field}: {why}" for field, why in sample.unavailable.items())
        if sample.unavailable
        else (),
    )
