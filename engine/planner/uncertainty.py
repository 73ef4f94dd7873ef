"""How far a plan's memory may be off, by what the plan is made of: the spread that published runs show."""

from __future__ import annotations

import msgspec

from ftdash.engine.plan import Batching, Strategy
from ftdash.engine.planner.numerics import LOW_PRECISION
from ftdash.engine.planner.result import Memory
from ftdash.engine.planner.setting import Setting

# Four of five published runs are planned within this share of what was measured (python -m tests.accuracy).
USUAL = 0.10


class Spread(msgspec.Struct, frozen=True):
    """How far plans of a class are off, as a share of what is measured, and why it is wider than usual; ""
    where it is not. `short` is how far they fall short of it where that is more than they exceed it."""

    share: float
    why: str = ""
    short: float = 0.0

    def of(self, memory: Memory) -> tuple[int, int]:
        """Bytes of the device at both ends: what a plan that is off by the share, either way, would have been
        measured as; never less than what surely stands there."""
        low = max(memory.model_states.total + memory.context, round(memory.device / (1 + self.share)))
        return min(low, memory.device), round(memory.device / (1 - max(self.share, self.short)))


def spread_of(s: Setting) -> Spread:
    """The widest of the classes that a plan belongs to. Shares are the largest errors seen in each class."""
    plan = s.plan
    if plan.batching in (Batching.LONGEST, Batching.PADDING_FREE):
        return Spread(
            USUAL,
            "rows of every length leave blocks of every size in the allocator; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it reuse them",
            short=0.60,
        )
    if plan.precision in LOW_PRECISION and not plan.compile:
        return Spread(0.40, "which copies an eager 8-bit product leaves for backward depends on the version")
    if s.sums.routed and s.mesh.ep > 1:
        return Spread(0.25, "routing is uneven, and the hottest rank sets the peak")
    if plan.precision in LOW_PRECISION and plan.strategy is Strategy.MEGATRON:
        return Spread(0.25, "Transformer Engine decides what is kept in 8 bits")
    if plan.whole_graph:
        return Spread(0.20, "the graph's compiler decides what is saved and when it is freed")
    return Spread(USUAL)
