"""What a plan runs into that no number shows: traps of its backend, its GPU, its adapters and its model."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import fields, replace

from ftdash.engine import mesh as meshes
from ftdash.engine.plan import (
    Method,
    Offload,
    Plan,
    PlanError,
    Precision,
    Quant,
    Strategy,
)
from ftdash.engine.planner.inventory import stages
from ftdash.engine.planner.memory import memory_of, retained_inputs
from ftdash.engine.planner.numerics import FSDP_FAMILY, SHARDS_WEIGHTS, ZERO_FAMILY
from ftdash.engine.planner.result import Advice, Memory, Prediction, Verdict
from ftdash.engine.planner.setting import Setting, setting_of
from ftdash.engine.planner.uncertainty import spread_of

# What --quant calls the formats that adapters can be trained on as they are stored.
PACKED_AS = {"gptq": Quant.GPTQ4, "mxfp4": Quant.MXFP4, "bitsandbytes": Quant.NF4_DQ}
MUCH_HOST_RAM = 256e9  # bytes a node, from which host memory is worth a word: an assumption
MEGATRON_PARAMS = 70e9  # past about this, dense models are trained with Megatron-style frameworks


def gigabytes(size: float) -> str:
    """Decimal gigabytes, as people read them."""
    return f"{size / 1e9:.1f} GB"


def warnings(s: Setting, found: Prediction) -> Iterator[Advice]:
    """What a plan runs into, beside what would make it fit or faster."""
    for subject in (_mesh, _model, _backend, _adapters, _room, _gpu):
        yield from subject(s, found)


def _mesh(s: Setting, found: Prediction) -> Iterator[Advice]:
    for code, text in meshes.warnings(s.mesh, s.plan, s.gpu.has_nvlink):
        yield Advice(code, text)


def _model(s: Setting, found: Prediction) -> Iterator[Advice]:
    plan = s.plan
    if s.sums.routed:
        yield from _moe_warnings(s, found)
    elif (
        s.sums.total > MEGATRON_PARAMS
        and plan.method is Method.FULL
        and plan.strategy is not Strategy.MEGATRON
    ):
        yield Advice(
            "megatron-style",
            "past about 70B dense, Megatron-style frameworks (tensor and pipeline parallel) are the usual "
            "answer",
        )
    if s.shape.stored_as and s.dtypes.quant is None:
        packed = PACKED_AS.get(s.shape.stored_as)
        kept = f", or keep it packed under adapters with --method qlora --quant {packed}" if packed else ""
        yield Advice(
            "stored-quantised",
            f"{s.shape.name} is stored in {s.shape.stored_as}, and this plan counts 16-bit weights of it: "
            f"dequantise it while loading{kept}",
        )
    if s.shape.max_positions and plan.seq_len > s.shape.max_positions:
        yield Advice(
            "beyond-positions",
            f"--seq-len {plan.seq_len}: {s.shape.name} was built for {s.shape.max_positions:,} positions; "
            f"longer sequences need scaled rotary embeddings",
        )


def _backend(s: Setting, found: Prediction) -> Iterator[Advice]:
    """What the strategy's own implementation does beside what the plan says."""
    plan, memory = s.plan, found.memory
    if plan.strategy in FSDP_FAMILY and plan.grad_accum > 1 and s.lora is None:
        extra = s.dtypes.compute * s.sums.total / s.mesh.tp / s.mesh.pp
        yield Advice(
            "accumulate-sharded",
            f"set sync_each_batch in accelerate: without it gradients stay unsharded between micro-steps, "
            f"{gigabytes(extra)} more a GPU",
        )
    keeps_masters = plan.strategy in ZERO_FAMILY or plan.strategy is Strategy.MEGATRON
    if plan.precision is Precision.BF16 and keeps_masters and plan.method is Method.FULL:
        yield Advice(
            "fp32-masters",
            f"{plan.strategy} keeps fp32 masters whatever the precision, 4 bytes a parameter over the ranks: "
            f"with a small optimizer its states can be more than those of pure bf16 without it",
        )
    gathered = memory.host.saving_full - memory.host.training
    if gathered and s.lora is not None:
        yield Advice(
            "save-gathers-base",
            f"a full state dict gathers the whole base on rank 0: {gigabytes(gathered)} of host RAM, though "
            f"only adapters are wanted: exclude frozen parameters, or save sharded",
        )
    elif gathered > MUCH_HOST_RAM:
        yield Advice(
            "full-state-dict",
            f"a full state dict with its optimizer puts {gigabytes(gathered)} in rank 0's host memory: save "
            f"sharded (SHARDED_STATE_DICT, zero_to_fp32) and merge once, afterwards",
        )
    if plan.unsharded_init and plan.strategy in SHARDS_WEIGHTS:
        yield Advice(
            "sharded-init",
            f"every local rank loads the whole model: {gigabytes(memory.host_ram_per_node)} of host memory a "
            f"node; zero.Init or cpu_ram_efficient_loading loads it once",
        )
    elif s.mesh.ranks_per_node > 1 and memory.host.loading_everywhere > MUCH_HOST_RAM:
        sharded = memory.host.loading < memory.host.loading_everywhere
        yield Advice(
            "load-once",
            f"keep cpu_ram_efficient_loading or zero.Init on: else {s.mesh.ranks_per_node} ranks a node "
            f"hold {gigabytes(memory.host.loading_everywhere)} of host memory instead of "
            f"{gigabytes(memory.host.loading)}"
            if sharded
            else f"every rank loads the whole model, {gigabytes(memory.host.loading)} of host RAM a node at "
            f"once: load straight to its GPU (device_map), or one rank after the other",
        )
    if plan.strategy in ZERO_FAMILY and memory.device > 4 * max(1, memory.model_states.total):
        yield Advice(
            "states-are-not-all",
            f"model states are {gigabytes(memory.model_states.total)} of {gigabytes(memory.device)}: "
            f"buckets, gathered "
            f"parameters, activations and context do not shrink with more GPUs",
        )


def _adapters(s: Setting, found: Prediction) -> Iterator[Advice]:
    plan = s.plan
    if unused := unused_adapter_flags(plan):
        yield Advice(
            "adapter-flags-unused",
            f"{', '.join(unused)}: --method full trains no adapters; use --method lora or qlora",
        )
    if plan.quant_storage == "uint8" and s.dtypes.quant is not None and plan.strategy in FSDP_FAMILY:
        yield Advice(
            "uint8-not-sharded",
            "--quant-storage uint8: FSDP2 shards float tensors only and leaves the packed weights whole on "
            "every rank; bf16 storage shards them",
        )
    if retained_inputs(s, stages(s)[0]):
        other = replace(plan, reentrant=False)
        lighter = _memory(other)
        saves = 0 if lighter is None else max(0, found.memory.device - lighter.device)
        yield Advice(
            "fsdp1-keeps-inputs",
            f"FSDP1 with a frozen base keeps every block's input and its gradient until backward is over, "
            f"because the model checkpoints re-entrantly: use_reentrant=False saves {gigabytes(saves)}",
            saves,
            plan=other,
        )
    if s.dtypes.pointwise > s.dtypes.compute:
        yield Advice(
            "kbit-upcast",
            "prepare_model_for_kbit_training turns norms, embeddings and head to fp32, and with them the "
            "activations between the linears: at long sequences QLoRA can need more than LoRA",
        )
    if any(name in ("embed_tokens", "lm_head") for name in plan.modules_to_save):
        yield Advice(
            "token-indices",
            "modules_to_save trains whole copies of the embeddings; trainable_token_indices trains only the "
            "new rows (not under ZeRO-3)",
        )


def _room(s: Setting, found: Prediction) -> Iterator[Advice]:
    """How sure it is that the plan fits, and what the allocator has to do with it."""
    memory = found.memory
    spread = spread_of(s)
    low, high = found.device_range
    if spread.why or (memory.fits and high > memory.capacity):
        reason = spread.why or "most published runs are planned within 10 %, and this one has less room"
        yield Advice("range", f"{gigabytes(low)} to {gigabytes(high)} a GPU: {reason}")
    if memory.squeezed and memory.headroom >= 0:
        yield Advice(
            "allocator-gives-back",
            f"{gigabytes(memory.allocated)} are live at the peak and the GPU is full: the allocator "
            f"must free cached blocks to go on, which costs time and may fail",
        )
    stranded = memory.reserved - memory.allocated
    if found.verdict is not Verdict.FITS and stranded > 0.03 * memory.capacity:
        yield Advice(
            "expandable-segments",
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator holds {gigabytes(stranded)} "
            f"beyond the peak, part of which it can then reuse",
        )


def _gpu(s: Setting, found: Prediction) -> Iterator[Advice]:
    plan = s.plan
    if s.dtypes.compute == 4 and plan.precision is not Precision.FP32:
        yield Advice(
            "computes-in-fp32",
            "a k-bit base with all else upcast and no autocast computes in fp32, several times slower: use "
            "--precision bf16-mixed, or --kbit-upcast none",
        )
    if s.gpu.bf16_flops is None and plan.precision in (Precision.BF16, Precision.BF16_MIXED):
        yield Advice(
            "no-bf16-units",
            f"{s.gpu.name} has no bf16 units: PyTorch emulates bf16 far below the fp16 rate that is "
            f"planned here; use --precision fp16-mixed",
        )
    if plan.precision is Precision.FP16_MIXED and s.gpu.bf16_flops:
        yield Advice("bf16", f"{s.gpu.name} computes in bf16 as fast as in fp16, without loss scaling")
    if s.gpu.unified:
        both = found.memory.device + found.memory.host_ram_per_node
        offload = plan.offload is not Offload.NONE or plan.activation_offload
        yield Advice(
            "unified-memory",
            f"{s.gpu.name} shares its memory with the CPU: with the host's part this plan takes "
            f"{gigabytes(both)} of {gigabytes(found.memory.capacity)}"
            + ("; what is offloaded stays in the same memory" if offload else ""),
        )
    if not s.gpu.peer_to_peer and not s.gpu.unified and plan.pcie is None and slots_matter(found):
        yield Advice(
            "slots-assumed",
            f"planned for {s.gpu.name} in full slots (PCIe {s.gpu.pcie_generation} x16): boards for two "
            f"often give each half or less, and these cards talk through host memory; --pcie 3x8 says what "
            f"yours has",
        )


def _moe_warnings(s: Setting, found: Prediction) -> Iterator[Advice]:
    plan, memory = s.plan, found.memory
    if memory.imbalance:
        yield Advice(
            "moe-imbalance",
            f"the rank whose experts draw most tokens may need up to {gigabytes(memory.imbalance)} more",
        )
    if s.expert_padding > 1:
        yield Advice(
            "experts-do-not-divide",
            f"FSDP2 chunks expert stacks by expert: {s.mesh.expert_shard} ranks share fewer experts, so some "
            f"hold whole ones and gathers are padded {s.expert_padding:.1f} times; use HSDP in smaller "
            f"groups, or ZeRO-3",
        )
    if plan.strategy is not Strategy.MEGATRON:
        yield Advice(
            "grouped-gemm",
            "use a grouped-GEMM expert kernel (transformers' grouped_mm, ScatterMoE, SonicMoE): Unsloth "
            "reports about 12x over a loop over experts (vendor's figure)",
        )
    frozen_gathers = s.lora is not None and plan.strategy in SHARDS_WEIGHTS and s.mesh.ep == 1
    if frozen_gathers and s.mesh.data_parallel > 1 and s.dtypes.quant is None:
        quantised = replace(
            plan,
            strategy=Strategy.DDP,
            replicate=None,
            method=Method.QLORA,
            quant=Quant.INT8,
            quantize_experts=True,
            offload=Offload.NONE,
            quant_storage="bf16",
        )
        other = _memory(quantised)
        if other is not None and other.fits:
            yield Advice(
                "replicate-quantised",
                f"a frozen MoE gathers whole layers however short the sequence; an int8 base replicated "
                f"under DDP needs {gigabytes(other.device)} a GPU and gathers nothing",
                max(0, memory.device - other.device),
                plan=quantised,
            )


SENSITIVE = 0.1  # communication over compute from which slots matter


def slots_matter(found: Prediction) -> bool:
    """Whether communication could stop hiding behind compute in slower slots."""
    return found.time.communication_s > SENSITIVE * found.time.compute_s


def _memory(plan: Plan) -> Memory | None:
    try:
        return memory_of(setting_of(plan))
    except PlanError:
        return None


# What is about adapters alone. The rank, which has a default that everybody passes on, is not among them.
ADAPTER_FIELDS = frozenset(
    {
        "lora_targets",
        "lora_dropout",
        "dora",
        "modules_to_save",
        "adapter_dtype",
        "expert_lora",
        "quantize_experts",
        "kbit_upcast",
    }
)
_DEFAULTS = {field.name: field.default for field in fields(Plan) if field.name in ADAPTER_FIELDS}


def unused_adapter_flags(plan: Plan) -> list[str]:
    """Flags of adapters that say something although the method is full."""
    if plan.method is not Method.FULL:
        return []
    said = [field for field, default in _DEFAULTS.items() if getattr(plan, field) != default]
    return [f"--{field.replace('_', '-')}" for field in said]
