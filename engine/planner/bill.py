"""What training on a number of tokens takes: hours, GPU-hours, and at a price per GPU-hour what it costs."""

from __future__ import annotations

from typing import Any

import msgspec

from ftdash.engine.planner.result import StepTime


class Cost(msgspec.Struct, frozen=True):
    """`price` is of one GPU-hour, `total` of the run, both in the currency that the price was given in."""

    tokens: float
    hours: float
    gpu_hours: float
    price: float | None
    total: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "hours": self.hours,
            "gpu_hours": self.gpu_hours,
            "price_per_gpu_hour": self.price,
            "total": self.total,
        }


class Bill(msgspec.Struct, frozen=True):
    """A number of tokens to train on, and the price of one GPU-hour where one is known."""

    tokens: float = 1e9
    price: float | None = None

    def of(self, time: StepTime) -> Cost:
        """What it comes to at the planned speed, without what stops, restarts and checkpoints take."""
        gpu_hours = time.gpu_hours(self.tokens)
        hours = self.tokens / (time.tokens_per_step * time.useful_share) * time.step_s / 3600
        return Cost(
            self.tokens, hours, gpu_hours, self.price, None if self.price is None else self.price * gpu_hours
        )
