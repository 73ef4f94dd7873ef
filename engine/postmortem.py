"""Why a run ran out of memory: the phase and term that broke its plan, the tokens behind it, what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import predict
from ftdash.engine.planner.advice import MOST_REMEDIES, REMEDIES
from ftdash.engine.planner.result import Memory, PhaseName, Prediction, Term
from ftdash.engine.planner.setting import Setting, setting_of
from ftdash.monitor.diagnosis import oomtext
from ftdash.monitor.diagnosis.frames import read_frames
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.logverdict import implied_tokens
from ftdash.monitor.diagnosis.model import Frame, LogFinding, LogKind
from ftdash.monitor.diagnosis.oomtext import OomText

_GIB = 1 << 30
_PHASES = {
    Phase.INIT: PhaseName.LOAD,
    Phase.LOAD: PhaseName.LOAD,
    Phase.SAVE: PhaseName.SAVE,
    Phase.OPTIMIZER: PhaseName.OPTIMIZER_STEP,
    Phase.FORWARD: PhaseName.FORWARD_END,
}
_LOGITS = (
    "logits",
    "cross_entropy",
    "loss_function",
    "ForCausalLMLoss",
    "lm_head",
    "fixed_cross_entropy",
    "float",
)
_GATHERS = (
    "all_gather",
    "unshard",
    "foreach_all_gather",
    "fetch_sub_module",
    "_all_gather_base",
    "full_tensor",
)
_LOSS_SLACK = 1.1  # an implied token count this much above the configured one is another batch than planned


@dataclass(frozen=True, slots=True)
class PostMortem:
    """What broke the plan. Sizes are bytes; `phase` and `term` are None where the traceback does not say."""

    host: bool  # the host's memory, not the GPU's
    rank: int | None
    phase: PhaseName | None
    term: Term | None
    wanted: int | None
    implied_tokens: int | None  # of the failed allocation, if it held logits
    configured_tokens: int | None  # of one micro-batch on one rank
    planned: int | None  # what the plan expected at its peak, as the GPU or the host would show it
    remedies: tuple[Remedied, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remedied:
    """A remedy planned anew: `needs` is what it takes then, in the bytes of what ran out."""

    text: str
    needs: int
    plan: Plan


def post_mortem(finding: LogFinding, plan: Plan | None, *, capacity: int | None = None) -> PostMortem:
    """Explain one out-of-memory finding of a run that had `plan`; without one, what the text alone says.

    `capacity` is the host's memory in bytes, for a host that ran out of it; without it no remedy can be
    said to fit, and none is given.
    """
    said = oomtext.parse(finding.text)
    host = finding.kind is LogKind.HOST_OOM
    names = [frame.short for frame in finding.frames]
    phase = _phase(finding.frames)
    setting = _setting(plan)
    facts = list(_facts(said, host))
    tokens = configured = None
    if setting is not None and not host:
        configured = setting.tokens
        if said.wanted and _mentions(finding, names, _LOGITS):
            tokens = implied_tokens(said.wanted, setting.shape.vocab)
    term = None if host else _term(finding, names, phase, setting)
    if setting is None:
        return PostMortem(host, finding.rank, phase, term, said.wanted, None, None, None, (), tuple(facts))
    if tokens and configured and tokens > _LOSS_SLACK * configured:
        facts.append(
            f"the batch was not the planned one: {tokens:,} tokens against {configured:,} (padding, packing, "
            "a long sample); the remedies are planned for what came"
        )
        setting = _with_tokens(setting, tokens)
    planned = predict(setting)
    if host:
        needed = planned.memory.host_ram_per_node
        remedies = _fitting(setting, lambda memory: memory.host_ram_per_node, capacity) if capacity else ()
    else:
        needed = planned.memory.device
        room, unplanned = _room(said, planned)
        if unplanned > 0:
            facts.append(
                f"{unplanned / _GIB:.1f} GiB more was in use than planned; the remedies leave room for it"
            )
        remedies = _fitting(setting, lambda memory: memory.device, room)
    return PostMortem(
        host, finding.rank, phase, term, said.wanted, tokens, configured, needed, remedies, tuple(facts)
    )


def _setting(plan: Plan | None) -> Setting | None:
    if plan is None:
        return None
    try:
        return setting_of(plan)
    except PlanError:
        return None


def _phase(frames: Iterable[Frame]) -> PhaseName | None:
    reading = read_frames(list(frames))
    if reading.step is Phase.BACKWARD:
        return (
            PhaseName.BACKWARD_END
            if "_engine_run_backward" not in reading.names
            else PhaseName.BACKWARD_START
        )
    for phase in (reading.context, reading.step):
        if phase in _PHASES:
            return _PHASES[phase]
    return None


def _mentions(finding: LogFinding, names: list[str], words: Iterable[str]) -> bool:
    return any(word in names or word in finding.text for word in words)


def _term(
    finding: LogFinding, names: list[str], phase: PhaseName | None, setting: Setting | None
) -> Term | None:
    """What the failed allocation was for: by the functions it failed in, else the phase's largest term."""
    if _mentions(finding, names, _LOGITS):
        return Term.LOGITS
    if _mentions(finding, names, _GATHERS):
        return Term.GATHERED
    if phase is PhaseName.OPTIMIZER_STEP:
        return Term.OPTIMIZER
    if phase is PhaseName.LOAD:
        return Term.WEIGHTS
    if setting is None or phase is None:
        return None
    found = next((one for one in predict(setting).memory.phases if one.name is phase), None)
    return max(found.terms(), key=lambda item: item[1])[0] if found else None


def _facts(said: OomText, host: bool) -> Iterable[str]:
    if host:
        yield "the host's memory ran out, not the GPU's"
        return
    if said.capacity and said.free is not None:
        yield f"the GPU has {said.capacity / _GIB:.1f} GiB, {said.free / _GIB:.2f} GiB were free"
    if said.others:
        yield f"other processes held {said.others / _GIB:.1f} GiB of that GPU"
    if said.fragmented:
        yield (
            f"the allocator held {(said.unallocated or 0) / _GIB:.2f} GiB in pieces that were too small: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )


def _room(said: OomText, planned: Prediction) -> tuple[int, int]:
    """(bytes a remedy may take by the plan's own count, bytes that were in use beyond the plan)."""
    room = (said.capacity or planned.memory.capacity) - (said.others or 0)
    seen = (said.in_use or 0) + (said.wanted or 0)
    unplanned = max(0, seen - planned.memory.device)
    return room - unplanned, unplanned


def _with_tokens(setting: Setting, tokens: int) -> Setting:
    """The same plan with so many tokens in a micro-batch of one rank."""
    plan = setting.plan
    longer = math.ceil(plan.seq_len * tokens / setting.tokens)
    return _setting(replace(plan, seq_len=longer)) or setting


def _fitting(setting: Setting, needs: Callable[[Memory], int], room: int) -> tuple[Remedied, ...]:
    """Single remedies that fit into `room`, in the order to try them; else the shortest sum that does."""
    single: list[Remedied] = []
    current, texts = setting, []
    combined: Remedied | None = None
    for remedy in REMEDIES:
        alone = _setting(remedy.change(setting))
        if alone is not None and (need := needs(predict(alone).memory)) <= room:
            single.append(Remedied(remedy.text, need, alone.plan))
        added = _setting(remedy.change(current))
        if combined is None and added is not None:
            before, need = needs(predict(current).memory), needs(predict(added).memory)
            if need < before:
                current = added
                texts.append(remedy.text)
                if need <= room:
                    combined = Remedied(", then ".join(texts), need, added.plan)
    if single:
        return tuple(single[:MOST_REMEDIES])
    return (combined,) if combined else ()


def lines(found: PostMortem) -> tuple[str, ...]:
    """The post-mortem as sentences for the evidence list."""
    what = "host memory" if found.host else "GPU memory"
    where = f" of rank {found.rank}" if found.rank is not None else ""
    parts = [f"{what}{where} ran out"]
    if found.phase:
        parts.append(f"at {found.phase}")
    if found.term:
        parts.append(f"for {found.term}")
    said = [" ".join(parts)]
    if found.implied_tokens:
        text = f"the failed allocation is the fp32 logits of {found.implied_tokens:,} tokens"
        if found.configured_tokens:
            times = found.implied_tokens / found.configured_tokens
            text += f", {times:.1f}x the {found.configured_tokens:,} of a planned micro-batch"
        said.append(text)
    if found.planned:
        said.append(f"the plan, as it ran, expected {found.planned / _GIB:.1f} GiB at its peak")
    said += found.facts
    return tuple(said)


def next_steps(found: PostMortem) -> tuple[str, ...]:
    """Remedies to try, each planned anew."""
    return tuple(f"{one.text}: {one.needs / _GIB:.1f} GiB then, which fits" for one in found.remedies)
