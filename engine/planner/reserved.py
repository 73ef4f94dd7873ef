"""From allocated to what the device shows: the allocator's slack, the CUDA context and NCCL's buffers."""

from __future__ import annotations

from ftdash.engine.mesh import UNSHARDED
from ftdash.engine.plan import Strategy
from ftdash.engine.planner.numerics import FSDP_FAMILY
from ftdash.engine.planner.result import Phase
from ftdash.engine.planner.setting import Setting
from ftdash.engine.planner.transients import WORKSPACE_BYTES

MIB = 2**20
# The CUDA context with cuBLAS and the kernels of a training step; 450 to 800 MiB on Ampere and later.
CONTEXT_BYTES = 650 * MIB
# NCCL's channels and proxies for one communicator; a second and third group (TP, CP, EP, replicas) add less.
NCCL_FIRST_GROUP_BYTES = 450 * MIB
NCCL_GROUP_BYTES = 150 * MIB
# Slack of the caching allocator over the blocks in use. Unsharded states are many blocks, each rounded up
# to its segment: fitted to torchtune's single-GPU runs. Shards are few and lie still, so that only what comes
# and goes leaves gaps: fitted to torchtitan's runs. FSDP1 records its buffers on other streams, and they come
# back late: 7 % of all where two thirds come and go (torchtitan, docs/fsdp.md), 11 % of those.
SLACK_UNSHARDED = 0.05
SLACK_MOVING = 0.01
SLACK_MOVING_FSDP1 = 0.12
# Without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True the blocks of an eager forward's temporaries are
# too small for the logits and stay beside them. Megatron's and ms-swift's DeepSpeed launch scripts set it.
FIXED_SEGMENTS = FSDP_FAMILY | UNSHARDED


def context_bytes(s: Setting) -> int:
    """Bytes that NVML counts and torch does not."""
    mesh = s.mesh
    groups = (mesh.replicate > 1) + (mesh.shard > 1) + (mesh.cp > 1) + (mesh.tp > 1) + (mesh.pp > 1)
    groups += mesh.ep > 1
    return CONTEXT_BYTES + (NCCL_FIRST_GROUP_BYTES + (groups - 1) * NCCL_GROUP_BYTES if groups else 0)


# What autograd and the loop hold beyond the tensors that the sums list, as a share of activations, logits and
# buffers: fitted to single-GPU runs.
UNLISTED = 0.06


def _moving(phase: Phase) -> int:
    """What comes and goes within a step: all but weights, gradients and optimizer state."""
    return phase.activations + phase.logits + phase.gathered + phase.buffers


def allocated_bytes(s: Setting, peak: Phase) -> int:
    """The peak's terms with cuBLAS's workspace, and on unsharded ranks what the sums leave out."""
    total = peak.total + WORKSPACE_BYTES
    return round(total + UNLISTED * _moving(peak)) if s.plan.strategy in UNSHARDED else total


# Assumptions: how much stays with live blocks in their segments when all else is given back, and how near to
# the limit the giving back begins, since a large block fails before the last small one does.
SLACK_AT_THE_LIMIT = 0.03
NEAR_THE_LIMIT = 0.02


def reserved_bytes(s: Setting, phases: tuple[Phase, ...], allocated: int) -> tuple[int, bool]:
    """What the allocator holds at the fullest moment, and whether it had to give blocks back for that.

    Besides the live blocks it keeps those for other phases and streams, and its slack. Where the device has
    no more to give, it frees the cached blocks and asks again before it fails
    (c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`): such a run fits, tightly and more slowly.
    """
    wanted = _wanted_bytes(s, phases, allocated)
    limit = s.gpu.memory_bytes - context_bytes(s)
    near = NEAR_THE_LIMIT
    if wanted <= (1 - near) * limit:
        return wanted, False
    held = limit * (1 - near**2 / (wanted / limit - 1 + 2 * near))
    return max(round(held), round((1 + SLACK_AT_THE_LIMIT) * allocated)), wanted > limit


def _wanted_bytes(s: Setting, phases: tuple[Phase, ...], allocated: int) -> int:
    peak = max(phase.total for phase in phases)
    fullest = max(phases, key=lambda phase: phase.total + phase.cached)
    held = fullest.total + fullest.cached + allocated - peak
    if s.plan.strategy in UNSHARDED:
        slack = SLACK_UNSHARDED * held
    else:
        share = SLACK_MOVING_FSDP1 if s.plan.strategy is Strategy.FSDP1 else SLACK_MOVING
        slack = share * (_moving(fullest) + fullest.cached)
    return max(allocated, round(held + slack))


def imbalance_bytes(s: Setting, peak: Phase) -> int:
    """What the hottest rank may need beyond the even share: routed activations grow with the tokens it draws.

    Dropless routing has no bound but the tokens themselves; twice the even share is where public reports of
    expert-parallel runs with a balancing loss end up, so that is shown as a range and not added to the peak.
    """
    if not s.sums.routed or s.mesh.ep == 1:
        return 0
    return peak.activations
