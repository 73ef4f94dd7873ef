"""Which loss a script that does not report itself is said to have."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from ftdash.monitor.inject.own import Follower


@pytest.mark.parametrize(
    ("added", "told"), [(1.0, 2.0), (math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)]
)
def test_a_loss_that_the_script_itself_made_infinite_is_told(added, told):
    import torch

    follower, records = Follower(), []
    follower.hook = SimpleNamespace(step=lambda **fields: records.append(fields), enter=lambda phase: None)
    weight = torch.nn.Parameter(torch.tensor(2.0))
    of_model = weight * 1.0
    follower._add_loss(of_model)
    follower.roots._add(of_model + added)
    follower._step(SimpleNamespace(param_groups=[]))
    assert float(records[0]["loss"]) == pytest.approx(told, nan_ok=True)
