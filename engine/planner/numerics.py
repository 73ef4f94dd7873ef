"""How many bytes one number takes: by precision, strategy, optimizer and quantisation.

Sources: ZeRO (arXiv 1910.02054, section 3.1) for 2 + 2 + 12; DeepSpeed's ZeRO documentation; PyTorch's
FSDP2 mixed-precision policy (the sharded parameters stay in the dtype they were loaded in); Megatron-LM
docs, "Distributed optimizer" (6 + 12/d); bitsandbytes and torchao documentation for quantised state.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from ftdash.engine.plan import KbitUpcast, Method, Optimizer, Plan, Precision, Quant, Strategy

FSDP_FAMILY = frozenset({Strategy.FSDP, Strategy.FSDP_NO_RESHARD, Strategy.FSDP1, Strategy.HSDP})
ZERO_FAMILY = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})
SHARDS_WEIGHTS = FSDP_FAMILY | {Strategy.ZERO3}
SHARDS_GRADIENTS = SHARDS_WEIGHTS | {Strategy.ZERO2}
SHARDS_OPTIMIZER = SHARDS_GRADIENTS | {Strategy.ZERO1, Strategy.MEGATRON}

LOW_PRECISION = frozenset({Precision.FP8, Precision.MXFP8, Precision.NVFP4})

# Bytes a quantised weight takes with its scales. NF4: blocks of 64 with an fp32 scale, or with double
# quantisation an 8-bit scale and one fp32 per 256 of those (QLoRA, arXiv 2305.14314, section 3);
# GPTQ: groups of 128 with a 16-bit scale and a 4-bit zero; MXFP4: blocks of 32 with an 8-bit scale.
QUANT_BYTES = {
    Quant.NF4: 0.5 + 4 / 64,
    Quant.NF4_DQ: 0.5 + 1 / 64 + 4 / (64 * 256),
    Quant.INT8: 1.0,
    Quant.GPTQ4: 0.5 + 2.5 / 128,
    Quant.MXFP4: 0.5 + 1 / 32,
}


# Their linears answer in the dtype they were asked in, and transformers turns the rest of the model into
# fp32 for them alone (peft, prepare_model_for_kbit_training).
BITSANDBYTES = frozenset({Quant.NF4, Quant.NF4_DQ, Quant.INT8})


class Numerics(msgspec.Struct, frozen=True, cache_hash=True):
    """Bytes per parameter or per activation element of one plan."""

    compute: int  # gathered weights and activations
    pointwise: int  # gate, up and their product between the matrix products
    stream: int  # residual stream between blocks, saved by full checkpointing
    param: int  # a trainable parameter at rest
    master: int  # an fp32 copy beside it (ZeRO, Megatron)
    grad: int  # a trainable parameter's gradient at rest
    state: float  # optimizer state
    paged_state: bool  # optimizer state outside torch's allocator (CUDA managed memory)
    reduce: int  # gradients on the wire
    frozen: int  # an unquantised frozen weight
    upcast_frozen: int  # embeddings, norms and head of a k-bit model
    quant: float | None  # a quantised weight
    autocast: (
        bool  # operators cast what they are given to the compute dtype, and the casts live with the graph
    )

    @property
    def zero_weight(self) -> int:
        """ZeRO's accounting of a trainable parameter: the copy that computes."""
        return self.compute if self.param + self.master > self.compute else self.param

    @property
    def rests_in_fp32(self) -> bool:
        """Whether a trainable parameter has fp32 values at rest, its own or a master copy's."""
        return 4 in (self.param, self.master)


def quant_of(plan: Plan) -> Quant | None:
    """The quantisation of the frozen base: what --quant says, nf4-dq under qlora, else none."""
    return plan.quant or (Quant.NF4_DQ if plan.method is Method.QLORA else None)


def numerics(plan: Plan) -> Numerics:
    """The dtypes that the plan's strategy and precision really use."""
    return _numerics(
        plan.strategy,
        plan.precision,
        plan.method is not Method.FULL,
        plan.adapter_dtype,
        quant_of(plan),
        plan.kbit_upcast,
        plan.optimizer,
        reduce_dtype(plan),
    )


def master_weights(plan: Plan) -> str:
    """Which weights rest in fp32: "all", "trainable only" or "none", with what a k-bit base adds to it."""
    d = numerics(plan)
    if plan.method is Method.FULL or d.frozen == 4:
        return "all" if d.rests_in_fp32 else "none"
    words = "trainable only" if d.rests_in_fp32 else "none"
    return f"{words}, and what the base does not quantise" if d.upcast_frozen == 4 else words


@lru_cache(maxsize=1024)
def _numerics(
    strategy: Strategy,
    precision: Precision,
    adapters: bool,
    adapter_dtype: str | None,
    quant: Quant | None,
    kbit_upcast: KbitUpcast | None,
    optimizer: Optimizer,
    reduced_in: str,
) -> Numerics:
    mixed = precision not in (Precision.BF16, Precision.FP32)
    # DeepSpeed's bf16 engine and Megatron's optimizer keep fp32 masters whatever the model's dtype.
    if precision is Precision.BF16 and (strategy in ZERO_FAMILY or strategy is Strategy.MEGATRON):
        mixed = True
    fp32 = precision is Precision.FP32
    compute = 4 if fp32 else 2
    if strategy in ZERO_FAMILY and mixed:
        param, master, grad = 2, 4, 2
    elif strategy is Strategy.MEGATRON and mixed:
        # The main gradients are kept in the dtype they are reduced in (`grad_reduce_in_fp32`).
        param, master, grad = 2, 4, 4 if reduced_in == "fp32" else 2
    else:
        param, master, grad = (4, 0, 4) if mixed or fp32 else (2, 0, 2)
        if adapters and adapter_dtype is not None:
            param = grad = 4 if adapter_dtype == "fp32" else 2
    autocast = mixed and not fp32 and strategy in (Strategy.NONE, Strategy.DDP)
    # peft's prepare_model_for_kbit_training turns what is not quantised into fp32; trl skips it for a base
    # that FSDP shards, and a pure-bf16 run never calls it.
    packed = quant in BITSANDBYTES and adapters
    prepared = mixed and strategy not in FSDP_FAMILY
    upcast = (kbit_upcast or (KbitUpcast.ALL if prepared else KbitUpcast.NONE)) if packed else KbitUpcast.NONE
    kbit = upcast is KbitUpcast.ALL
    frozen = 4 if fp32 else 2
    if kbit and not mixed:
        # Nothing turns the fp32 stream back: 4-bit linears answer in their input's dtype, and attention and
        # head compute in fp32 (bitsandbytes to 0.46, `Linear4bit.set_compute_type`).
        compute = 4
    stream = 4 if fp32 or kbit or (autocast and not adapters) else 2
    return Numerics(
        compute=compute,
        # A k-bit linear answers in the dtype that it was asked in, and fp32 norms ask in fp32 (bitsandbytes
        # Linear4bit).
        pointwise=compute if upcast is KbitUpcast.NONE else 4,
        stream=stream,
        param=param,
        master=master,
        grad=grad,
        state=state_bytes(optimizer, 4 if master or param == 4 else 2),
        paged_state=optimizer is Optimizer.PAGED_ADAMW_8BIT,
        reduce={"fp32": 4, "bf16": 2}[reduced_in],
        frozen=frozen,
        upcast_frozen=4 if kbit else frozen,
        quant=QUANT_BYTES[quant] if quant is not None and adapters else None,
        autocast=autocast,
    )


def state_bytes(optimizer: Optimizer, element: int) -> float:
    """Optimizer state per matrix parameter, `element` bytes a number in the optimizer's own dtype.

    Adam keeps two moments, Lion and Muon one. 8-bit moments carry an fp32 scale per block of 256
    (bitsandbytes), 4-bit ones per block of 128 (torchao). Adafactor keeps a row and a column (arXiv
    1804.04235), plain SGD nothing.
    """
    match optimizer:
        case Optimizer.ADAMW | Optimizer.ADAMW_FOREACH:
            return 2.0 * element
        case Optimizer.ADAMW_BF16:
            return 4.0
        case Optimizer.ADAMW_8BIT | Optimizer.PAGED_ADAMW_8BIT:
            return 2 * (1 + 4 / 256)
        case Optimizer.ADAMW_4BIT:
            return 2 * (0.5 + 4 / 128)
        case Optimizer.LION | Optimizer.MUON:
            return 1.0 * element
        case Optimizer.ADAFACTOR:
            return 0.01
        case _:
            return 0.0


def reduce_dtype(plan: Plan) -> str:
    """The dtype gradients travel in: what --reduce-dtype says, else what the strategy does by default.

    accelerate's FSDP2 reduces in the compute dtype, DeepSpeed in the model's, DDP in the gradients' own,
    Megatron in fp32 (its main gradients).
    """
    if plan.reduce_dtype is not None:
        return plan.reduce_dtype
    if plan.precision is Precision.FP32 or plan.strategy is Strategy.MEGATRON:
        return "fp32"
    if plan.strategy in FSDP_FAMILY or plan.strategy in ZERO_FAMILY or plan.precision is Precision.BF16:
        return "bf16"
    return "bf16" if plan.method is not Method.FULL and plan.adapter_dtype == "bf16" else "fp32"
