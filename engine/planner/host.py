"""Host memory of one node: what loading needs on every local rank, and what offload keeps, pinned."""

from __future__ import annotations

from ftdash.engine.plan import Checkpointing, Method, Offload
from ftdash.engine.planner.inventory import Stage, Unit, stages
from ftdash.engine.planner.numerics import SHARDS_WEIGHTS
from ftdash.engine.planner.setting import Setting

# Python, torch and the tokenizer in one rank; transformers measured at about this on the test stack.
PROCESS_BYTES = 2 * 2**30


def next_pow2(size: float) -> int:
    """The block that PyTorch's pinned-host allocator takes for `size` bytes: the next power of two."""
    whole = max(1, int(-(-size // 1)))
    return 1 << (whole - 1).bit_length()


def load_bytes_per_rank(s: Setting) -> float:
    """One copy of the checkpoint in the dtype it is loaded in; a k-bit base is quantised on every rank."""
    d = s.dtypes
    total = float(s.shape.total_params)
    if d.quant is None:
        return total * 2 if d.frozen == 2 else total * 4
    stage = stages(s)[0]
    quantised = (
        stage.total("quantised_dense") * s.mesh.tp * s.mesh.pp
        + stage.total("quantised_experts") * max(s.mesh.ep, s.mesh.tp if s.mesh.ep == 1 else 1) * s.mesh.pp
    )
    return quantised * d.quant + (total - quantised) * d.upcast_frozen


def loading_ranks(s: Setting) -> int:
    """How many ranks of a node hold a whole copy while loading: one where the others start empty (accelerate's
    cpu_ram_efficient_loading under FSDP) or where initialisation is sharded (zero.Init); none of that reaches
    a k-bit base, which every rank quantises for itself, nor replicated strategies."""
    if s.plan.strategy in SHARDS_WEIGHTS and s.dtypes.quant is None:
        return 1
    return s.mesh.ranks_per_node


def offloaded_bytes_per_rank(s: Setting, stage: Stage) -> list[float]:
    """The pinned buffers of one rank: parameters, gradients, optimizer state, whatever --offload moves."""
    d, plan, n = s.dtypes, s.plan, s.mesh.param_shard
    trainable = stage.total("trainable_dense") / n + stage.total("trainable_experts") / s.mesh.expert_shard
    if plan.offload is Offload.NONE:
        return [trainable * d.state] if d.paged_state else []
    buffers = [
        trainable
        * (d.master + d.param if d.master == 0 and plan.offload is Offload.ALL else trainable and d.master)
    ]
    buffers = [trainable * d.master, *([trainable * d.state / 2] * 2), trainable * d.grad]
    if plan.offload in (Offload.ALL, Offload.NVME):
        buffers.append(trainable * d.param)
        units: list[tuple[float, Unit]] = [(count, unit) for count, _, unit in stage.blocks] + [
            (1.0, stage.root)
        ]
        buffers.append(sum(c * u.frozen_bytes(s, n, s.mesh.expert_shard) for c, u in units))
    if plan.offload is Offload.NVME:
        # What stays in memory are the swap buffers: DeepSpeed's five of 1e8 elements each, for reading and writing.
        return [5 * 1e8 * 2.0, 5 * 1e8 * 2.0]
    return [size for size in buffers if size]


def host_ram(s: Setting) -> int:
    """Peak bytes of host memory on one node: loading copies and offloaded buffers are there together, because
    the copies are dropped only when training starts."""
    stage = stages(s)[0]
    ranks = s.mesh.ranks_per_node
    loading = loading_ranks(s) * load_bytes_per_rank(s)
    offloaded = ranks * sum(offloaded_bytes_per_rank(s, stage))
    activations = ranks * activation_offload_bytes(s) if s.plan.activation_offload else 0.0
    return round(ranks * PROCESS_BYTES + max(loading + offloaded, offloaded + activations))


def activation_offload_bytes(s: Setting) -> float:
    """Saved block inputs that wait in host memory."""
    width = s.shape.hidden * s.dtypes.stream
    if s.plan.checkpointing is not Checkpointing.FULL:
        width *= 8
    return s.tokens / s.mesh.tp * width * s.shape.layers / s.mesh.pp


__all__ = ["Method", "host_ram", "load_bytes_per_rank", "next_pow2", "offloaded_bytes_per_rank"]
