"""Searches the strategies of a model on given GPUs: everything that fits, fastest first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
from msgspec.structs import replace

from ftdash.engine.plan import Checkpointing, Loss, Offload, PipelineSchedule, Plan, PlanError, Strategy
from ftdash.engine.planner.memory import memory_of
from ftdash.engine.planner.setting import setting_of
from ftdash.engine.planner.time import traffic_and_time

STRATEGIES = (
    Strategy.DDP,
    Strategy.ZERO1,
    Strategy.ZERO2,
    Strategy.ZERO3,
    Strategy.FSDP,
    Strategy.FSDP_NO_RESHARD,
)
LARGEST_TP = 8  # beyond a node's NVLink, tensor parallelism never pays
LARGEST_MICRO_BATCH = 64
SHORTEST_FOR_CP = 16_384  # context parallelism costs attention traffic and is for sequences that force it


class Candidate(msgspec.Struct, frozen=True):
    plan: Plan
    tokens_per_s_per_gpu: float  # of data, without padding
    reserved: int  # bytes
    headroom: int  # bytes left on the GPU


class Search(msgspec.Struct, frozen=True):
    """`tried` configurations were evaluated; `candidates` fit, best first."""

    candidates: tuple[Candidate, ...]
    tried: int


def search(plan: Plan, limit: int | None = None) -> Search:
    """All feasible ways to run the plan's model, method, sequence and global batch on its GPUs.

    Ranked by tokens/s, at equal speed (within 1 %) by memory left. Sequences per optimizer step stay
    what the plan says; how they split into micro-batch, accumulation and ranks is searched.
    """
    plain = _plain(plan)
    is_moe = bool(setting_of(plain).sums.routed)  # raises, with one line, where model or GPU cannot be
    found = []
    tried = 0
    for candidate in configurations(plain, _sequences_per_step(plan), is_moe):
        tried += 1
        try:
            s = setting_of(candidate)
        except PlanError:
            continue
        memory = memory_of(s)
        if not memory.fits:
            continue
        speed = traffic_and_time(s)[1].useful_tokens_per_s_per_gpu
        found.append(Candidate(candidate, speed, memory.reserved, memory.headroom))
    found.sort(key=lambda c: c.tokens_per_s_per_gpu, reverse=True)
    ranked = _by_memory_where_equal(found)
    return Search(tuple(ranked[:limit]), tried)


def _by_memory_where_equal(found: list[Candidate]) -> list[Candidate]:
    """Candidates within 1 % of the fastest of their run, by memory left."""
    ranked: list[Candidate] = []
    run: list[Candidate] = []
    for candidate in found:
        if run and candidate.tokens_per_s_per_gpu < 0.99 * run[0].tokens_per_s_per_gpu:
            ranked += sorted(run, key=lambda c: -c.headroom)
            run = []
        run.append(candidate)
    return ranked + sorted(run, key=lambda c: -c.headroom)


def _plain(plan: Plan) -> Plan:
    """The plan with nothing chosen that the search chooses."""
    return replace(
        plan,
        strategy=Strategy.FSDP,
        replicate=None,
        tp=1,
        cp=1,
        pp=1,
        ep=1,
        pp_schedule=PipelineSchedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batches=None,
        offload=Offload.NONE,
    )


def configurations(plan: Plan, sequences: int, is_moe: bool) -> Iterator[Plan]:
    """Every configuration worth asking about for so many sequences a step, invalid ones included."""
    experts_over = _degrees(plan.gpus) if is_moe else [1]
    losses = (plan.loss,) if plan.loss is Loss.FUSED else (plan.loss, Loss.FUSED)
    contexts = _degrees(plan.gpus) if plan.seq_len >= SHORTEST_FOR_CP else [1]
    for tp, cp, ep in product(_degrees(min(plan.gpus, LARGEST_TP)), contexts, experts_over):
        if plan.gpus % (tp * cp):
            continue
        data = plan.gpus // (tp * cp)
        # On one node HSDP is FSDP.
        several = STRATEGIES if plan.gpus <= plan.gpus_per_node else (*STRATEGIES, Strategy.HSDP)
        strategies = (Strategy.NONE,) if data == 1 else several
        per_rank = max(1, sequences // data)
        for micro in _degrees(min(per_rank, LARGEST_MICRO_BATCH)):
            if per_rank % micro:
                continue
            for strategy, checkpointing, loss, offload in product(
                strategies, Checkpointing, losses, (Offload.NONE, Offload.ALL)
            ):
                yield replace(
                    plan,
                    strategy=strategy,
                    tp=tp,
                    cp=cp,
                    ep=ep,
                    micro_batch=micro,
                    grad_accum=per_rank // micro,
                    checkpointing=checkpointing,
                    loss=loss,
                    offload=offload,
                    optimizer_in_backward=plan.optimizer_in_backward and per_rank == micro,
                )


def _degrees(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _sequences_per_step(plan: Plan) -> int:
    data = max(1, plan.gpus // (plan.tp * plan.cp * plan.pp))
    return plan.micro_batch * plan.grad_accum * data
