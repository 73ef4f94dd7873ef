"""What forward saves for backward: bytes per token of one block, of the logits, and of one block recomputed.

The eager sums list what autograd really keeps for a transformers decoder block; they equal what
`torch.autograd.graph.saved_tensors_hooks` counts on small models. The published closed forms (Korthikanti
et al., arXiv 2205.05198, equation 2: 34·h + 5·a·s) are the special case of GELU and LayerNorm.
"""

from __future__ import annotations

import msgspec

from ftdash.engine.model.shape import LayerShape, Linear, Role
from ftdash.engine.plan import Attention, Checkpointing, Loss, Precision, Strategy
from ftdash.engine.planner.batching import needs_mask
from ftdash.engine.planner.numerics import BITSANDBYTES, quant_of
from ftdash.engine.planner.setting import Setting


class BlockActivations(msgspec.Struct, frozen=True):
    """Bytes per token of one block: kept until backward, and alive while it is recomputed.

    Tensor parallelism divides `saved` and `live`; `saved_whole` and `live_whole` are as wide on every rank.
    """

    saved: float
    live: float
    saved_whole: float
    live_whole: float
    everything: float  # what forward keeps without any checkpointing
    passing: float  # temporaries of a forward that keeps nothing
    passing_whole: float = 0.0  # of them, what tensor parallelism leaves at full length


def block_activations(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> BlockActivations:
    """Saved and live bytes per token under the plan's checkpointing; `adapted` is None in full training."""
    everything = saved_without_checkpointing(s, layer, adapted)
    h, c = s.shape.hidden, s.dtypes.compute
    boundary = float(h * s.dtypes.stream)
    backward = _backward_temporaries(s, layer)
    # Sequence parallelism gathers a block's input to full length, and its gradient (arXiv 2205.05198, 4.2.2).
    live_whole = 2.0 * h * c if s.mesh.tp > 1 else 0.0
    gathered = _gathered_inputs(s) if adapted is None else 0.0
    if s.plan.checkpointing is not Checkpointing.NONE:
        live_whole += gathered  # by the recomputation
    # In forward the gathered input stands beside the row-parallel output that is yet to be scattered.
    passing_whole = 2.0 * h * c if s.mesh.tp > 1 else 0.0
    if s.plan.checkpointing is Checkpointing.FULL:
        saved, saved_whole = boundary, 0.0
        live = everything + backward
    elif s.plan.checkpointing is Checkpointing.SELECTIVE:
        kept, saved_whole = _saved_selectively(s, layer)
        saved = boundary + kept
        live = max(0.0, everything - kept) + backward  # what was kept is not computed again
    else:
        saved, saved_whole = everything, gathered
        live = backward
    return BlockActivations(saved, live, saved_whole, live_whole, everything, backward, passing_whole)


def _gathered_inputs(s: Setting) -> float:
    """What column-parallel linears keep beyond their share when nothing is recomputed: DTensor gathers the
    outputs of both norms to full length and autograd keeps them so (ColwiseParallel,
    torch/distributed/tensor/parallel/style.py); Megatron keeps the shards and gathers them again
    (megatron/core/tensor_parallel/layers.py)."""
    if s.mesh.tp == 1 or s.plan.strategy is Strategy.MEGATRON:
        return 0.0
    return 2 * s.shape.hidden * s.dtypes.compute * (1 - 1 / s.mesh.tp)


_Key = tuple[object, ...]
_remembered: dict[_Key, tuple[BlockActivations, LayerShape, tuple[Linear, ...] | None]] = {}


def block(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> BlockActivations:
    """`block_activations`, remembered by everything it depends on."""
    p = s.plan
    key: _Key = (
        id(layer),
        id(adapted),
        s.dtypes,
        p.checkpointing,
        p.compile,
        p.whole_graph,
        p.save_every_product,
        p.fused_qkv,
        p.fused_norms,
        p.expert_loop,
        p.strategy,
        p.attention,
        p.precision,
        0 if p.attention is Attention.FLASH else p.seq_len,
        needs_mask(p),
        p.old_bitsandbytes,
        p.lora_rank,
        p.lora_dropout > 0,
        p.dora,
        p.quantize_experts,
        s.mesh.tp,
    )
    found = _remembered.get(key)
    if found is None:
        if len(_remembered) > 4096:
            _remembered.clear()
        # Layer and adapters are kept beside the result, so that their ids stay theirs.
        found = _remembered[key] = (block_activations(s, layer, adapted), layer, adapted)
    return found[0]


# Families with nn.LayerNorm, one kernel; the others write RMSNorm out in fp32 (transformers' modelling code).
LAYER_NORM_TYPES = frozenset(
    {"bloom", "codegen", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt"}
    | {"phi", "stablelm", "starcoder2"}
)


def lean(s: Setting) -> bool:
    """Whether norms and gated activations run in kernels that keep one 16-bit input: compiled, or
    Megatron's own."""
    return s.plan.compile or s.plan.strategy is Strategy.MEGATRON


def _lean_norms(s: Setting) -> bool:
    """As `lean`, or by a kernel of their own that keeps its input and a number a row (Liger-Kernel,
    ops/rms_norm.py; Unsloth, kernels/rms_layernorm.py)."""
    return lean(s) or s.plan.fused_norms


def saved_without_checkpointing(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> float:
    """Bytes per token that one block keeps for backward when nothing is recomputed."""
    return (
        _norms_saved(s, layer, adapted)
        + _attention_saved(s, layer, adapted)
        + _feed_forward_saved(s, layer, adapted)
        + adapter_saved(s, layer, adapted)
    )


def _inputs_kept(s: Setting, adapted: tuple[Linear, ...] | None, names: tuple[Linear, ...]) -> bool:
    """Whether any of these linears keeps its input: all do in full training, only adapted ones under LoRA.

    bitsandbytes before 0.43.2 kept the input of frozen 4-bit linears too (its release notes: 10.1 GB a
    sequence of 1,024 on a 70B).
    """
    if adapted is None:
        return True
    if s.plan.lora_dropout and not s.plan.dora:
        adapted = ()  # each adapter keeps its own dropped input: `adapter_saved`
    return any(linear in adapted or (_keeps_input(s) and _is_packed(s, linear)) for linear in names)


def _keeps_input(s: Setting) -> bool:
    return s.plan.old_bitsandbytes and s.dtypes.quant is not None and quant_of(s.plan) in BITSANDBYTES


def _is_packed(s: Setting, linear: Linear) -> bool:
    return linear.role is not Role.ROUTER and (linear.role is not Role.EXPERT or s.plan.quantize_experts)


def _input_bytes(s: Setting) -> int:
    """A linear's input as it waits for the weight's gradient: Transformer Engine keeps the FP8 copy that it
    multiplied with (transformer_engine/pytorch/module/linear.py); torchao's compiled float8 casts again."""
    engine = s.plan.strategy is Strategy.MEGATRON and s.plan.precision in (Precision.FP8, Precision.MXFP8)
    return 1 if engine else s.dtypes.compute


def _norms_saved(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> float:
    """RMSNorm keeps its input in fp32 and, when its weight trains, the normalised activations; the linears
    after it keep its output. Compiled, and in PyTorch's LayerNorm kernel, one copy of the input is enough."""
    h, c, stream = s.shape.hidden, s.dtypes.compute, s.dtypes.stream
    fused = _lean_norms(s) or s.shape.model_type in LAYER_NORM_TYPES
    # The output projection stands last and reads the kernel's output, however wide that is.
    attention = [x for x in layer.linears if x.role is Role.ATTENTION]
    first = tuple(x for x in attention[:-1] if x.d_in == h)
    second = tuple(x for x in layer.linears if x.role is not Role.ATTENTION and x.d_in == h)
    outputs = _input_bytes(s) * h * (_inputs_kept(s, adapted, first) + _inputs_kept(s, adapted, second))
    if s.dtypes.autocast and stream == 4 and adapted is None:
        # Each linear under autocast keeps a cast of its own of the norm's fp32 output.
        outputs = c * h * (len(first) + sum(x.role is not Role.EXPERT for x in second))
    if fused:
        return 2 * stream * h + outputs
    normalised = stream * h if adapted is None else 0
    return 2 * (4 * h + normalised) + outputs


def _attention_saved(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> float:
    """q, k, v and the output as the kernel keeps them, with a log-sum-exp a head; eager attention keeps the
    softmax in fp32 and its cast, a·s each, and the keys and values repeated to all heads."""
    a = layer.attention
    c = s.dtypes.compute
    q, k, v = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.v_head_dim
    out = a.heads * a.v_head_dim
    kept = 0.0
    if _has_qk_norm(s, layer) and not _lean_norms(s):
        kept += (q + k) * (4 + (c if adapted is None else 0))
    if a.is_mla:
        latent = a.q_lora_rank + a.kv_lora_rank
        kept += latent * (c + 4 + (c if adapted is None else 0)) + a.rope_dim * c
        k, v = a.heads * a.head_dim, out
    if s.plan.attention is Attention.EAGER:
        return (
            kept + c * (q + a.heads * (a.head_dim + a.v_head_dim) + out) + a.heads * s.plan.seq_len * (4 + c)
        )
    if any(x.d_out == q + k + v for x in layer.linears if x.role is Role.ATTENTION):
        # Queries and keys are rotated into new tensors, but the values are a view of the fused projection.
        kept += c * (q + k)
    if (a.window and s.plan.attention is Attention.SDPA) or needs_mask(s.plan):
        # A sliding window, padding and packed samples reach SDPA as a mask: it is kept in the compute dtype,
        # and grouped heads are repeated, because transformers asks for enable_gqa only without a mask.
        k, v = q, out
        kept += c * s.plan.seq_len
    return kept + c * (q + k + v + out) + 4 * a.heads


def _has_qk_norm(s: Setting, layer: LayerShape) -> bool:
    """Norms over each head's queries and keys (Qwen3, Gemma 3): what stands beside the norms of width h."""
    a = layer.attention
    return not a.is_mla and layer.other_params % s.shape.hidden == 2 * a.head_dim


def _feed_forward_saved(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> float:
    """Gate, its activation, up and their product, each f wide; an ungated block keeps two.

    The product is only kept where the down projection keeps its input. Megatron's fused SwiGLU recomputes
    the activation; torch.compile keeps it (torchtune's 3B runs with and without). Routed experts see top_k
    copies of each token, and their outputs are kept for the routing weights' gradient; the router keeps
    fp32 probabilities.
    """
    c, h = s.dtypes.compute, s.shape.hidden
    # Compiled, casts are part of the kernel that reads them.
    factor = c if s.plan.compile else s.dtypes.pointwise
    kept = 0.0
    for width, role, copies in _widths(layer):
        down = tuple(x for x in layer.linears if x.role is role and x.d_out == h and x.d_in != h)
        product = _inputs_kept(s, adapted, down) if down else True
        pointwise = max(1, (3 if layer.gated else 1) - (s.plan.strategy is Strategy.MEGATRON))
        kept += width * copies * (factor * pointwise + _input_bytes(s) * product)
        if role is Role.EXPERT:
            gate = tuple(x for x in layer.linears if x.role is role and x.d_in == h)
            kept += copies * c * h * (1 + _inputs_kept(s, adapted, gate))
    if layer.moe is not None:
        kept += layer.moe.experts * (c + 4)
    return kept


def _widths(layer: LayerShape) -> tuple[tuple[int, Role, int], ...]:
    found = []
    if layer.ffn_width:
        found.append((layer.ffn_width, Role.MLP, 1))
    if layer.moe is not None:
        found.append((layer.moe.expert_width, Role.EXPERT, layer.moe.top_k))
        if layer.moe.shared_width:
            found.append((layer.moe.shared_width, Role.SHARED_EXPERT, 1))
    return tuple(found)


def adapter_saved(s: Setting, layer: LayerShape, adapted: tuple[Linear, ...] | None) -> float:
    """The r-wide product between A and B of each adapter; DoRA keeps each adapted linear's output as well.

    fp32 adapters under autocast each cast their input for themselves, so nothing is shared between q, k and
    v. Neither is it with dropout: A reads a dropped copy, and the copy's mask is one byte an element
    (torch's native_dropout; peft draws a mask a linear, tuners/lora/layer.py).
    """
    if not adapted:
        return 0.0
    c = s.dtypes.compute
    copies = layer.moe.top_k if layer.moe is not None else 1
    kept = 0.0
    dropped = s.plan.lora_dropout > 0
    own_casts = s.dtypes.autocast and s.dtypes.param == 4
    for linear in adapted:
        times = copies if linear.role is Role.EXPERT else 1
        kept += times * c * (s.plan.lora_rank + (2 * linear.d_out if s.plan.dora else 0))
        if own_casts or dropped:
            kept += times * (c + 1 if dropped else c) * linear.d_in
    if own_casts and not dropped:
        # Counted already: one input for the projections that read the residual stream, one for the down
        # projection.
        h = s.shape.hidden
        for role in {linear.role for linear in adapted}:
            times = copies if role is Role.EXPERT else 1
            readers = [x for x in adapted if x.role is role]
            kept -= times * c * h * any(x.d_in == h for x in readers)
            kept -= (
                times
                * c
                * max((x.d_in for x in readers if x.role is not Role.ATTENTION and x.d_in != h), default=0)
            )
    return kept


def _saved_selectively(s: Setting, layer: LayerShape) -> tuple[float, float]:
    """Per-operator selective checkpointing: the attention kernel's output and every second matrix product
    (torchtitan, `activation_checkpoint.py`), or every one, cut by tensor parallelism and whole.

    Grouped expert products and 4-bit products run in operators that are not on the list, so they are
    recomputed. Under tensor parallelism a row-parallel product is kept as wide as it leaves the kernel,
    and the outputs of both reduce-scatters are kept too. Where the block is traced, only what its backward
    reads is kept, as the partitioner sees it (torch/_functorch/partitioners.py): never the last product,
    which is the block's output, and of a row-parallel one what was scattered.
    """
    c, h = s.dtypes.compute, s.shape.hidden
    a = layer.attention
    attention = [x for x in layer.linears if x.role is Role.ATTENTION]
    mlp = [x for x in layer.linears if x.role in (Role.MLP, Role.SHARED_EXPERT)]
    products: list[tuple[Linear, ...]] = [(x,) for x in attention]
    if s.plan.fused_qkv and not a.is_mla:
        products = [tuple(attention[:-1]), tuple(attention[-1:])]
    products += [(x,) for x in layer.linears if x.role is Role.ROUTER]
    if s.plan.precision is not Precision.NVFP4:
        products += [(x,) for x in mlp]
    kept = [x for one in (products if s.plan.save_every_product else products[::2]) for x in one]
    tp, traced = s.mesh.tp > 1, s.plan.compile or s.plan.whole_graph
    cut = float(sum(x.d_out for x in kept))
    whole = 0.0
    for x in attention[-1:] + mlp[-1:]:
        if x in kept and (tp or (traced and x in mlp)):
            cut -= x.d_out
            whole += 0.0 if traced else x.d_out
    if tp:
        cut += h if traced else 2 * h
    return c * (cut + a.heads * a.v_head_dim) + 4 * a.heads, c * whole


def _backward_temporaries(s: Setting, layer: LayerShape) -> float:
    """Alive at the widest point of a block's backward: the gradients of the product and of both its factors
    in the feed-forward, or of the norm in fp32; eager attention adds the scores' gradients. A forward that
    keeps nothing passes through as much: both factors and their product. Where experts run one after the
    other (transformers before 5, `for expert_idx in expert_hit`), what all saved is there and one goes
    backward."""
    c, h = s.dtypes.compute, s.shape.hidden
    at_once = layer.moe.experts if layer.moe is not None and s.plan.expert_loop else 1
    widest = max(
        (width * copies / (at_once if role is Role.EXPERT else 1) for width, role, copies in _widths(layer)),
        default=0.0,
    )
    peak = max(c * 3 * widest, 3 * 4 * h) + s.dtypes.stream * h
    if s.plan.attention is Attention.EAGER:
        peak = max(peak, layer.attention.heads * s.plan.seq_len * (4 + 4 + c))
    return peak


class LogitsBytes(msgspec.Struct, frozen=True):
    """Bytes per token and vocabulary entry: when the loss is computed, when its backward starts, and what the
    allocator has set aside by then (16- and 32-bit copies never share a block)."""

    forward: float
    backward: float
    reserved: float


CHUNKS = 8  # torchtitan's and torchtune's chunked losses


def logits_bytes(s: Setting) -> LogitsBytes:
    """Full: logits, their fp32 copy and the log-softmax forward; log-softmax and two fp32 gradients backward.

    Native: nothing is turned into fp32; the logits, their shifted copy and the log-softmax forward;
    log-softmax and two gradients backward. Upcast: the model returns fp32 logits, which its caller holds
    until backward is over (transformers before 4.45, torchtitan before its #391): no cast is left to the
    loss, and nothing is freed before it. Under tensor parallelism the loss is computed on shards by DTensor's
    loss-parallel handlers, which build shifted logits, the one-hot gradient, the exponentials and their sum
    one after the other (torch/distributed/tensor/parallel/loss.py). Compiled, one fp32 pass is fused away.
    Chunked, an eager loss keeps every chunk's log-softmax, a compiled one only the chunk it works on. Fused:
    nothing of size V lives outside the kernel; but Megatron's fused cross-entropy fuses its passes alone and
    keeps the logits, as a compiled loss does (megatron/core/fusions/fused_cross_entropy.py).
    """
    c = s.dtypes.compute
    match s.plan.loss:
        case Loss.NATIVE:
            return LogitsBytes(3 * c, 3 * c, 3 * c)
        case Loss.UPCAST if s.mesh.tp > 1:
            return LogitsBytes(c + 12, 20, c + 20)
        case Loss.UPCAST:
            return LogitsBytes(c + 8, 16, c + 16)
        case Loss.FULL if s.mesh.tp > 1 and s.plan.strategy is not Strategy.MEGATRON:
            return LogitsBytes(c + 12, 16, c + 16)
        case Loss.FULL:
            return LogitsBytes(c + 8, 12, c + 12)
        case Loss.FUSED if s.plan.strategy is Strategy.MEGATRON:
            return LogitsBytes(c + 4, c + 6, c + 6)
        case Loss.COMPILED if s.mesh.tp > 1:
            return LogitsBytes(c + 4, c + 6, c + 6)
        case Loss.COMPILED:
            return LogitsBytes(c, 2 * c, 2 * c)
        case Loss.CHUNKED if s.plan.compile:
            whole = (c + 12) / CHUNKS
            return LogitsBytes(whole, whole, whole + c / 4)
        case Loss.CHUNKED:
            return LogitsBytes(c + 4, c + 4, c + 4 + 4 / CHUNKS)
        case _:
            return LogitsBytes(0, 0, 0)
