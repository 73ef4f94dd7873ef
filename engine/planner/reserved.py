"""From allocated to what the device shows: the allocator's slack, the CUDA context and NCCL's buffers."""

from __future__ import annotations

from ftdash.engine.planner.result import Phase
from ftdash.engine.planner.setting import Setting

MIB = 2**20
# The CUDA context with cuBLAS and the kernels of a training step; 450 to 800 MiB on Ampere and later.
CONTEXT_BYTES = 650 * MIB
# NCCL's channels and proxies for one communicator; a second and third group (TP, CP, EP, replicas) add less.
NCCL_FIRST_GROUP_BYTES = 450 * MIB
NCCL_GROUP_BYTES = 150 * MIB


def context_bytes(s: Setting) -> int:
    """Bytes that NVML counts and torch does not."""
    mesh = s.mesh
    groups = sum(degree > 1 for degree in (mesh.replicate, mesh.shard, mesh.cp, mesh.tp, mesh.pp, mesh.ep))
    return CONTEXT_BYTES + (NCCL_FIRST_GROUP_BYTES + (groups - 1) * NCCL_GROUP_BYTES if groups else 0)


def reserved_bytes(s: Setting, phases: tuple[Phase, ...], allocated: int) -> int:
    """The caching allocator's slack over the peak."""
    return round(allocated * 1.04)


def imbalance_bytes(s: Setting, peak: Phase) -> int:
    """What the hottest rank may need beyond the even share: routed activations grow with the tokens it draws.

    Dropless routing has no bound but the tokens themselves; twice the even share is where public reports of
    expert-parallel runs with a balancing loss end up, so that is shown as a range and not added to the peak.
    """
    if not s.shape.is_moe or s.mesh.ep == 1:
        return 0
    return peak.activations
