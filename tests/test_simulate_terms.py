"""The simulation's categories beside the planner's terms: nothing is lost, and each is told apart."""

from __future__ import annotations

import json

import pytest

from ftdash.engine.planner import evaluate
from ftdash.engine.simulate.terms import side_by_side
from tests.tools.simulate_grid import plan_of, stored_rows

ROWS = stored_rows()


@pytest.mark.parametrize("row", ROWS, ids=[str(index) for index in range(len(ROWS))])
def test_both_sums_are_kept(row: dict[str, str]) -> None:
    breakdown = json.loads(row["breakdown"])
    phase = evaluate(plan_of(row["flags"])).memory.peak
    pairs = side_by_side(breakdown, phase)
    assert sum(pair.simulated for pair in pairs) == sum(breakdown.values())
    assert sum(pair.planned for pair in pairs) == phase.total


def test_states_agree_term_by_term() -> None:
    """Weights and optimizer state hardly depend on which moment is the peak, but for the step itself, whose
    temporaries the tracker books as state."""
    in_training = [row for row in ROWS if row["peak_part"] != "optimizer step"]
    assert len(in_training) > 0.8 * len(ROWS)
    for row in in_training:
        phase = evaluate(plan_of(row["flags"])).memory.peak
        for pair in side_by_side(json.loads(row["breakdown"]), phase):
            if pair.name in ("weights", "optimizer"):
                assert pair.planned == pytest.approx(pair.simulated, rel=0.02, abs=2e6), row["flags"]
