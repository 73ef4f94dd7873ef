"""What a backend holds for moments: gathered units, unsharded gradients, communication buckets, casts.

These do not shrink with the number of ranks; they are why model states alone never tell what a run needs.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ftdash.engine.plan import Checkpointing, Method, Offload, Optimizer, Quant, Strategy
from ftdash.engine.planner.inventory import Stage
from ftdash.engine.planner.numerics import FSDP_FAMILY, SHARDS_WEIGHTS, ZERO_FAMILY, quant_of
from ftdash.engine.planner.setting import Setting

# cuBLAS keeps one workspace a handle and stream: 32 MiB on Hopper, 8 MiB before (PyTorch, CUDABlas.cpp).
WORKSPACE_BYTES = 32 * 2**20

# DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py).
REDUCE_BUCKET = 5e8
PREFETCH_BUCKET = 5e7
MAX_LIVE_PARAMETERS = 1e9
SUB_GROUP = 1e9


class Gathered(msgspec.Struct, frozen=True):
    """Whole parameters on a rank that owns only shards of them."""

    running: float = 0.0  # while a block runs forward
    forward: float = 0.0  # when the last block has run
    loss: float = 0.0  # when the loss goes backward
    backward: float = 0.0  # while the last block goes backward
    backward_end: float = 0.0  # while the first block goes backward
    root_end: float = 0.0  # when the root unit's gradients are reduced
    pool: float = 0.0  # all-gather outputs, kept by the allocator for the copy-in stream


def gathered(s: Setting, stage: Stage) -> Gathered:
    """What is whole on a rank at each moment.

    FSDP: the root unit, the block that runs and the one prefetched (FSDP2 prefetches one all-gather);
    forward keeps a third block's buffer, of the all-gather that was copied out last, until the next is
    waited for (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `AllGatherState`). Without
    re-sharding every block stays until its backward. A pipeline stage is not re-sharded between
    micro-batches (torchtitan, `reshard_after_forward: default`). ZeRO-3: up to `max_live_parameters` and
    the prefetch bucket stay, and a block with all its experts is gathered whole.
    """
    strategy = s.plan.strategy
    if strategy not in SHARDS_WEIGHTS:
        return Gathered()
    if strategy in FSDP_FAMILY and s.plan.wrap_embeddings:
        return _with_host_shards(s, stage, _wrapped(s, stage))
    padding = s.expert_padding - 1
    root = stage.root.gathered
    block = stage.block.gathered + padding * stage.block.gathered_experts
    whole = stage.whole.gathered + padding * stage.whole.gathered_experts
    if strategy is Strategy.ZERO3:
        live = min(whole, s.dtypes.compute * (MAX_LIVE_PARAMETERS + PREFETCH_BUCKET) + 2 * block)
        return Gathered(live, live, live, live, live, root)
    dequantised = _dequantised(s, stage)
    # FSDP1's rate limiter lets two all-gathers run ahead of the block that computes.
    two = root + (3 if strategy is Strategy.FSDP1 else 2) * block + dequantised
    pool = max(root, block)
    if strategy is Strategy.FSDP_NO_RESHARD:
        return Gathered(whole, whole, whole, whole + dequantised, two, 0.0, pool)
    if s.mesh.pp > 1:
        return Gathered(whole, whole, whole, whole + dequantised, whole, 0.0, pool)
    running = root + 3 * block + dequantised
    found = Gathered(running, root + block + dequantised, root + block, two, two, 0.0, pool)
    return _with_host_shards(s, stage, found)


def _with_host_shards(s: Setting, stage: Stage, found: Gathered) -> Gathered:
    """With parameters on the host each gather starts from a copy of the rank's own shard: one more of a block
    for every gather that runs ahead, and the allocator keeps the largest for the stream that copies
    (torch/distributed/fsdp/_flat_param.py, `pre_unshard`)."""
    if s.plan.offload is not Offload.ALL:
        return found
    ahead = 2 if s.plan.strategy is Strategy.FSDP1 else 1
    shard = ahead * stage.block.gathered / s.mesh.param_shard
    return replace(
        found,
        running=found.running + shard,
        backward=found.backward + shard,
        backward_end=found.backward_end + shard,
        pool=found.pool + max(stage.root.gathered, stage.block.gathered) / s.mesh.param_shard,
    )


def _wrapped(s: Setting, stage: Stage) -> Gathered:
    """Embedding and head as units of their own: the one is whole while it looks up and again at the end of
    backward, the other from the logits until its own backward is over; between them only blocks are."""
    padding = s.expert_padding - 1
    block = stage.block.gathered + padding * stage.block.gathered_experts
    dequantised = _dequantised(s, stage)
    size = stage.root.gathered
    embedding = min(size, stage.embedding * _root_bytes(s))
    head = min(size, stage.head * _root_bytes(s))
    blocks = 3 if s.plan.strategy is Strategy.FSDP1 else 2
    if s.plan.strategy is Strategy.FSDP_NO_RESHARD or s.mesh.pp > 1:
        whole = stage.whole.gathered + padding * stage.whole.gathered_experts
        end = embedding + (blocks * block if s.mesh.pp == 1 else whole - size)
        return Gathered(whole, whole, whole, whole + dequantised, end, 0.0, max(embedding, head, block))
    return Gathered(
        running=3 * block + dequantised,
        forward=head + block + dequantised,
        loss=head + block,
        backward=blocks * block + dequantised,
        backward_end=embedding + block + dequantised,
        pool=max(embedding, head, block),
    )


def _root_bytes(s: Setting) -> int:
    return s.dtypes.compute if s.lora is None else s.dtypes.upcast_frozen


def _largest_dequantised(s: Setting, stage: Stage) -> float:
    return s.dtypes.compute * stage.whole.largest_matrix


def _dequantised(s: Setting, stage: Stage) -> float:
    """Weights of a k-bit base while they are unpacked to compute with them.

    bitsandbytes unpacks one matrix and drops it. GPTQ's product is autograd's own, which keeps every unpacked
    matrix until its backward: one block's where blocks are recomputed, else all (AutoGPTQ,
    auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).
    """
    quant = s.dtypes.quant
    if quant is None or quant_of(s.plan) is not Quant.GPTQ4:
        return _largest_dequantised(s, stage)
    unit = stage.whole if s.plan.checkpointing is Checkpointing.NONE else stage.block
    return s.dtypes.compute * (unit.packed_dense + unit.packed_experts) / quant


class Buffers(msgspec.Struct, frozen=True):
    always: float = 0.0  # from the first step on
    casts: float = 0.0  # autocast's copies of the weights, while the graph lives
    casts_at_end: float = 0.0
    head_gradient: float = 0.0  # unsharded, from the loss until the root unit is reduced
    head_gradient_at_end: float = 0.0  # what of it is left while the first block goes backward
    block_gradient: float = 0.0  # of the block in backward, with its copy in the reduce dtype
    block_gradient_at_rest: float = 0.0  # the share of `gradients` that this block and the root will add
    root: float = 0.0  # the root unit's unsharded gradients and their copy in the reduce dtype
    step: float = 0.0


def buffers(s: Setting, stage: Stage) -> Buffers:
    """Communication and optimizer buffers of the plan's strategy."""
    strategy = s.plan.strategy
    if strategy in FSDP_FAMILY:
        return _fsdp(s, stage)
    if strategy in ZERO_FAMILY:
        return _deepspeed(s, stage)
    return _replicated(s, stage)


def _step_temporaries(s: Setting, stage: Stage, shard: float) -> float:
    """foreach Adam builds the denominators of every parameter at once; fused kernels need none (PyTorch,
    torch/optim/adamw.py). torchao's low-bit Adam unpacks both moments of one parameter to fp32, Adafactor and
    Muon work on an fp32 copy of one parameter and its update."""
    trainable = stage.whole.trainable / shard
    element = 4 if s.dtypes.param == 4 or s.dtypes.master else 2
    match s.plan.optimizer:
        case Optimizer.ADAMW_FOREACH:
            return trainable * element
        case Optimizer.ADAMW_8BIT | Optimizer.ADAMW_4BIT | Optimizer.ADAFACTOR | Optimizer.MUON:
            embedding = stage.embedding if stage.root_trains else 0.0
            return 2 * 4 * max(embedding, stage.block.trainable / 3) / shard
        case _:
            return 0.0


def _fsdp(s: Setting, stage: Stage) -> Buffers:
    """Gradients leave backward unsharded in the compute dtype and are copied to the reduce dtype for the
    reduce-scatter; the previous block's copy lives until the next is reduced. The head's gradient waits
    in the root unit for the embedding's, which comes last (torch/distributed/fsdp/_fully_shard)."""
    d = s.dtypes
    block = stage.block.trainable
    root = stage.root.trainable
    head = stage.head if stage.root_trains and s.lora is None else 0.0
    copies = d.compute + d.reduce
    waits, waits_at_end = d.compute * head, d.compute * head
    last = root
    if s.plan.wrap_embeddings:
        # The head is reduced at once, and what is sent of a unit lives until the next one is: the head's
        # beside the last block's backward, in place of the copy that later blocks find of the one before.
        waits, waits_at_end = d.reduce * max(0.0, head - block), 0.0
        last = min(root, stage.embedding)
    padding = d.reduce * (s.expert_padding - 1) * stage.block.trainable_experts
    # Between the micro-batches of a pipeline gradients wait unsharded in the reduce dtype: PyTorch's
    # pipelining stage syncs them with the last one only.
    waiting = d.reduce * stage.whole.trainable if s.mesh.pp > 1 and s.micro_steps > 1 else 0.0
    return Buffers(
        always=waiting,
        head_gradient=waits,
        head_gradient_at_end=waits_at_end,
        block_gradient=copies * block + padding,
        block_gradient_at_rest=d.grad * (block + last) / s.mesh.param_shard,
        root=copies * last - d.grad * last / s.mesh.param_shard if last else 0.0,
        step=_step_temporaries(s, stage, s.mesh.param_shard) if s.plan.offload is Offload.NONE else 0.0,
    )


def _deepspeed(s: Setting, stage: Stage) -> Buffers:
    """Reduce buckets of a fixed size, doubled where reduction overlaps backward (ZeRO-1/2), and fp32 copies
    of the gradients that the optimizer steps with: the whole partition in ZeRO-1/2, a sub-group in ZeRO-3
    (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py)."""
    d, trainable = s.dtypes, stage.whole.trainable
    share = trainable / s.mesh.param_shard
    stage3 = s.plan.strategy is Strategy.ZERO3
    bucket = d.compute * min(REDUCE_BUCKET, trainable) * (1 if stage3 else 2)
    fp32_gradients = 4 * (min(SUB_GROUP, share) if stage3 else share)
    if s.plan.offload is not Offload.NONE:
        fp32_gradients = 0.0
    block = stage.block.trainable
    return Buffers(
        always=bucket,
        block_gradient=d.compute * block + _dequantised(s, stage),
        block_gradient_at_rest=d.grad * block / (s.mesh.param_shard if stage3 else 1),
        root=d.compute * stage.root.trainable if stage3 else 0.0,
        step=fp32_gradients,
    )


def _replicated(s: Setting, stage: Stage) -> Buffers:
    """DDP's buckets are a second copy of the gradients (gradient_as_bucket_view is off by default), live from
    the first step on. Under autocast every weight has a cast that the graph keeps."""
    d = s.dtypes
    casts = d.compute * stage.whole.trainable if d.autocast and d.param == 4 and s.lora is None else 0.0
    ddp = s.plan.strategy is Strategy.DDP and s.mesh.data_parallel > 1
    tied = s.shape.tied_embeddings and stage.root_trains and s.lora is None
    in_backward = s.plan.optimizer_in_backward
    block = stage.block.trainable
    shard = s.mesh.param_shard if s.plan.strategy is Strategy.MEGATRON else 1
    stepping = _step_temporaries(s, stage, shard)
    head = d.grad * stage.head if stage.root_trains and s.lora is None else 0.0
    return Buffers(
        always=d.grad * stage.whole.trainable if ddp else 0.0,
        casts=casts,
        casts_at_end=d.compute * block if casts else 0.0,
        head_gradient=head,
        head_gradient_at_end=head,
        block_gradient=d.grad * (block / 3 if in_backward else 0.0) + _dequantised(s, stage),
        root=(d.grad * stage.embedding if tied or (in_backward and stage.root_trains) else 0.0)
        + (stepping if in_backward else 0.0),
        step=stepping,
    )


def load_bytes(s: Setting, stage: Stage, at_rest: float) -> float:
    """Weights on the GPU while loading.

    DeepSpeed without zero.Init holds the whole model there before anything is sharded, and so does FSDP with
    a k-bit base that every rank loads, as packing happens on the GPU (bitsandbytes, `Params4bit.cuda`);
    quantising holds one matrix in 16 bits beside what is packed. FSDP1 flattens a unit on the GPU, whole and
    copied once, before it keeps its share, the root unit last (torch/distributed/fsdp/_flat_param.py,
    `flatten_tensors`).
    """
    if s.plan.unsharded_init and s.plan.strategy in ZERO_FAMILY:
        whole = stage.whole.frozen_params + stage.whole.trainable
        return max(at_rest, s.dtypes.compute * whole)
    if s.plan.unsharded_init and s.dtypes.quant is not None:
        held = stage.whole.frozen_dense + stage.whole.frozen_experts + s.dtypes.param * stage.whole.trainable
        return max(at_rest, held + _largest_dequantised(s, stage))
    flattened = 0.0
    if s.plan.strategy is Strategy.FSDP1:
        root = stage.root.frozen_dense + s.dtypes.param * stage.root.trainable
        flattened = (2 - 1 / s.mesh.param_shard) * root
    return at_rest + max(flattened, _largest_dequantised(s, stage))


def save_gather(s: Setting, stage: Stage) -> float:
    """A full state dict gathers one parameter at a time before it moves to rank 0's host memory."""
    if s.plan.strategy not in SHARDS_WEIGHTS:
        return 0.0
    largest = max(stage.embedding, stage.block.gathered / s.dtypes.compute / 3)
    return largest * (s.dtypes.param if s.plan.method is Method.FULL else s.dtypes.compute)
