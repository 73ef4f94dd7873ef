"""Host memory of one node: what loading needs on every local rank, and what offload keeps, pinned."""

from __future__ import annotations

from ftdash.engine.plan import Checkpointing, Offload, Strategy
from ftdash.engine.planner.inventory import Stage, stages
from ftdash.engine.planner.numerics import SHARDS_WEIGHTS, ZERO_FAMILY
from ftdash.engine.planner.result import HostRam
from ftdash.engine.planner.setting import Setting

# Resident size of a rank that has imported torch, transformers and a trainer: an assumption, near what one
# rank shows on the test stack with CUDA libraries mapped.
PROCESS_BYTES = 2 * 2**30
SUB_GROUP = 1e9  # elements; DeepSpeed's sub_group_size, one pinned buffer each
NVME_BUFFER = 1e8  # elements; DeepSpeed's aio buffer_size
NVME_BUFFERS = 5  # DeepSpeed's buffer_count, for parameters and again for optimizer state


def next_pow2(size: float) -> int:
    """The block that PyTorch's pinned-host allocator takes for `size` bytes: the next power of two."""
    whole = max(1, -int(-size // 1))
    return 1 << (whole - 1).bit_length()


def pinned_bytes(total: float, buffer: float) -> int:
    """Pinned memory of `total` bytes that are cut into buffers of at most `buffer` bytes."""
    full, rest = divmod(total, buffer)
    return int(full) * next_pow2(buffer) + (next_pow2(rest) if rest >= 1 else 0)


def load_bytes_per_rank(s: Setting) -> float:
    """One copy of the checkpoint as it stands in memory while loading; a k-bit base is packed by then."""
    d = s.dtypes
    if d.quant is None:
        return float(s.sums.total * d.frozen)
    mesh = s.mesh
    stage = stages(s)[0]
    packed = stage.whole.packed_dense * mesh.tp * mesh.pp
    packed += stage.whole.packed_experts * (mesh.ep if mesh.ep > 1 else mesh.tp) * mesh.pp
    return packed + (s.sums.total - packed / d.quant) * d.upcast_frozen


def loading_ranks(s: Setting) -> int:
    """How many ranks of a node hold a whole copy while loading.

    One, where the others start empty (accelerate's cpu_ram_efficient_loading under FSDP) or where
    initialisation is sharded (zero.Init). Neither reaches a k-bit base, which every rank quantises for
    itself, nor replicated strategies.
    """
    if s.plan.strategy in SHARDS_WEIGHTS and s.dtypes.quant is None and not s.plan.unsharded_init:
        return 1
    return s.mesh.ranks_per_node


def offloaded_bytes_per_rank(s: Setting, stage: Stage) -> float:
    """Pinned host memory of one rank for what --offload moves.

    DeepSpeed pins one flat buffer a sub-group for master weights, each moment and gradients; FSDP2 pins
    every parameter's shard for itself. Both go through the allocator that rounds up to powers of two.
    FSDP1 pins one flat shard a block. NVMe keeps only swap buffers in memory.
    """
    d, plan, n, ne = s.dtypes, s.plan, s.mesh.param_shard, s.expert_shard
    whole_stage = stage.whole
    trainable = whole_stage.trainable_dense / n + whole_stage.trainable_experts / ne
    if plan.offload is Offload.NONE:
        return trainable * d.state if d.paged_state else 0.0
    if plan.offload is Offload.NVME:
        return 2 * NVME_BUFFERS * next_pow2(NVME_BUFFER * 4)
    states = (d.master, d.state / 2, d.state / 2, d.grad)
    whole = plan.offload is Offload.ALL
    if plan.strategy in ZERO_FAMILY:
        held = float(sum(pinned_bytes(trainable * size, SUB_GROUP * size) for size in states if size))
        if whole:
            held += _pinned_shards(s, stage, d.param)
        return held
    moments = trainable * (d.master + d.state)
    if not whole:
        return moments + trainable * d.grad
    if plan.strategy is Strategy.FSDP1:
        frozen = whole_stage.frozen_dense / n + whole_stage.frozen_experts / ne
        return moments + frozen + trainable * (d.param + d.grad)
    return moments + _pinned_shards(s, stage, d.param) + trainable * d.grad


def _pinned_shards(s: Setting, stage: Stage, per_trainable: float) -> float:
    """Pinned bytes of every parameter tensor's shard on one rank; the adapters of a block count as one."""
    d, n, ne = s.dtypes, s.mesh.param_shard, s.expert_shard
    total = float(next_pow2((stage.root.frozen_dense + stage.root.trainable * per_trainable) / n))
    for count, layer, unit in stage.blocks:
        weight = per_trainable if s.lora is None else d.quant if unit.packed_dense and d.quant else d.frozen
        pinned = sum(
            next_pow2(linear.params * weight / s.mesh.tp / (ne if linear.count > 1 else n))
            for linear in layer.linears
        )
        if s.lora is not None and unit.trainable:
            pinned += next_pow2(unit.trainable * per_trainable / n)
        total += count * pinned
    return total


def full_state_bytes(s: Setting) -> float:
    """What a full state dict puts into rank 0's host memory beside everything else.

    FSDP gathers weights and optimizer state in the dtypes they train in, a frozen base as it is stored
    (torch/distributed/fsdp, FullStateDictConfig with rank0_only and offload_to_cpu; accelerate's
    FULL_STATE_DICT does both); ZeRO-3 the weights in 16 bits (stage3_gather_16bit_weights_on_model_save),
    its optimizer never. Adapters alone are picked out of it afterwards, so that the base is gathered too.
    """
    plan, d = s.plan, s.dtypes
    if plan.strategy not in SHARDS_WEIGHTS or s.mesh.param_shard == 1:
        return 0.0
    frozen = load_bytes_per_rank(s) if s.lora is not None else 0.0
    if plan.strategy is Strategy.ZERO3:
        return frozen + d.compute * s.trainable_params
    return frozen + (d.param + d.state) * s.trainable_params


def host_ram(s: Setting) -> HostRam:
    """Host memory of one node by phase. Loading copies and offloaded shards are there together: the copies
    are dropped only when training starts."""
    ranks = s.mesh.ranks_per_node
    always = ranks * (PROCESS_BYTES + offloaded_bytes_per_rank(s, stages(s)[0]))
    copy = load_bytes_per_rank(s)
    activations = ranks * activation_offload_bytes(s) if s.plan.activation_offload else 0.0
    return HostRam(
        loading=round(always + loading_ranks(s) * copy),
        loading_everywhere=round(always + ranks * copy),
        training=round(always + activations),
        saving_full=round(always + full_state_bytes(s)),
    )


def activation_offload_bytes(s: Setting) -> float:
    """Saved block inputs that wait in one rank's host memory; without checkpointing about eight times as
    much."""
    width = s.shape.hidden * s.dtypes.stream
    if s.plan.checkpointing is not Checkpointing.FULL:
        width *= 8
    return s.tokens / s.mesh.tp * width * s.sums.layers / s.mesh.pp
