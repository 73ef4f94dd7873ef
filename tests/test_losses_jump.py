"""A loss that jumps is told by the noise of the run's own losses; healthy noisy curves are not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.losses import LossLevel
from tests.support.runs import play, step_record

RECORDED: dict[str, list[float]] = json.loads((Path(__file__).parent / "data" / "losses.json").read_text())


def jumps(losses: Iterable[float]) -> list[int]:
    """The steps at which a jump was seen."""
    level, found = LossLevel(), []
    for step, loss in enumerate(losses):
        level.add(step, loss)
        if level.jump is not None and level.jump.step == step:
            found.append(step)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_healthy_losses_do_not_jump(name: str) -> None:
    assert len(RECORDED[name]) > 100
    assert jumps(RECORDED[name]) == []


@pytest.mark.parametrize("name", [name for name, losses in RECORDED.items() if len(losses) >= 300])
def test_a_jump_of_a_recorded_run_is_seen_within_five_steps_and_one_bad_batch_is_none(name: str) -> None:
    losses = RECORDED[name]
    at = len(losses) - 20
    assert jumps([*losses[:at], losses[0] + 2.0, *losses[at + 1 :]]) == []
    seen = jumps(losses[:at] + [loss + losses[0] for loss in losses[at:]])
    assert at < seen[0] <= at + 5


@pytest.mark.parametrize(
    "noise",
    [
        lambda draw: 2 + 0.3 * draw.gauss(0, 1),
        lambda draw: math.exp(0.5 * draw.gauss(0, 1)),  # of single samples: skewed
        lambda draw: 2 + 0.2 * draw.gauss(0, 1) / math.sqrt(draw.expovariate(1)),  # heavy tails
        lambda draw: 4 if draw.random() < 0.05 else 1 + 0.1 * draw.gauss(0, 1),  # a few hard samples
    ],
    ids=["normal", "skewed", "heavy-tails", "hard-samples"],
)
def test_noise_of_small_batches_is_no_jump(noise) -> None:
    draw = random.Random(7)
    assert jumps(noise(draw) for _ in range(5000)) == []


def test_a_loss_that_climbs_away_is_a_jump() -> None:
    draw = random.Random(7)
    assert jumps(1 + 0.2 * draw.gauss(0, 1) + 0.05 * max(0, step - 300) for step in range(380))


def test_a_jump_is_told_with_its_gradient_for_fifty_steps() -> None:
    draw = random.Random(7)
    losses = [2 + 0.1 * draw.gauss(0, 1) + 3 * (step >= 200) for step in range(400)]

    def change(rank: int, step: int) -> dict[str, float]:
        return {"loss": losses[step], "grad_norm": 50.0 if step == 200 else 1.0}

    history, state = play(206, change=change)
    jump, spike = find_alerts(state, history)
    assert (jump.code, jump.severity, spike.code) == ("loss-jump", "warning", "grad-spike")
    assert jump.text.startswith("loss jumped: 5")
    assert jump.text.endswith("gradient norm 50 at step 200, 50 × its median")
    history, state = play(199, change=change)
    assert find_alerts(state, history) == ()
    history, state = play(399, change=change)  # the run has stayed there: its usual level by now
    assert find_alerts(state, history) == ()


def test_a_run_that_goes_on_from_a_checkpoint_begins_its_level_anew() -> None:
    history, state = play(200, change=lambda rank, step: {"loss": 0.5 + 0.01 * (step % 7)})
    for step in range(100, 120):
        history.add_step(0, step_record(step, loss=3.0 + 0.01 * (step % 7)))
    assert find_alerts(replace(state, step=119), history) == ()
