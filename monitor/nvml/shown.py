"""A GPU sample as the state that screens and alerts read."""

from __future__ import annotations

from operator import attrgetter

from ftdash.monitor.records import GpuSample
from ftdash.monitor.state import GpuState

# The fields that are passed on as they are come first in GpuState. By position, because a thousand GPUs a
# second are made, and thirty keywords cost six times as much.
_AS_SAMPLED = [
    name for name in GpuState.__struct_fields__ if name not in ("host", "throttle", "xids", "unavailable")
]
_as_sampled = attrgetter(*_AS_SAMPLED)
assert GpuState.__struct_fields__ == (*_AS_SAMPLED, "host", "throttle", "xids", "unavailable")


def gpu_state(sample: GpuSample, host: str = "") -> GpuState:
    """The state of the GPU, or MIG instance, that was sampled on `host`."""
    why_not = sample.unavailable
    return GpuState(  # type: ignore[call-arg]  # mypy counts a tuple of any length as too many
        *_as_sampled(sample),
        host,
        tuple(sample.throttle),
        tuple(sample.xids),
        tuple(f"{field}: {why}" for field, why in why_not.items()) if why_not else (),
    )
