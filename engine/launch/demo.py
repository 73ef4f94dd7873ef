"""The demo: a real two-rank FSDP2 fine-tune of a tiny mixture of experts on CPU, and how to doubt it."""

from __future__ import annotations

import math
from pathlib import Path

from ftdash.engine.launch.spec import Device, LaunchSpec
from ftdash.engine.plan import Checkpointing, Plan, Precision, Strategy
from ftdash.monitor.state import RunPhase, RunState
from ftdash.monitor.summary import RankSummary

RANKS = 2
STEPS = 700  # about three minutes on two cores


def demo_spec(steps: int = STEPS, runs: Path | None = None) -> LaunchSpec:
    """Two CPU ranks, FSDP2, full fine-tune of tiny-moe on the shipped chats."""
    plan = Plan(
        model="tiny-moe",
        gpus=RANKS,
        gpus_per_node=RANKS,
        strategy=Strategy.FSDP,
        micro_batch=4,
        seq_len=512,
        checkpointing=Checkpointing.NONE,
        precision=Precision.FP32,
    )
    return LaunchSpec(plan=plan, steps=steps, device=Device.CPU, name="demo", runs=runs)


def doubts(state: RunState, ranks: dict[int, RankSummary], steps: int) -> list[str]:
    """Reasons not to believe that the demo trained as asked; empty when it did.

    Exit code 0 and a falling loss prove nothing: libraries fall back to fewer ranks or to DDP in silence.
    """
    found = []
    if state.state is not RunPhase.FINISHED:
        found.append(
            f"the run is {state.state}" + (f": {state.manifest.reason}" if state.manifest.reason else "")
        )
    if sorted(ranks) != list(range(RANKS)):
        found.append(f"telemetry of ranks {sorted(ranks)} instead of {list(range(RANKS))}")
    for rank in ranks.values():
        meta, last = rank.meta, rank.last
        if meta is None or last is None:
            found.append(f"rank {rank.rank} told nothing")
            continue
        if meta.world_size != RANKS:
            found.append(f"rank {rank.rank} trained in a world of {meta.world_size}")
        if "FSDP" not in meta.distributed_type.upper() or meta.dtensor_params == 0:
            found.append(f"rank {rank.rank} ran {meta.distributed_type or 'nothing distributed'}, not FSDP2")
        if last.step != steps:
            found.append(f"rank {rank.rank} made {last.step} of {steps} steps")
        if not rank.experts:
            found.append(f"rank {rank.rank} counted no tokens per expert")
    if state.loss is None or not math.isfinite(state.loss):
        found.append(f"the loss is {state.loss}")
    return found
