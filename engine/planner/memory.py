"""Memory of the rank that needs most: every phase of a step as a sum of named terms, and their maximum.

Phases show what is physically there; `model_states` follows ZeRO's accounting, which has the same sum
when backward ends. What a backend holds beyond that is in `buffers` and `gathered`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftdash.engine.plan import Offload, Optimizer, PipelineSchedule, Strategy
from ftdash.engine.planner import transients
from ftdash.engine.planner.activations import block_activations, logits_bytes
from ftdash.engine.planner.host import host_ram
from ftdash.engine.planner.inventory import Stage, stages
from ftdash.engine.planner.numerics import (
    FSDP_FAMILY,
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    SHARDS_WEIGHTS,
)
from ftdash.engine.planner.reserved import FIXED_SEGMENTS, context_bytes, imbalance_bytes, reserved_bytes
from ftdash.engine.planner.result import Memory, ModelStates, Phase, PhaseName
from ftdash.engine.planner.setting import Setting


@dataclass(frozen=True, slots=True)
class States:
    """Bytes at rest on one rank."""

    weights: float
    gradients: float
    optimizer: float


def shards(s: Setting, sharded: bool) -> tuple[int, int]:
    """Over how many ranks dense parameters and experts are divided."""
    if sharded and s.plan.strategy is not Strategy.NONE:
        return s.mesh.param_shard, s.mesh.expert_shard
    if s.mesh.ep > 1 or s.plan.strategy in (Strategy.NONE, Strategy.DDP):
        return 1, 1
    return 1, 1


def _spread(unit_total: Stage, per_param: float, over: tuple[int, int]) -> float:
    dense = unit_total.total("trainable_dense") * per_param / over[0]
    return dense + unit_total.total("trainable_experts") * per_param / over[1]


def frozen_bytes(s: Setting, stage: Stage) -> float:
    """The frozen base at rest. Packed uint8 weights are no float tensors: FSDP2 leaves them whole on each rank."""
    over = shards(s, s.plan.strategy in SHARDS_WEIGHTS)
    units = [(count, unit) for count, _, unit in stage.blocks] + [(1.0, stage.root)]
    total = sum(count * unit.frozen_bytes(s, *over) for count, unit in units)
    if s.dtypes.quant is not None and s.plan.quant_storage == "uint8" and s.plan.strategy in FSDP_FAMILY:
        packed = stage.total("quantised_dense"), stage.total("quantised_experts")
        total += s.dtypes.quant * (packed[0] * (1 - 1 / over[0]) + packed[1] * (1 - 1 / over[1]))
    return total


def states_at_rest(s: Setting, stage: Stage) -> States:
    """Physical bytes of weights, gradients and optimizer state on the GPU, after offload."""
    d, strategy, offload = s.dtypes, s.plan.strategy, s.plan.offload
    weights = frozen_bytes(s, stage) + _spread(stage, d.param, shards(s, strategy in SHARDS_WEIGHTS))
    gradients = _spread(stage, d.grad, shards(s, strategy in SHARDS_GRADIENTS))
    state = 0.0 if d.paged_state else d.state
    optimizer = _spread(stage, d.master + state, shards(s, strategy in SHARDS_OPTIMIZER))
    if not d.paged_state and s.plan.optimizer is Optimizer.MUON:
        # Muon keeps Adam's two moments for what is no matrix of a block: embeddings and head.
        optimizer += stage.root.trainable * state / shards(s, strategy in SHARDS_OPTIMIZER)[0]
    if s.plan.optimizer_in_backward:
        gradients = 0.0
    if offload is not Offload.NONE:
        optimizer = 0.0
        if strategy in (Strategy.ZERO2, Strategy.ZERO3) or offload is not Offload.OPTIMIZER:
            gradients = 0.0
    if offload in (Offload.ALL, Offload.NVME):
        weights = 0.0
    return States(weights, gradients, optimizer)


def model_states(s: Setting, stage: Stage) -> ModelStates:
    """ZeRO's 2 + 2 + 12 by stage (arXiv 1910.02054, section 3), with the plan's own dtypes and offload."""
    d, strategy, offload = s.dtypes, s.plan.strategy, s.plan.offload
    weight = d.zero_weight
    gradient = (
        0
        if s.plan.optimizer_in_backward
        else d.grad
        if strategy is Strategy.MEGATRON
        else min(d.grad, weight)
    )
    rest = d.resident - weight - (d.grad if s.plan.optimizer_in_backward else gradient)
    if d.paged_state:
        rest -= d.state
    weights = frozen_bytes(s, stage) + _spread(stage, weight, shards(s, strategy in SHARDS_WEIGHTS))
    gradients = _spread(stage, gradient, shards(s, strategy in SHARDS_GRADIENTS))
    optimizer = _spread(stage, rest, shards(s, strategy in SHARDS_OPTIMIZER))
    if offload is not Offload.NONE:
        optimizer = 0.0
        if strategy in (Strategy.ZERO2, Strategy.ZERO3) or offload is not Offload.OPTIMIZER:
            gradients = 0.0
    if offload in (Offload.ALL, Offload.NVME):
        weights = 0.0
    return ModelStates(round(weights), round(gradients), round(optimizer))


@dataclass(frozen=True, slots=True)
class StageActivations:
    saved: float  # of all micro-batches in flight
    one_block: float  # what one block alone has saved
    live: float  # while one block is recomputed and goes backward
    logits_forward: float
    logits_backward: float
    logits_reserved: float


def stage_activations(s: Setting, stage: Stage, *, first: bool) -> StageActivations:
    """Bytes on one rank. Tensor parallelism cuts them by its degree (with sequence parallelism between the
    blocks, arXiv 2205.05198); the logits are cut by it too, and by CP, never by data parallelism."""
    tp = s.mesh.tp
    saved = live = one = 0.0
    for index, (count, layer, _) in enumerate(stage.blocks):
        adapted = None if s.lora is None else s.lora.layers[index].adapted
        block = block_activations(s, layer, adapted)
        kept = block.saved / tp + block.saved_whole
        saved += count * kept
        live = max(live, block.live / tp + block.live_whole)
        one = max(one, kept)
    in_flight = micro_batches_in_flight(s) if first else 1.0
    saved *= s.tokens * in_flight
    if s.plan.activation_offload:
        # What is on its way: the block that computes and the two that are being copied.
        saved = min(saved, 3 * one * s.tokens)
    entries = 0.0
    if stage.head:
        entries = s.tokens * s.shape.vocab / tp
        # The final norm keeps its fp32 input, the head its own.
        saved += s.tokens / tp * s.shape.hidden * (4 + 2 * s.dtypes.compute)
    logits = logits_bytes(s)
    return StageActivations(
        saved,
        one * s.tokens,
        live * s.tokens,
        logits.forward * entries,
        logits.backward * entries,
        logits.reserved * entries,
    )


def micro_batches_in_flight(s: Setting) -> float:
    """Micro-batches whose activations the first stage holds: min(m, p) under 1F1B (arXiv 2104.04473, section
    2.2), times 1 + (p - 1)/(p·v) interleaved, all m under GPipe."""
    p, m = s.mesh.pp, s.micro_steps
    if p == 1:
        return 1.0
    if s.plan.pp_schedule is PipelineSchedule.GPIPE:
        return float(m)
    flight = float(min(m, p))
    if s.plan.pp_schedule is PipelineSchedule.INTERLEAVED:
        flight = min(m, flight * (1 + (p - 1) / (p * s.plan.virtual_stages)))
    return flight


def phases_of(s: Setting, stage: Stage, *, first: bool) -> tuple[Phase, ...]:
    """Every phase of one optimizer step, of loading and of saving, on a rank of this stage."""
    rest = states_at_rest(s, stage)
    acts = stage_activations(s, stage, first=first)
    g = transients.gathered(s, stage)
    b = transients.buffers(s, stage)
    w, o, grads = rest.weights, rest.optimizer, rest.gradients
    persistent = s.micro_steps > 1 or s.plan.strategy is Strategy.MEGATRON
    early = grads if persistent else 0.0
    # FSDP reduces on a stream of its own: its gradients' blocks stay with that stream after they are freed,
    # as the all-gather's stay with the copy-in stream (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    pools = g.pool + (grads - early if s.plan.strategy in FSDP_FAMILY else 0.0)

    temporaries = acts.live if s.plan.strategy in FIXED_SEGMENTS else 0.0

    def phase(name: PhaseName, **terms: float) -> Phase:
        return Phase(name, **{key: round(value) for key, value in terms.items()})

    def larger(one: Phase, other: Phase) -> Phase:
        return one if one.total >= other.total else other

    forward_end = phase(
        PhaseName.FORWARD_END,
        weights=w,
        optimizer=o,
        gradients=early,
        activations=acts.saved,
        logits=acts.logits_forward,
        gathered=g.forward,
        buffers=b.always + b.casts,
        cached=pools,
    )
    at_loss = phase(
        PhaseName.BACKWARD_START,
        weights=w,
        optimizer=o,
        gradients=early,
        activations=acts.saved,
        logits=acts.logits_backward,
        gathered=g.loss,
        buffers=b.always + b.casts,
        cached=pools + acts.logits_reserved - acts.logits_backward + temporaries,
    )
    last_block = phase(
        PhaseName.BACKWARD_START,
        weights=w,
        optimizer=o,
        gradients=early,
        activations=acts.saved + acts.live,
        gathered=g.backward,
        buffers=b.always + b.casts + b.head_gradient + b.block_gradient,
        cached=pools,
    )
    first_block = phase(
        PhaseName.BACKWARD_END,
        weights=w,
        optimizer=o,
        gradients=max(0.0, grads - b.block_gradient_at_rest),
        activations=acts.one_block + acts.live,
        gathered=g.backward_end,
        buffers=b.always + b.casts_at_end + b.head_gradient + b.block_gradient,
        cached=g.pool,
    )
    root_reduced = phase(
        PhaseName.BACKWARD_END,
        weights=w,
        optimizer=o,
        gradients=grads,
        gathered=g.root_end,
        buffers=b.always + b.root,
        cached=g.pool,
    )
    step = phase(
        PhaseName.OPTIMIZER_STEP,
        weights=w,
        optimizer=o,
        gradients=grads,
        buffers=b.always + b.step,
        cached=g.pool,
    )
    load = phase(PhaseName.LOAD, weights=transients.load_bytes(s, stage, w))
    save = phase(
        PhaseName.SAVE, weights=w, optimizer=o, gathered=transients.save_gather(s, stage), buffers=b.always
    )
    return (load, forward_end, larger(at_loss, last_block), larger(first_block, root_reduced), step, save)


def memory_of(s: Setting) -> Memory:
    """The peak over phases of the stage that needs most, with reserved, context and host RAM around it."""
    best: tuple[Phase, ...] = ()
    best_stage: Stage | None = None
    for index, stage in enumerate(stages(s)):
        found = phases_of(s, stage, first=index == 0)
        if not best or max(p.total for p in found) > max(p.total for p in best):
            best, best_stage = found, stage
    assert best_stage is not None
    peak = max(best, key=lambda phase: phase.total)
    allocated = peak.total + transients.WORKSPACE_BYTES
    return Memory(
        model_states=model_states(s, best_stage),
        phases=best,
        peak_phase=peak.name,
        allocated=allocated,
        reserved=reserved_bytes(s, best, allocated),
        context=context_bytes(s),
        capacity=s.gpu.memory_bytes,
        host_ram_per_node=host_ram(s),
        imbalance=imbalance_bytes(s, peak),
    )
