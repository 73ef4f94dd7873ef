"""How long a step takes: compute at a published efficiency, communication by link, what stays exposed."""

from __future__ import annotations

import math

from ftdash.engine.links import LinkRate, rates_of
from ftdash.engine.model.shape import LayerShape, Linear, Role
from ftdash.engine.plan import Checkpointing, Method, Offload, Optimizer, PipelineSchedule, Precision
from ftdash.engine.planner.activations import adapter_saved, block, logits_bytes
from ftdash.engine.planner.numerics import LOW_PRECISION, SHARDS_OPTIMIZER
from ftdash.engine.planner.result import Collective, StepTime, Traffic
from ftdash.engine.planner.setting import Setting
from ftdash.engine.planner.traffic import Flow, flows

# Share of a link's bandwidth that large NCCL collectives reach (nccl-tests bus bandwidth over the vendor's
# rate).
LINK_EFFICIENCY = {"nvlink": 1.0, "pcie": 0.8, "network": 0.8}
# Without peer-to-peer every byte goes through host memory and back. An assumption: it leaves two RTX 4090 in
# full slots the 10 GB/s that fsdp_qlora's runs agree with; eight RTX 5090 have 28 of 63 (NVIDIA/nccl#1639).
NO_PEER_FACTOR = 0.4


def model_flops(params: float, tokens: float) -> float:
    """6·Ψ·T: two FLOP a parameter and token forward, four backward (arXiv 2001.08361, section 2.1)."""
    return 6 * params * tokens


def attention_flops(s: Setting, tokens: float) -> float:
    """12·a·d·s a layer and token, forward and backward; half under a causal mask, less inside a window."""
    length = s.rows.attended
    return tokens * sum(
        weight * (min(length, 2 * window) if window else length) for weight, window in s.sums.attention_flops
    )


def matmul_params(s: Setting) -> float:
    """Active parameters that take part in a matrix product: all but the input embedding's lookup."""
    return s.sums.dense_products + s.sums.expert_products


def peak_flops(s: Setting) -> float:
    """Dense FLOP/s of the units that the plan's precision runs its matrix products on."""
    gpu, precision = s.gpu, s.plan.precision
    if precision is Precision.FP32:
        return gpu.tf32_flops or gpu.fp32_flops
    if s.dtypes.compute == 4:
        return gpu.fp32_flops  # not asked for by name, so PyTorch's default: no TF32
    if precision is Precision.FP16_MIXED or gpu.bf16_flops is None:
        return gpu.fp16_flops
    if precision is Precision.NVFP4 and gpu.fp4_flops:
        return gpu.fp4_flops
    if precision in LOW_PRECISION and gpu.fp8_flops:
        return gpu.fp8_flops
    return gpu.bf16_flops


# Share of the vendor's dense rate that large matrix products sustain under training's power draw, by
# architecture: fitted to published runs (MosaicML llm-foundry, torchtune, torchtitan), whose whole-step
# figures are lower.
MATMUL_EFFICIENCY = {"a": 0.76, "h": 0.60, "b": 0.56, "g": 0.56}
MATMUL_EFFICIENCY_OTHER = 0.95  # workstation and older cards reach their lower rates more easily
LOW_PRECISION_FACTOR = {Precision.FP8: 0.68, Precision.MXFP8: 0.72, Precision.NVFP4: 0.45}
# FlashAttention-2, causal, forward and backward together (arXiv 2307.08691, figures 4 to 6; Hopper without
# FA3).
ATTENTION_EFFICIENCY = {"a": 0.50, "h": 0.28, "b": 0.28, "g": 0.28}
ATTENTION_EFFICIENCY_OTHER = 0.5
# How often pointwise kernels read or write what autograd saves, forward and backward.
POINTWISE_PASSES = 9.0
POINTWISE_PASSES_COMPILED = 4.0
WIDTH_HALF = 400  # hidden size at which products lose half of their efficiency
EXPERT_WIDTH_HALF = 4500  # the same for the width of one routed expert
TENSOR_SPLIT_LOSS = 0.16  # per doubling of TP: narrower products, gathers between them
CONTENTION = 0.5  # of the hidden communication, as NCCL's kernels take SMs and bandwidth from the compute


def _architecture(s: Setting) -> str:
    return s.gpu.name[0] if s.gpu.name[:2] in ("a1", "a8", "h1", "h2", "b2", "gb") else ""


def compute_seconds(s: Setting, tokens: float) -> float:
    """Matrix products, attention and pointwise kernels of one micro-step on one rank."""
    kind = _architecture(s)
    rate = peak_flops(s)
    matmul = MATMUL_EFFICIENCY.get(kind, MATMUL_EFFICIENCY_OTHER) * LOW_PRECISION_FACTOR.get(
        s.plan.precision, 1.0
    )
    matmul *= s.shape.hidden / (s.shape.hidden + WIDTH_HALF)
    matmul /= 1 + TENSOR_SPLIT_LOSS * math.log2(s.mesh.tp)
    passes = _passes(s)
    dense, experts = s.sums.dense_products, s.sums.expert_products
    seconds = passes * dense / (rate * matmul)
    if s.lora is not None:
        seconds += 6 * s.trainable_params / (matmul * (s.gpu.fp32_flops if _fp32_adapters(s) else rate))
    if experts:
        width = s.sums.expert_width
        seconds += passes * experts / (rate * matmul * width / (width + EXPERT_WIDTH_HALF))
    attention = attention_flops(s, 1.0) * (4 / 3 if s.plan.checkpointing is Checkpointing.FULL else 1.0)
    # Attention runs in 16 bits under every mixed precision, 8- and 4-bit ones included.
    half_rate = rate if s.dtypes.compute == 4 else s.gpu.bf16_flops or s.gpu.fp16_flops
    seconds += attention / (half_rate * ATTENTION_EFFICIENCY.get(kind, ATTENTION_EFFICIENCY_OTHER))
    seconds += _pointwise_bytes(s) / s.gpu.memory_bytes_per_s
    return (tokens * seconds + _dequantise_seconds(s)) / (s.mesh.tp * s.mesh.pp)


def _dequantise_seconds(s: Setting) -> float:
    """Unpacking a k-bit base: read packed, write and read 16 bits, in forward, backward and recomputation."""
    if s.dtypes.quant is None:
        return 0.0
    times = 2 + (s.plan.checkpointing is not Checkpointing.NONE)
    return times * matmul_params(s) * (s.dtypes.quant + 4) / s.gpu.memory_bytes_per_s


def _passes(s: Setting) -> float:
    """FLOP per parameter and token: 2 forward, 2 for the input's gradient, 2 for the weight's where it
    trains, 2 more where a block is recomputed and half of that where every second product is kept."""
    base = 6.0 if s.plan.method is Method.FULL else 4.0
    selective = 0.0 if s.plan.save_every_product else 1.0
    again = {Checkpointing.NONE: 0.0, Checkpointing.SELECTIVE: selective, Checkpointing.FULL: 2.0}
    return base + again[s.plan.checkpointing]


def _pointwise_bytes(s: Setting) -> float:
    """Bytes that norms, rotations, activations and the loss move per token."""
    passes = POINTWISE_PASSES_COMPILED if s.plan.compile else POINTWISE_PASSES
    saved = adapters = 0.0
    for index, group in enumerate(s.shape.groups):
        adapted = None if s.lora is None else s.lora.layers[index].adapted
        everything = block(s, group.layer, adapted).everything
        if adapted and not s.plan.compile:
            everything -= adapter_saved(s, group.layer, adapted)
            adapters += group.count * _adapter_bytes(s, group.layer, adapted)
        saved += group.count * everything
    if s.plan.checkpointing is not Checkpointing.NONE:
        passes *= 4 / 3
    return passes * saved + adapters + 2 * logits_bytes(s).backward * s.shape.vocab


def _fp32_adapters(s: Setting) -> bool:
    """peft's fp32 adapters on a 16-bit base: without autocast they compute in fp32."""
    return s.plan.precision is Precision.BF16 and s.dtypes.param == 4


def _adapter_bytes(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...]) -> float:
    """Bytes per token that eager adapters of one block move, kernel by kernel, in forward, backward and
    recomputation: result + B(A(dropout(x))) * scaling (peft, tuners/lora/layer.py). Inputs: cast, dropout
    with its mask, A; outputs: B, scaling, sum and the cast back; backward the same the other way, with the
    sum into the input's gradient.
    """
    c = s.dtypes.compute
    a = 4 if _fp32_adapters(s) else c
    cast = c + a if a != c else 0
    dropped = 2 * a + 1 if s.plan.lora_dropout else 0
    forward_in, forward_out = cast + dropped + a, 3 * a + (c + 2 * a if a == c else c + 3 * a + c)
    backward_in, backward_out = 2 * a + dropped + cast + 3 * c, cast + 4 * a
    forwards = 1 if s.plan.checkpointing is Checkpointing.NONE else 2
    copies = layer.moe.top_k if layer.moe is not None else 1
    return sum(
        (copies if x.role is Role.EXPERT else 1)
        * (x.d_in * (forwards * forward_in + backward_in) + x.d_out * (forwards * forward_out + backward_out))
        for x in adapted
    )


def bubble(s: Setting) -> float:
    """(p-1)/(m+p-1); interleaving v stages a rank divides the idle part by v (arXiv 2104.04473, section
    2.2)."""
    p, m = s.mesh.pp, s.micro_steps
    if p == 1:
        return 0.0
    v = s.plan.virtual_stages if s.plan.pp_schedule is PipelineSchedule.INTERLEAVED else 1
    return (p - 1) / (v * m + p - 1)


def link_kind(flow: Flow) -> str:
    """ "nvlink", "pcie" or "network"."""
    name = flow.link.name
    return "nvlink" if name == "nvlink" else "pcie" if name.startswith("pcie") else "network"


def flow_seconds(s: Setting, flow: Flow, micro_steps: int, rates: tuple[LinkRate, ...]) -> float:
    """Bytes over the link's rate, plus a latency for every call; `rates` are those measured for the GPU."""
    rate = flow.link.bytes_per_s * link_efficiency(s, flow, rates)
    calls = flow.messages * (micro_steps if flow.per_micro_step else 1)
    return flow.total(micro_steps) / rate + calls * flow.link.latency_s


def link_efficiency(s: Setting, flow: Flow, rates: tuple[LinkRate, ...]) -> float:
    """Share of the link's nominal rate that collectives reach: measured by nccl-tests, or else assumed."""
    kind, to_host = link_kind(flow), flow.name.startswith("host")
    for found in () if to_host else rates:
        if found.link == kind:
            nominal = s.gpu.inter_node_link(s.mesh.ranks_per_node) if kind == "network" else flow.link
            return found.bytes_per_s / nominal.bytes_per_s
    if kind == "pcie" and not s.gpu.peer_to_peer and not to_host:
        return LINK_EFFICIENCY[kind] * NO_PEER_FACTOR
    return LINK_EFFICIENCY[kind]


def traffic_and_time(s: Setting) -> tuple[Traffic, StepTime]:
    """Traffic by collective with its exposed part, and the time of one optimizer step."""
    m = s.micro_steps
    compute = compute_seconds(s, s.mean_tokens) * m
    idle = bubble(s)
    room = compute  # seconds of compute that each micro-step's communication can hide behind
    room_at_end = compute / m * 2 / 3  # what is sent once a step hides behind the last backward only
    collectives = []
    exposed_total = communication = hidden_total = 0.0
    by_kind: dict[str, float] = {}
    rates = rates_of(s.gpu.name)
    for flow in flows(s):
        seconds = flow_seconds(s, flow, m, rates)
        available = min(room, room_at_end) if not flow.per_micro_step else room
        hidden = min(seconds, available) if flow.overlaps else 0.0
        room -= hidden
        room_at_end -= 0.0 if flow.per_micro_step else hidden
        exposed = seconds - hidden
        kind = link_kind(flow)
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        communication += seconds
        exposed_total += exposed
        hidden_total += hidden
        collectives.append(
            Collective(flow.name, kind, round(flow.total(m)), round(flow.per_micro_step), seconds, exposed)
        )
    optimizer = optimizer_seconds(s)
    step = (compute + exposed_total + CONTENTION * hidden_total) / (1 - idle) + optimizer
    step_tokens = round(s.rows.processed * m * s.mesh.data_parallel)
    useful = model_flops(matmul_params(s), step_tokens) + attention_flops(s, step_tokens)
    return (
        Traffic(tuple(collectives)),
        StepTime(
            compute_s=compute,
            communication_s=communication,
            exposed_s=exposed_total,
            step_s=step,
            tokens_per_step=step_tokens,
            useful_share=s.rows.useful_share,
            tokens_per_s_per_gpu=step_tokens / step / s.mesh.world,
            mfu=useful / step / s.mesh.world / peak_flops(s),
            bubble=idle,
            bound_by=_bound_by(compute, optimizer, by_kind),
        ),
    )


def _bound_by(compute: float, optimizer: float, by_kind: dict[str, float]) -> str:
    slowest = max(by_kind, key=lambda kind: by_kind[kind], default="compute")
    if optimizer > max(compute, by_kind.get(slowest, 0.0)):
        return "memory"
    return slowest if by_kind.get(slowest, 0.0) > compute else "compute"


# DeepSpeed's CPU Adam and PyTorch's on a dual-socket host: parameters a second and node (torchtune's 70B
# run with offloaded optimizer steps 3.4e9 a second).
CPU_ADAM_PARAMS_PER_S = 3e9


# Reads and writes of one number by foreach Adam: decay 2, first moment 3, second 2 and 3, root 2, division 2,
# epsilon 2, update 4, each a kernel of its own (torch/optim/adamw.py, `_multi_tensor_adamw`).
FOREACH_PASSES = 20


def optimizer_seconds(s: Setting) -> float:
    """The optimizer step: bound by memory bandwidth on the GPU, by the host's with offload, and by PCIe for
    paged state that does not fit beside the weights."""
    share = s.trainable_params / s.mesh.tp / s.mesh.pp
    if s.plan.strategy in SHARDS_OPTIMIZER:
        share /= s.mesh.param_shard
    d = s.dtypes
    if s.plan.offload is not Offload.NONE:
        return share * s.mesh.ranks_per_node / CPU_ADAM_PARAMS_PER_S
    touched = 2 * (d.param + d.master + d.state) + d.grad
    if s.plan.optimizer is Optimizer.ADAMW_FOREACH:
        touched = FOREACH_PASSES * (4 if d.param == 4 or d.master else 2)
    seconds = share * touched / s.gpu.memory_bytes_per_s
    if d.paged_state:
        seconds += 2 * share * d.state / (s.gpu.pcie_bytes_per_s * LINK_EFFICIENCY["pcie"])
    return seconds


__all__ = ["attention_flops", "bubble", "model_flops", "traffic_and_time"]
