"""How long a step takes: compute at a published efficiency, communication by link, what stays exposed."""

from __future__ import annotations

from ftdash.engine.plan import Attention, Checkpointing, Method, Offload, PipelineSchedule, Precision
from ftdash.engine.planner.numerics import LOW_PRECISION
from ftdash.engine.planner.result import Collective, StepTime, Traffic
from ftdash.engine.planner.setting import Setting
from ftdash.engine.planner.traffic import Flow, flows

# Share of a link's bandwidth that large NCCL collectives reach (nccl-tests bus bandwidth over the vendor's rate).
LINK_EFFICIENCY = {"nvlink": 0.75, "pcie": 0.55, "network": 0.7}


def model_flops(params: float, tokens: float) -> float:
    """6·Ψ·T: two FLOP a parameter and token forward, four backward (arXiv 2001.08361, section 2.1)."""
    return 6 * params * tokens


def attention_flops(s: Setting, tokens: float) -> float:
    """12·a·d·s a layer and token, forward and backward; half under a causal mask, less inside a window."""
    total = 0.0
    for group in s.shape.groups:
        a = group.layer.attention
        span = min(s.plan.seq_len, 2 * a.window) if a.window else s.plan.seq_len
        total += group.count * 6 * a.heads * (a.head_dim + a.v_head_dim) / 2 * span
    return total * tokens


def matmul_params(s: Setting) -> float:
    """Active parameters that take part in a matrix product: all but the input embedding's lookup."""
    lookup = 0 if s.shape.tied_embeddings else s.shape.embedding_params
    return s.shape.active_params - lookup


def hardware_flops(s: Setting, tokens: float) -> float:
    """What the GPU really computes: 6Ψ, 8Ψ with full recomputation; over a frozen base 4Ψ, with recomputation
    6Ψ, and 6 a trainable parameter."""
    base = matmul_params(s)
    recompute = 2 * base if s.plan.checkpointing is Checkpointing.FULL else 0.0
    attention = attention_flops(s, tokens)
    if s.plan.checkpointing is Checkpointing.FULL:
        attention *= 4 / 3
    if s.plan.method is Method.FULL:
        return (6 * base + recompute) * tokens + attention
    return (4 * base + recompute + 6 * s.trainable_params) * tokens + attention


def peak_flops(s: Setting) -> float:
    """Dense FLOP/s of the units that the plan's precision runs its matrix products on."""
    gpu, precision = s.gpu, s.plan.precision
    if precision is Precision.FP32:
        return gpu.tf32_flops or gpu.fp32_flops
    if precision is Precision.FP16_MIXED or gpu.bf16_flops is None:
        return gpu.fp16_flops
    if precision is Precision.NVFP4 and gpu.fp4_flops:
        return gpu.fp4_flops
    if precision in LOW_PRECISION and gpu.fp8_flops:
        return gpu.fp8_flops
    return gpu.bf16_flops


def efficiency(s: Setting) -> float:
    """The share of peak that the compute itself reaches, communication apart."""
    return 0.5


def bubble(s: Setting) -> float:
    """(p-1)/(m+p-1); interleaving v stages a rank divides the idle part by v (arXiv 2104.04473, section 2.2)."""
    p, m = s.mesh.pp, s.micro_steps
    if p == 1:
        return 0.0
    v = s.plan.virtual_stages if s.plan.pp_schedule is PipelineSchedule.INTERLEAVED else 1
    return (p - 1) / (v * m + p - 1)


def _kind(flow: Flow) -> str:
    name = flow.link.name
    return "nvlink" if name == "nvlink" else "pcie" if name.startswith("pcie") else "network"


def _seconds(flow: Flow, micro_steps: int) -> float:
    rate = flow.link.bytes_per_s * LINK_EFFICIENCY[_kind(flow)]
    calls = flow.messages * (micro_steps if flow.per_micro_step else 1)
    return flow.total(micro_steps) / rate + calls * flow.link.latency_s


def traffic_and_time(s: Setting) -> tuple[Traffic, StepTime]:
    """Traffic by collective with its exposed part, and the time of one optimizer step."""
    m = s.micro_steps
    tokens = s.tokens
    model_parallel = s.mesh.tp * s.mesh.pp
    compute = hardware_flops(s, tokens) / (peak_flops(s) * efficiency(s)) / model_parallel * m
    idle = bubble(s)
    room = compute  # seconds of compute that communication can hide behind
    collectives = []
    exposed_total = communication = 0.0
    by_kind: dict[str, float] = {}
    for flow in flows(s):
        seconds = _seconds(flow, m)
        hidden = min(seconds, room) if flow.overlaps else 0.0
        # Communication on different links runs at once; on one link it queues.
        room -= hidden
        exposed = seconds - hidden
        kind = _kind(flow)
        by_kind[kind] = by_kind.get(kind, 0.0) + exposed
        communication += seconds
        exposed_total += exposed
        collectives.append(
            Collective(flow.name, kind, round(flow.total(m)), round(flow.per_micro_step), seconds, exposed)
        )
    optimizer = optimizer_seconds(s)
    step = (compute + exposed_total) / (1 - idle) + optimizer
    step_tokens = s.plan.micro_batch * s.plan.seq_len * m * s.mesh.data_parallel
    rate = step_tokens / step / s.mesh.world
    useful = model_flops(matmul_params(s), step_tokens) + attention_flops(s, step_tokens)
    slowest = max(by_kind, key=lambda kind: by_kind[kind], default="compute")
    binding = slowest if by_kind.get(slowest, 0.0) > compute else "compute"
    if optimizer > max(compute, exposed_total):
        binding = "memory"
    return (
        Traffic(tuple(collectives)),
        StepTime(
            compute_s=compute,
            communication_s=communication,
            exposed_s=exposed_total,
            step_s=step,
            tokens_per_step=step_tokens,
            tokens_per_s_per_gpu=rate,
            mfu=useful / step / s.mesh.world / peak_flops(s),
            bubble=idle,
            bound_by=binding,
        ),
    )


# DeepSpeed's CPU Adam: about 1e9 parameters a second and node socket (DeepSpeed ZeRO-Offload tutorial).
CPU_ADAM_PARAMS_PER_S = 1e9


def optimizer_seconds(s: Setting) -> float:
    """The optimizer step: bound by memory bandwidth on the GPU, by the host's with offload."""
    share = s.trainable_params / s.mesh.tp / s.mesh.pp / s.mesh.param_shard
    if s.plan.offload is not Offload.NONE:
        return share * s.mesh.ranks_per_node / CPU_ADAM_PARAMS_PER_S
    touched = 2 * (s.dtypes.param + s.dtypes.master + s.dtypes.state) + s.dtypes.grad
    return share * touched / s.gpu.memory_bytes_per_s


__all__ = ["Attention", "attention_flops", "bubble", "hardware_flops", "model_flops", "traffic_and_time"]
