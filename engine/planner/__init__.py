"""What a plan costs before it runs: memory by phase, traffic, time, and what would help."""

from __future__ import annotations

from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner.memory import memory_of
from ftdash.engine.planner.numerics import reduce_dtype
from ftdash.engine.planner.result import Advice, Memory, ModelCounts, Prediction, Verdict
from ftdash.engine.planner.setting import Setting, setting_of
from ftdash.engine.planner.time import traffic_and_time
from ftdash.engine.planner.uncertainty import spread_of

__all__ = ["Advice", "PlanError", "Prediction", "Verdict", "check", "evaluate", "predict"]

# Under this share of free memory a plan is tight; an MoE's hottest rank needs more than the even share.
TIGHT_HEADROOM = 0.04
TIGHT_HEADROOM_MOE = 0.08


def check(plan: Plan) -> None:
    """Raise PlanError, one line naming the flag and the valid values, where the plan cannot be."""
    setting_of(plan)


def evaluate(plan: Plan) -> Prediction:
    """The plan's whole cost, in a fifth of a millisecond. Raises PlanError.

    Its advice plans every remedy again, a few milliseconds where the plan does not fit, and is worked out
    when it is first read.
    """
    return predict(setting_of(plan))


def predict(s: Setting) -> Prediction:
    """The cost of a checked setting."""
    memory = memory_of(s)
    traffic, time = traffic_and_time(s)
    return Prediction(
        plan=s.plan,
        model=ModelCounts(s.shape.name, s.sums.total, s.sums.active, s.trainable_params),
        memory=memory,
        traffic=traffic,
        time=time,
        verdict=_verdict(s, memory),
        reduce_dtype=reduce_dtype(s.plan),
        device_range=spread_of(s).of(memory),
        notes=s.shape.unplaced,
    )


def _verdict(s: Setting, memory: Memory) -> Verdict:
    if memory.headroom < 0:
        return Verdict.DOES_NOT_FIT
    tight = TIGHT_HEADROOM_MOE if s.sums.routed else TIGHT_HEADROOM
    return Verdict.TIGHT if memory.headroom < tight * memory.capacity else Verdict.FITS
