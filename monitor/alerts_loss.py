"""What is odd about a run's loss and gradient norm: not finite, zero, repeated, a jump, no fall."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from ftdash.monitor.history import RunHistory
from ftdash.monitor.state import Alert, RunState
from ftdash.monitor.wording import rank_list

ZERO_LOSSES = 3  # in a row
SAME_LOSSES = 5
FLAT_STEPS = 200
RECENT_STEPS = 50  # for so long a spike or jump that has passed is told


def loss_alerts(state: RunState, history: RunHistory, limits: object) -> Iterator[Alert]:
    """All of them, in the order of this module's first line."""
    for rule in (_not_finite, _odd_losses, _jump, _grad_spike, _flat_loss):
        yield from rule(state, history)


def _not_finite(state: RunState, history: RunHistory) -> Iterator[Alert]:
    loss = {rank: past.loss_nan for rank, past in history.ranks.items() if past.loss_nan is not None}
    grad = {rank: past.grad_nan for rank, past in history.ranks.items() if past.grad_nan is not None}
    if loss:
        first = min(odd.first_step for odd in loss.values())
        culprits = sorted(rank for rank, odd in loss.items() if odd.first_step == first)
        text = f"loss is not finite since step {first} on {rank_list(culprits)}"
        if len(loss) > len(culprits):
            text += f"; {len(loss)} ranks by now"
        yield Alert("loss-nan", "error", text + _steps_since(state, first), tuple(culprits))
    grad_only = {rank: odd for rank, odd in grad.items() if rank not in loss}
    if grad_only and not loss:
        first = min(odd.first_step for odd in grad_only.values())
        culprits = sorted(rank for rank, odd in grad_only.items() if odd.first_step == first)
        repeated = max(odd.count for odd in grad_only.values())
        steps = "1 step" if repeated == 1 else f"{repeated} steps"
        text = (
            f"gradient norm is not finite since step {first} ({steps}) while the loss looks clean: the"
            " trainer's filter hides NaN losses (logging_nan_inf_filter), the weights may be ruined"
        )
        yield Alert("grad-nan", "error", text, tuple(culprits))


def _steps_since(state: RunState, step: int) -> str:
    return f" ({state.step - step} steps ago)" if state.step > step else ""


def _odd_losses(state: RunState, history: RunHistory) -> Iterator[Alert]:
    zero = [rank for rank, past in history.ranks.items() if past.zero_losses >= ZERO_LOSSES]
    if zero:
        count = max(history.ranks[rank].zero_losses for rank in zero)
        text = (
            f"loss is exactly 0 for {count} steps on {rank_list(zero)}: no label tokens (all masked), an"
            " underflow, or a hidden NaN"
        )
        yield Alert("loss-zero", "error", text, tuple(sorted(zero)))
    same = [
        rank
        for rank, past in history.ranks.items()
        if past.same_losses >= SAME_LOSSES and past.last_loss != 0.0
    ]
    if same:
        past = history.ranks[same[0]]
        text = (
            f"loss repeats to the last digit ({past.last_loss:g}) for {past.same_losses + 1} steps on"
            f" {rank_list(same)}: nothing is learned, or the trainer replaces NaN losses"
        )
        yield Alert("loss-repeated", "warning", text, tuple(sorted(same)))


def _jump(state: RunState, history: RunHistory) -> Iterator[Alert]:
    jump = history.losses.jump
    if jump is None or state.step - jump.step > RECENT_STEPS:
        return
    text = (
        f"loss jumped: {jump.level:.4g} over the steps to {jump.step}, {jump.usual:.4g} before, with a noise"
        f" of {jump.sigma:.2g}"
    )
    if history.grad_spike is not None and abs(history.grad_spike[0] - jump.step) <= RECENT_STEPS:
        step, norm, usual = history.grad_spike
        text += f"; gradient norm {norm:.3g} at step {step}, {norm / usual:.0f} × its median"
    yield Alert("loss-jump", "warning", text)


def _grad_spike(state: RunState, history: RunHistory) -> Iterator[Alert]:
    if history.grad_spike is None or state.step - history.grad_spike[0] > RECENT_STEPS:
        return
    step, norm, usual = history.grad_spike
    yield Alert(
        "grad-spike",
        "warning",
        f"gradient norm {norm:.3g} at step {step}, {norm / usual:.0f} × its median {usual:.3g}",
    )


def _flat_loss(state: RunState, history: RunHistory) -> Iterator[Alert]:
    """Compares the median of the run's first and newest tenth, at least twenty points each."""
    losses = [(p.step, p.loss) for p in state.points if p.loss is not None and math.isfinite(p.loss)]
    if len(losses) < 40 or losses[-1][0] - losses[0][0] < FLAT_STEPS:
        return
    size = max(20, len(losses) // 10)
    first = [loss for _, loss in losses[:size]]
    newest = [loss for _, loss in losses[-size:]]
    start, now = median(first), median(newest)
    spread = 1.4826 * median(abs(loss - start) for loss in first)
    if now < start - max(0.005 * abs(start), 2 * spread / math.sqrt(size)):
        return
    text = f"loss is not falling: {now:.4g} over the newest {size} points, {start:.4g} over the first {size}"
    yield Alert("loss-not-falling", "warning", text)
