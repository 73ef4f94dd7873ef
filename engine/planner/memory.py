"""Memory of the rank that needs most: every phase of a step as a sum of named terms, and their maximum.

Phases show what is physically there; `model_states` follows ZeRO's accounting, which has the same sum
when backward ends. What a backend holds beyond that is in `buffers` and `gathered`.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ftdash.engine.plan import Checkpointing, Offload, Optimizer, Strategy
from ftdash.engine.planner import transients
from ftdash.engine.planner.activations import block, logits_bytes
from ftdash.engine.planner.host import host_ram
from ftdash.engine.planner.inventory import Stage, Unit, stages
from ftdash.engine.planner.numerics import (
    FSDP_FAMILY,
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    SHARDS_WEIGHTS,
)
from ftdash.engine.planner.pipeline import edge_bytes, micro_batches_in_flight
from ftdash.engine.planner.reserved import (
    FIXED_SEGMENTS,
    allocated_bytes,
    context_bytes,
    imbalance_bytes,
    reserved_bytes,
)
from ftdash.engine.planner.result import Memory, ModelStates, Phase, PhaseName
from ftdash.engine.planner.setting import Setting


class States(msgspec.Struct, frozen=True):
    """Bytes at rest on one rank."""

    weights: float
    gradients: float
    optimizer: float


def _over(s: Setting, sharded_by: frozenset[Strategy]) -> tuple[float, float]:
    """Over how many ranks dense parameters and experts are divided."""
    return (s.mesh.param_shard, s.expert_shard) if s.plan.strategy in sharded_by else (1, 1)


def _spread(whole: Unit, per_param: float, over: tuple[float, float]) -> float:
    return per_param * (whole.trainable_dense / over[0] + whole.trainable_experts / over[1])


def frozen_bytes(s: Setting, stage: Stage) -> float:
    """The frozen base at rest. Packed uint8 weights are no float tensors: FSDP2 leaves them whole on each
    rank."""
    dense, experts = _over(s, SHARDS_WEIGHTS)
    whole = stage.whole
    total = whole.frozen_dense / dense + whole.frozen_experts / experts
    if s.plan.quant_storage == "uint8" and s.plan.strategy in FSDP_FAMILY:
        total += whole.packed_dense * (1 - 1 / dense) + whole.packed_experts * (1 - 1 / experts)
    return total


def states_at_rest(s: Setting, stage: Stage) -> States:
    """Physical bytes of weights, gradients and optimizer state on the GPU, after offload."""
    d, whole = s.dtypes, stage.whole
    weights = frozen_bytes(s, stage) + _spread(whole, d.param, _over(s, SHARDS_WEIGHTS))
    gradients = 0.0 if s.plan.optimizer_in_backward else _spread(whole, d.grad, _over(s, SHARDS_GRADIENTS))
    over = _over(s, SHARDS_OPTIMIZER)
    state = 0.0 if d.paged_state else d.state
    optimizer = _spread(whole, d.master + state, over)
    if s.plan.optimizer is Optimizer.MUON:
        # Muon keeps Adam's two moments for what is no matrix of a block: embeddings and head.
        optimizer += stage.root.trainable_dense * state / over[0]
    return _after_offload(s, States(weights, gradients, optimizer))


def _after_offload(s: Setting, held: States) -> States:
    """ZeRO-2 and 3 move gradients with the optimizer, FSDP everything together."""
    offload = s.plan.offload
    if offload is Offload.NONE:
        return held
    with_gradients = offload is not Offload.OPTIMIZER or s.plan.strategy in (Strategy.ZERO2, Strategy.ZERO3)
    return States(
        weights=held.weights if offload is Offload.OPTIMIZER else 0.0,
        gradients=0.0 if with_gradients else held.gradients,
        optimizer=0.0,
    )


def model_states(s: Setting, stage: Stage) -> ModelStates:
    """ZeRO's 2 + 2 + 12 by stage (arXiv 1910.02054, section 3), with the plan's own dtypes and offload."""
    d, whole = s.dtypes, stage.whole
    weight = d.zero_weight
    held = 0 if s.plan.optimizer_in_backward else d.grad
    gradient = held if s.plan.strategy is Strategy.MEGATRON else min(held, weight)
    rest = d.param + d.master + held + (0.0 if d.paged_state else d.state) - weight - gradient
    found = _after_offload(
        s,
        States(
            weights=frozen_bytes(s, stage) + _spread(whole, weight, _over(s, SHARDS_WEIGHTS)),
            gradients=_spread(whole, gradient, _over(s, SHARDS_GRADIENTS)),
            optimizer=_spread(whole, rest, _over(s, SHARDS_OPTIMIZER)),
        ),
    )
    return ModelStates(round(found.weights), round(found.gradients), round(found.optimizer))


class StageActivations(msgspec.Struct, frozen=True):
    saved: float  # of all micro-batches in flight
    one_block: float  # what one block alone has saved
    live: float  # while one block is recomputed and goes backward
    retained: float  # inputs and gradients of blocks that went backward, held until the last one has
    passing: float  # temporaries of one block's forward
    passing_whole: float  # of them, what is at full length under tensor parallelism
    logits_forward: float
    logits_backward: float
    logits_reserved: float


def stage_activations(s: Setting, stage: Stage, *, first: bool) -> StageActivations:
    """Bytes on one rank. Tensor parallelism cuts them by its degree (with sequence parallelism between the
    blocks, arXiv 2205.05198); the logits are cut by it too, and by CP, never by data parallelism.

    Expert adapters on 3-D stacks make an adapted copy of the layer's whole stack, which autograd keeps, and
    its gradient (peft, `ParamWrapper`): E·3·h·f elements whatever the tokens.
    """
    tp = s.mesh.tp
    saved = live = one = passing = passing_whole = copies = copy = 0.0
    for index, (count, layer, unit) in enumerate(stage.blocks):
        adapted = None if s.lora is None else s.lora.layers[index].adapted
        acts = block(s, layer, adapted)
        kept = acts.saved / tp + acts.saved_whole
        saved += count * kept
        live = max(live, acts.live / tp + acts.live_whole)
        passing = max(passing, acts.passing / tp)
        passing_whole = max(passing_whole, acts.passing_whole)
        one = max(one, kept)
        copies += count * unit.adapted_experts * s.dtypes.compute
        copy = max(copy, unit.adapted_experts * s.dtypes.compute)
    in_flight = micro_batches_in_flight(s) if first else 1.0
    saved *= s.tokens * in_flight
    if s.plan.activation_offload:
        # What is on its way: the block that computes and the two that are being copied.
        saved = min(saved, 3 * one * s.tokens)
    entries = 0.0
    if stage.head:
        entries = s.tokens * s.shape.vocab / tp
        # The final norm keeps its fp32 input, the head its own: whole where DTensor gathered it.
        head_over = tp if s.plan.strategy is Strategy.MEGATRON else 1
        saved += s.tokens * s.shape.hidden * ((4 + s.dtypes.compute) / tp + s.dtypes.compute / head_over)
    recomputes = s.plan.checkpointing is not Checkpointing.NONE
    logits = logits_bytes(s)
    return StageActivations(
        saved + (0.0 if recomputes else copies),
        one * s.tokens + (0.0 if recomputes else copy),
        live * s.tokens + (2 * copy if recomputes else copy),
        retained_inputs(s, stage),
        passing * s.tokens,
        passing_whole * s.tokens,
        logits.forward * entries,
        logits.backward * entries,
        logits.reserved * entries,
    )


def retained_inputs(s: Setting, stage: Stage) -> float:
    """What FSDP1 holds of every block that went backward, until the whole backward is over.

    A frozen unit re-shards through a hook on its inputs' gradients. Where the model checkpoints its blocks
    itself, re-entrantly (transformers' `gradient_checkpointing` before 5), that input is a detached leaf, and
    the hook keeps its AccumulateGrad node, with it the input and its gradient
    (torch/distributed/fsdp/_runtime_utils.py, `_register_post_backward_reshard_only_hook`;
    torch/autograd/graph.py, `register_multi_grad_hook`). PyTorch's own wrapper sits inside the
    unit, whose inputs are no leaves then.
    """
    plan = s.plan
    frozen_units = plan.strategy is Strategy.FSDP1 and s.lora is not None
    held = plan.reentrant and plan.checkpointing is Checkpointing.FULL and not plan.activation_offload
    if not (frozen_units and held):
        return 0.0
    return 2 * max(0.0, stage.layers - 1) * s.tokens / s.mesh.tp * s.shape.hidden * s.dtypes.stream


def phases_of(s: Setting, stage: Stage, *, first: bool) -> tuple[Phase, ...]:
    """Every phase of one optimizer step, of loading and of saving, on a rank of this stage."""
    rest = states_at_rest(s, stage)
    acts = stage_activations(s, stage, first=first)
    g = transients.gathered(s, stage)
    b = transients.buffers(s, stage)
    always = b.always + edge_bytes(s, stage)
    w, o, grads = rest.weights, rest.optimizer, rest.gradients
    persistent = s.micro_steps > 1 or s.plan.strategy is Strategy.MEGATRON
    early = grads if persistent else 0.0
    # FSDP reduces on a stream of its own: its gradients' blocks stay with that stream after they are freed,
    # as the all-gather's stay with the copy-in stream
    # (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    pools = g.pool + (grads - early if s.plan.strategy in FSDP_FAMILY else 0.0)
    pool = g.pool
    if s.plan.whole_graph:  # copies in and out on the stream that computes (torchtitan's SimpleFSDP)
        pools = pool = 0.0

    temporaries = 0.0
    if s.plan.strategy in FIXED_SEGMENTS:
        temporaries = acts.passing_whole + (0.0 if s.plan.compile else acts.passing)

    # What FSDP1 flattened stays cached for the stream that computes; all-gathers run on their own.
    flattened = max(g.running, g.backward) + pools if s.plan.strategy is Strategy.FSDP1 else 0.0

    def phase(
        name: PhaseName,
        *,
        weights: float = w,
        optimizer: float = o,
        gradients: float = early,
        activations: float = 0.0,
        logits: float = 0.0,
        gathered: float = 0.0,
        buffers: float = always,
        cached: float = pools,
    ) -> Phase:
        return Phase(
            name,
            round(weights),
            round(gradients),
            round(optimizer),
            round(activations),
            round(logits),
            round(gathered),
            round(buffers),
            round(cached),
        )

    def larger(one: Phase, other: Phase) -> Phase:
        chosen, rest = (one, other) if one.total >= other.total else (other, one)
        held = rest.total + rest.cached - chosen.total
        return replace(chosen, cached=held) if held > chosen.cached else chosen

    graph = always + b.casts
    # Before the logits there is one more gathered block; whichever of the two is larger ends forward.
    running = g.running > g.forward + acts.logits_forward
    forward_end = phase(
        PhaseName.FORWARD_END,
        activations=acts.saved,
        logits=0.0 if running else acts.logits_forward,
        gathered=g.running if running else g.forward,
        buffers=graph,
    )
    at_loss = phase(
        PhaseName.BACKWARD_START,
        activations=acts.saved,
        logits=acts.logits_backward,
        gathered=g.loss,
        buffers=graph,
        cached=pools + acts.logits_reserved - acts.logits_backward + temporaries,
    )
    last_block = phase(
        PhaseName.BACKWARD_START,
        activations=acts.saved + acts.live,
        gathered=g.backward,
        buffers=graph + b.head_gradient + b.block_gradient,
    )
    first_block = phase(
        PhaseName.BACKWARD_END,
        gradients=max(0.0, grads - b.block_gradient_at_rest),
        activations=acts.one_block + acts.live + acts.retained,
        gathered=g.backward_end,
        buffers=always + b.casts_at_end + b.head_gradient_at_end + b.block_gradient,
        cached=pool,
    )
    root_reduced = phase(
        PhaseName.BACKWARD_END, gradients=grads, gathered=g.root_end, buffers=always + b.root, cached=pool
    )
    step = phase(PhaseName.OPTIMIZER_STEP, gradients=grads, buffers=always + b.step, cached=pool)
    load = phase(
        PhaseName.LOAD,
        weights=transients.load_bytes(s, stage, w),
        optimizer=0.0,
        gradients=0.0,
        buffers=0.0,
        cached=flattened,
    )
    save = phase(PhaseName.SAVE, gradients=0.0, gathered=transients.save_gather(s, stage), cached=0.0)
    return (
        load,
        forward_end,
        larger(at_loss, last_block),
        larger(first_block, root_reduced),
        step,
        save,
    )


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
    allocated = allocated_bytes(s, peak)
    reserved, squeezed = reserved_bytes(s, best, allocated)
    return Memory(
        model_states=model_states(s, best_stage),
        phases=best,
        peak_phase=peak.name,
        allocated=allocated,
        reserved=reserved,
        squeezed=squeezed,
        context=context_bytes(s),
        capacity=s.gpu.memory_bytes,
        host=host_ram(s),
        imbalance=imbalance_bytes(s, peak),
    )
