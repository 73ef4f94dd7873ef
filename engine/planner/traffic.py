"""What a rank sends: bytes by collective and link, a micro-step and a step.

Volumes are bytes sent by one rank, ring algorithms: (n-1)/n of the buffer for an all-gather or a
reduce-scatter, twice that for an all-reduce (NCCL; the ZeRO paper, section 7).
"""

from __future__ import annotations

import msgspec

from ftdash.engine.hardware import Link
from ftdash.engine.mesh import ULYSSES
from ftdash.engine.plan import Checkpointing, Offload, Strategy
from ftdash.engine.planner.inventory import Stage, stages
from ftdash.engine.planner.numerics import FSDP_FAMILY
from ftdash.engine.planner.setting import Setting


class Flow(msgspec.Struct, frozen=True):
    """One collective: bytes a rank sends in each micro-step and once a step, its link, and whether it can
    overlap with compute."""

    name: str
    link: Link
    per_micro_step: float
    per_step: float
    overlaps: bool
    messages: float = 0.0  # a micro-step's or step's number of calls, for latency

    def total(self, micro_steps: int) -> float:
        return self.per_micro_step * micro_steps + self.per_step


def link_between(s: Setting, ranks: int, stride: int) -> Link:
    """The slowest link in a group of `ranks` ranks that stand `stride` apart (tp innermost, then cp, shard,
    replicate, pp). A ring over whole nodes leaves each node through the adapters of all its members at
    once."""
    per_node = s.mesh.gpus_per_node
    if ranks * stride <= per_node:
        return s.gpu.intra_node_link(min(ranks * stride, s.mesh.ranks_per_node))
    network = s.gpu.inter_node_link(s.mesh.ranks_per_node)
    members = max(1, per_node // stride)
    inside = s.gpu.intra_node_link(s.mesh.ranks_per_node)
    rate = network.bytes_per_s * members
    return Link(network.name, min(rate, inside.bytes_per_s) if members > 1 else rate, network.latency_s)


def flows(s: Setting) -> tuple[Flow, ...]:
    """Every collective of one step."""
    stage = max(stages(s), key=lambda found: found.whole.gathered)
    return tuple(
        flow
        for flow in (
            *_data_parallel(s, stage),
            *_tensor_parallel(s),
            *_context_parallel(s),
            *_expert_parallel(s),
            *_pipeline(s),
            *_host(s, stage),
        )
        if flow.per_micro_step or flow.per_step
    )


def all_reduce(size: float, n: int) -> float:
    return 2 * size * (n - 1) / n


def gather(size: float, n: int) -> float:
    """Bytes a rank sends in an all-gather or reduce-scatter of a buffer of `size` bytes over n ranks."""
    return size * (n - 1) / n


def _gradient_bytes(s: Setting, stage: Stage, per_param: float) -> tuple[float, float]:
    return stage.whole.trainable_dense * per_param, stage.whole.trainable_experts * per_param


def _data_parallel(s: Setting, stage: Stage) -> list[Flow]:
    mesh, strategy = s.mesh, s.plan.strategy
    inner = mesh.tp
    n, ne = mesh.param_shard, mesh.expert_shard
    dense, experts = _gradient_bytes(s, stage, s.dtypes.reduce)
    link = link_between(s, n, inner)
    calls = stage.layers + 1
    if strategy in (Strategy.NONE, Strategy.DDP):
        ranks = mesh.data_parallel * mesh.cp
        link = link_between(s, ranks, inner)
        return [Flow("all_reduce", link, 0.0, all_reduce(dense + experts, ranks), True, calls)]
    found = []
    if strategy in FSDP_FAMILY or strategy is Strategy.ZERO3:
        experts_gathered = stage.whole.gathered_experts
        once = gather(stage.whole.gathered - experts_gathered, n) + gather(
            s.expert_padding * experts_gathered, ne
        )
        times = 1 if strategy is Strategy.FSDP_NO_RESHARD else 2
        reduced = gather(dense, n) + gather(s.expert_padding * experts, ne)
        found.append(Flow("all_gather", link, times * once, 0.0, True, times * calls))
        found.append(Flow("reduce_scatter", link, reduced, 0.0, True, calls))
        dense, experts = dense / n, experts / ne
    else:
        reduced = gather(dense, n) + gather(experts, ne)
        found.append(Flow("reduce_scatter", link, 0.0, reduced, True, calls))
        weights = sum(_gradient_bytes(s, stage, s.dtypes.compute))
        found.append(Flow("all_gather", link, 0.0, gather(weights, n), strategy is Strategy.MEGATRON, calls))
        dense, experts = dense / n, experts / ne
    if mesh.replicate > 1:
        replicas = link_between(s, mesh.replicate, inner * n)
        found.append(
            Flow(
                "replica_all_reduce", replicas, 0.0, all_reduce(dense + experts, mesh.replicate), True, calls
            )
        )
    return found


def _layers_here(s: Setting) -> float:
    return s.sums.layers / s.mesh.pp


def _recomputes(s: Setting) -> bool:
    return s.plan.checkpointing is Checkpointing.FULL


def _tensor_parallel(s: Setting) -> list[Flow]:
    """Two all-reduces of (B, T, h) a layer forward and two backward (arXiv 1909.08053, section 3); recomputed
    blocks repeat the forward ones."""
    t = s.mesh.tp
    if t == 1:
        return []
    size = s.mean_tokens * s.shape.hidden * s.dtypes.compute
    count = (6 if _recomputes(s) else 4) * _layers_here(s)
    return [Flow("tp_all_reduce", link_between(s, t, 1), count * all_reduce(size, t), 0.0, False, count)]


def _context_parallel(s: Setting) -> list[Flow]:
    """Ring attention (arXiv 2310.01889): every rank passes its keys and values round, and in backward their
    gradients too. DeepSpeed's strategies trade the cut instead: `_ulysses`."""
    cp = s.mesh.cp
    if cp == 1:
        return []
    if s.plan.strategy in ULYSSES:
        return _ulysses(s)
    block = s.mean_tokens * s.sums.kv_width / s.mesh.tp * s.dtypes.compute
    passes = 3 + (1 if _recomputes(s) else 0)
    layers = _layers_here(s)
    return [
        Flow(
            "cp_ring",
            link_between(s, cp, s.mesh.tp),
            passes * (cp - 1) * block * layers,
            0.0,
            True,
            passes * (cp - 1) * layers,
        )
    ]


def _ulysses(s: Setting) -> list[Flow]:
    """Four all-to-alls around attention, of queries, keys, values and its output, and as many for their
    gradients (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2). Fewer KV heads than ranks are repeated to
    one a rank. Attention waits for all of them."""
    cp = s.mesh.cp
    width = s.sums.query_width + s.sums.kv_width * max(1.0, cp / s.sums.kv_heads)
    passes = 3 if _recomputes(s) else 2
    layers = _layers_here(s)
    sent = passes * gather(s.mean_tokens * width / s.mesh.tp * s.dtypes.compute, cp) * layers
    link = link_between(s, cp, s.mesh.tp)
    return [Flow("cp_all_to_all", link, sent, 0.0, False, 4 * passes * layers)]


def _expert_parallel(s: Setting) -> list[Flow]:
    """Dispatch and combine, forward and backward: four all-to-alls of T·k·h·bytes·(ep-1)/ep a MoE layer."""
    ep = s.mesh.ep
    if ep == 1:
        return []
    total = calls = 0.0
    for layers, top_k in s.sums.routed:
        size = s.mean_tokens / s.mesh.tp * top_k * s.shape.hidden * s.dtypes.compute
        count = (6 if _recomputes(s) else 4) * layers / s.mesh.pp
        total += count * size * (ep - 1) / ep
        calls += count
    return [Flow("ep_all_to_all", link_between(s, ep, 1), total, 0.0, False, calls)]


def _pipeline(s: Setting) -> list[Flow]:
    """Activations forward and their gradients backward over each stage edge, once a virtual stage."""
    pp = s.mesh.pp
    if pp == 1:
        return []
    size = s.mean_tokens / s.mesh.tp * s.shape.hidden * s.dtypes.compute
    edges = 2 * s.plan.virtual_stages
    inner = s.mesh.world // pp
    return [Flow("pp_point_to_point", link_between(s, pp, inner), edges * size, 0.0, False, edges)]


def _host(s: Setting, stage: Stage) -> list[Flow]:
    """What offload moves over PCIe: parameters in and gradients out a micro-step, updated weights a step."""
    plan, d = s.plan, s.dtypes
    pcie = Link(f"pcie{s.gpu.pcie_generation}", s.gpu.pcie_bytes_per_s, 1e-5)
    n = s.mesh.param_shard
    whole = stage.whole
    trainable = whole.trainable_dense / n + whole.trainable_experts / s.expert_shard
    found = []
    if plan.offload in (Offload.ALL, Offload.NVME):
        frozen = whole.frozen_dense / n + whole.frozen_experts / s.expert_shard
        shard = trainable * d.param + frozen
        found.append(Flow("host_parameters", pcie, 2 * shard + trainable * d.grad, 0.0, True))
    elif plan.offload is Offload.OPTIMIZER:
        found.append(Flow("host_optimizer", pcie, trainable * d.grad, trainable * d.param, False))
    if plan.activation_offload:
        size = s.mean_tokens / s.mesh.tp * s.shape.hidden * d.stream * _layers_here(s)
        found.append(Flow("host_activations", pcie, 2 * size, 0.0, True))
    return found
