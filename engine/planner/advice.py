"""What would help: remedies for memory and for speed, each checked by planning again.

Remedies come in the order a practitioner would try them: first what costs no accuracy and little speed.
Where no single one is enough they are added up until the plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from ftdash.engine.plan import (
    Attention,
    Batching,
    Checkpointing,
    ExpertLora,
    Loss,
    Method,
    Offload,
    Optimizer,
    Plan,
    PlanError,
    Strategy,
)
from ftdash.engine.planner.memory import memory_of
from ftdash.engine.planner.numerics import SHARDS_WEIGHTS, ZERO_FAMILY
from ftdash.engine.planner.result import Advice, Memory, Prediction, Verdict
from ftdash.engine.planner.setting import Setting, setting_of
from ftdash.engine.planner.time import traffic_and_time
from ftdash.engine.planner.warnings import gigabytes, warnings

LONG_SEQUENCE = 32_768
MOST_REMEDIES = 4
MUCH_PADDING = 0.8  # share of tokens that are data, below which packing is worth a word


class Remedy(msgspec.Struct, frozen=True):
    code: str
    text: str
    change: Callable[[Setting], Plan | None]  # None where it does not apply


def advise(s: Setting, found: Prediction) -> tuple[Advice, ...]:
    """All advice on a plan: remedies first where it does not fit or is tight, then speed, then warnings."""
    advice: list[Advice] = []
    if found.verdict is not Verdict.FITS:
        advice += _for_memory(s, found)
    advice += _for_speed(s, found)
    advice += warnings(s, found)
    return tuple(advice)


class _Tried(msgspec.Struct, frozen=True):
    """A remedy as it was planned."""

    code: str
    text: str
    setting: Setting
    memory: Memory


def _for_memory(s: Setting, found: Prediction) -> list[Advice]:
    """Single remedies that fit, or the shortest combination in order and what saves most where none does."""
    need = found.memory.device
    helpful: list[_Tried] = []
    remedies: list[Remedy] = []
    enough = 0
    for remedy in REMEDIES:
        tried = _try(remedy.code, remedy.text, remedy.change(s))
        if tried is None or tried.memory.device >= need:
            continue
        helpful.append(tried)
        remedies.append(remedy)
        enough += tried.memory.fits
        if enough == MOST_REMEDIES:
            break
    if enough:
        chosen = [tried for tried in helpful if tried.memory.fits]
    else:
        helpful.sort(key=lambda tried: tried.memory.device)
        combined = _combine(s, remedies)
        chosen = [*([combined] if combined else []), *helpful[:MOST_REMEDIES]]
    return [_remedy(found, tried) for tried in chosen]


def _combine(s: Setting, remedies: list[Remedy]) -> _Tried | None:
    current, used = s, []
    for remedy in remedies:
        tried = _try(remedy.code, remedy.text, remedy.change(current))
        if tried is None:
            continue
        current = tried.setting
        used.append(remedy)
        if tried.memory.fits:
            text = ", then ".join(one.text for one in used)
            return _Tried("+".join(one.code for one in used), text, current, tried.memory)
    return None


def _try(code: str, text: str, plan: Plan | None) -> _Tried | None:
    """The remedy planned, or None where it does not apply or cannot be."""
    if plan is None:
        return None
    try:
        changed = setting_of(plan)
    except PlanError:
        return None
    return _Tried(code, text, changed, memory_of(changed))


def _remedy(found: Prediction, tried: _Tried) -> Advice:
    memory = tried.memory
    saved = found.memory.device - memory.device
    speed = traffic_and_time(tried.setting)[1].tokens_per_s_per_gpu / found.time.tokens_per_s_per_gpu
    fits = "fits then" if memory.fits else f"still {gigabytes(memory.device)} a GPU"
    text = f"{tried.text}: saves {gigabytes(saved)} a GPU, {fits}, {speed:.2f}x the speed"
    return Advice(tried.code, text, saved, speed, tried.setting.plan)


def _checkpointing(s: Setting) -> Plan | None:
    return (
        None
        if s.plan.checkpointing is Checkpointing.FULL
        else replace(s.plan, checkpointing=Checkpointing.FULL)
    )


def _fused_loss(s: Setting) -> Plan | None:
    return None if s.plan.loss is Loss.FUSED else replace(s.plan, loss=Loss.FUSED)


def _shard(s: Setting) -> Plan | None:
    if s.plan.strategy in (Strategy.FSDP_NO_RESHARD, Strategy.HSDP):
        return replace(s.plan, strategy=Strategy.FSDP, replicate=None)
    unsharded = s.plan.strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2) and s.mesh.data_parallel > 1
    if not unsharded:
        return None
    sharded = Strategy.ZERO3 if s.plan.strategy in ZERO_FAMILY else Strategy.FSDP
    return replace(s.plan, strategy=sharded, replicate=None)


def _smaller_micro_batch(s: Setting) -> Plan | None:
    half = s.plan.micro_batch // 2
    if not half or s.plan.optimizer_in_backward:
        return None
    return replace(s.plan, micro_batch=half, grad_accum=s.plan.grad_accum * s.plan.micro_batch // half)


def _scaled_experts(s: Setting) -> Plan | None:
    if s.plan.expert_lora is not ExpertLora.FULL:
        return None
    return replace(s.plan, expert_lora=ExpertLora.SCALED)


def _small_optimizer(s: Setting) -> Plan | None:
    adam = s.plan.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH)
    if not adam or s.plan.method is not Method.FULL or s.plan.strategy in ZERO_FAMILY:
        return None
    return replace(s.plan, optimizer=Optimizer.ADAMW_8BIT)


def _expert_parallel(s: Setting) -> Plan | None:
    if not s.sums.routed or s.mesh.ep > 1:
        return None
    experts = next(group.layer.moe.experts for group in s.shape.groups if group.layer.moe)
    borrowed = s.mesh.shard * s.mesh.cp * s.mesh.tp
    degree = next((d for d in (8, 4, 2) if borrowed % d == 0 and experts % d == 0), None)
    return replace(s.plan, ep=degree) if degree else None


def _context_parallel(s: Setting) -> Plan | None:
    data = s.mesh.data_parallel // s.mesh.replicate
    if s.plan.seq_len < LONG_SEQUENCE or s.plan.micro_batch > 1 or data < 2 or s.mesh.cp > 1:
        return None
    degree = next((d for d in (8, 4, 2) if data % d == 0 and s.plan.seq_len % (2 * d) == 0), None)
    return replace(s.plan, cp=degree) if degree else None


def _offload_activations(s: Setting) -> Plan | None:
    return None if s.plan.activation_offload or s.gpu.unified else replace(s.plan, activation_offload=True)


def _offload_states(s: Setting) -> Plan | None:
    if s.plan.offload is not Offload.NONE or s.gpu.unified:
        return None
    if s.plan.strategy in SHARDS_WEIGHTS:
        return replace(s.plan, offload=Offload.ALL)
    if s.plan.strategy in (Strategy.ZERO1, Strategy.ZERO2) and s.plan.method is Method.FULL:
        return replace(s.plan, offload=Offload.OPTIMIZER)
    return None


def _lora(s: Setting) -> Plan | None:
    return None if s.plan.method is not Method.FULL else replace(s.plan, method=Method.LORA)


def _qlora(s: Setting) -> Plan | None:
    if s.plan.method is Method.QLORA or s.plan.quant is not None:
        return None
    return replace(s.plan, method=Method.QLORA)


REMEDIES = (
    Remedy("full-checkpointing", "recompute every block in backward", _checkpointing),
    Remedy("fused-loss", "a fused cross-entropy that never builds the logits", _fused_loss),
    Remedy("shard-weights", "shard the weights over all data-parallel ranks", _shard),
    Remedy(
        "smaller-micro-batch", "halve the micro-batch and accumulate twice as often", _smaller_micro_batch
    ),
    Remedy("scaled-expert-lora", "expert adapters of rank r // E", _scaled_experts),
    Remedy("expert-parallel", "spread the experts over ranks", _expert_parallel),
    Remedy("context-parallel", "split each sequence over ranks", _context_parallel),
    Remedy("adamw-8bit", "8-bit optimizer states", _small_optimizer),
    Remedy("activation-offload", "move saved activations to the host", _offload_activations),
    Remedy("offload", "keep parameters and optimizer state in host memory", _offload_states),
    Remedy("lora", "train adapters on a frozen base", _lora),
    Remedy("qlora", "quantise the frozen base to 4 bits", _qlora),
)


def _for_speed(s: Setting, found: Prediction) -> Iterator[Advice]:
    """The rules of thumb for a run that its links bind, each with the speed planned for the change."""
    plan, time = s.plan, found.time
    bound = time.bound_by in ("pcie", "network", "nvlink")
    gathers = plan.strategy in SHARDS_WEIGHTS and s.mesh.data_parallel > 1
    if bound and gathers:
        if time.bound_by == "pcie" and plan.strategy is not Strategy.FSDP_NO_RESHARD:
            lighter = replace(plan, strategy=Strategy.ZERO2, replicate=None, offload=Offload.NONE)
            advice = _faster(
                found, "zero2-on-pcie", "ZeRO-2 sends gradients once and gathers no weights on PCIe", lighter
            )
            if advice:
                yield advice
            elif plan.method is Method.FULL:
                trained = _faster(
                    found,
                    "lora-on-pcie",
                    "LoRA sends only the adapters' gradients",
                    replace(plan, method=Method.LORA),
                )
                if trained:
                    yield trained
        more = _more_tokens(plan)
        advice = _faster(
            found,
            "more-tokens-per-micro-step",
            f"micro-batch {more.micro_batch}: weights are gathered once a micro-step whatever its tokens; "
            f"accumulation gathers them again each time",
            more,
        )
        if advice:
            yield advice
    if s.mesh.shard_spans_nodes and plan.strategy in (Strategy.FSDP, Strategy.FSDP1) and s.mesh.cp == 1:
        hybrid = _faster(
            found,
            "hsdp-across-nodes",
            "shard inside each node and replicate across: only the gradient all-reduce crosses the network",
            replace(plan, strategy=Strategy.HSDP, replicate=None),
        )
        if hybrid:
            yield hybrid
    if time.useful_share < MUCH_PADDING and plan.batching is not Batching.PACKED:
        packed = replace(plan, batching=Batching.PACKED, attention=_varlen(s))
        advice = _faster(
            found,
            "pack-samples",
            f"{1 - time.useful_share:.0%} of the tokens are padding: pack samples into rows",
            packed,
        )
        if advice:
            yield advice
    if s.mesh.cp > 1:
        without = replace(plan, cp=1)
        advice = _faster(
            found, "cp-not-needed", "the sequence fits without context parallelism", without, least=0.0
        )
        if advice:
            yield advice


def _varlen(s: Setting) -> Attention:
    """Kernels that keep packed samples apart without a mask, where the GPU has them."""
    return s.plan.attention if s.gpu.bf16_flops is None else Attention.FLASH


def _more_tokens(plan: Plan) -> Plan:
    if plan.grad_accum > 1:
        return replace(plan, micro_batch=plan.micro_batch * 2, grad_accum=max(1, plan.grad_accum // 2))
    return replace(plan, micro_batch=plan.micro_batch * 2)


def _faster(found: Prediction, code: str, text: str, plan: Plan, least: float = 1.05) -> Advice | None:
    """The change, where it fits and is planned to be faster by at least that factor, in tokens of data."""
    try:
        s = setting_of(plan)
    except PlanError:
        return None
    speed = traffic_and_time(s)[1].useful_tokens_per_s_per_gpu / found.time.useful_tokens_per_s_per_gpu
    if speed < least:
        return None
    memory = memory_of(s)
    if not memory.fits:
        return None
    saves = max(0, found.memory.device - memory.device)
    return Advice(code, f"{text}: {speed:.2f}x the speed", saves, speed, plan)
