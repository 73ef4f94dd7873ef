"""The closed form against stored simulations of the real classes."""

from __future__ import annotations

import statistics

from ftdash.engine.planner import evaluate
from tests.tools.simulate_grid import plan_of, stored_rows


def test_the_stored_grid_spans_models_methods_ranks_and_lengths() -> None:
    plans = [plan_of(row["flags"]) for row in stored_rows()]
    assert len(plans) >= 40
    assert {plan.method.value for plan in plans} == {"full", "lora"}
    assert {plan.checkpointing.value for plan in plans} == {"none", "full"}
    assert {1, 2, 8, 64} <= {plan.gpus for plan in plans}
    assert {1024, 16384} <= {plan.seq_len for plan in plans}
    assert any("a3b" in (plan.model or "") for plan in plans)


def test_the_closed_form_agrees_with_the_simulations() -> None:
    """3 % in the median and 8 % at most."""
    off = {
        row["flags"]: abs(evaluate(plan_of(row["flags"])).memory.allocated / int(row["allocated"]) - 1)
        for row in stored_rows()
    }
    assert statistics.median(off.values()) <= 0.03
    assert max(off.values()) <= 0.08, max(off, key=lambda flags: off[flags])
