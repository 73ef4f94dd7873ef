"""What a plan costs before it runs: memory by phase, traffic, time, and what would help."""

from __future__ import annotations

from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner.result import Prediction, Verdict
from ftdash.engine.planner.setting import Setting, setting_of

__all__ = ["PlanError", "Prediction", "Verdict", "check", "evaluate", "predict"]

# Under this share of free memory an MoE is tight: its hottest rank needs more than the even share.
TIGHT_HEADROOM = 0.04
TIGHT_HEADROOM_MOE = 0.08


def check(plan: Plan) -> None:
    """Raise PlanError, one line naming the flag and the valid values, where the plan cannot be."""
    setting_of(plan)


def evaluate(plan: Plan) -> Prediction:
    """The plan's whole cost with advice. Raises PlanError."""
    return predict(setting_of(plan))


def predict(s: Setting) -> Prediction:
    """The cost of a checked setting, without advice."""
    from ftdash.engine.planner.memory import memory_of
    from ftdash.engine.planner.numerics import reduce_dtype
    from ftdash.engine.planner.result import ModelCounts
    from ftdash.engine.planner.time import traffic_and_time

    memory = memory_of(s)
    traffic, time = traffic_and_time(s)
    tight = TIGHT_HEADROOM_MOE if s.sums.routed else TIGHT_HEADROOM
    verdict = Verdict.FITS
    if memory.headroom < 0:
        verdict = Verdict.DOES_NOT_FIT
    elif memory.headroom < tight * memory.capacity:
        verdict = Verdict.TIGHT
    return Prediction(
        plan=s.plan,
        model=ModelCounts(s.shape.name, s.sums.total, s.sums.active, s.trainable_params),
        memory=memory,
        traffic=traffic,
        time=time,
        verdict=verdict,
        reduce_dtype=reduce_dtype(s.plan),
        notes=s.shape.unplaced,
    )
