"""Prediction against measurement, term by term: what a GPU holds, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftdash.monitor.state import RunState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.overview import mfu_seconds, on_gpu

MISSED = 0.1  # a difference from the plan beyond this share is marked, as in the overview


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity as planned and as measured, in bytes, seconds, tokens/s or as a share."""

    name: str
    planned: float
    measured: float
    show: Callable[[float | None], str]
    less_is_worse: bool = False

    @property
    def missed(self) -> bool:
        off = self.measured / self.planned - 1
        return -off > MISSED if self.less_is_worse else off > MISSED


def terms(state: RunState) -> list[Term]:
    """The terms that were both planned and measured. Bytes are of the largest rank.

    Between steps the gradients of most backends are gone: weights, optimizer and buffers are compared with
    what torch holds then, the rest of the planned peak with what a step adds to it.
    """
    if not on_gpu(state):
        return []
    stored = state.manifest.predicted or {}
    memory, time = _section(stored, "memory"), _section(stored, "time")
    states, got = _section(memory, "model_states"), state.measured
    held, peak, reserved, device = (
        got.get(name, 0.0) for name in ("between_steps", "allocated", "reserved", "device")
    )
    planned_held = _sum(states, "weights", "optimizer") + _sum(memory, "buffers")
    planned_peak, planned_reserved = _sum(memory, "allocated"), _sum(memory, "reserved")
    useful_s, step_s = mfu_seconds(state), got.get("step_s", 0.0)
    rows = [
        Term("states", planned_held, held, fmt.gb),
        Term("a step adds", planned_peak - planned_held, peak - held if held else 0.0, fmt.gb),
        Term("allocated", planned_peak, peak, fmt.gb),
        Term("reserved", planned_reserved, reserved, fmt.gb),
        Term(
            "context",
            _sum(memory, "device") - planned_reserved,
            device - reserved if reserved else 0.0,
            fmt.gb,
        ),
        Term("device", _sum(memory, "device"), device, fmt.gb),
        Term("step", _sum(time, "step_s"), step_s, fmt.seconds),
        Term("MFU", _sum(time, "mfu"), useful_s / step_s if useful_s and step_s else 0.0, fmt.percent, True),
    ]
    return [row for row in rows if row.planned > 0 and row.measured > 0]


def _section(stored: dict[str, Any], name: str) -> dict[str, Any]:
    found = stored.get(name)
    return found if isinstance(found, dict) else {}


def _sum(section: dict[str, Any], *names: str) -> float:
    values = [section.get(name) for name in names]
    return float(sum(value for value in values if isinstance(value, int | float) and value > 0))


class PlanTerms(LineWidget):
    """Planned, measured, and the difference."""

    HELP = (
        "What the plan said, what is measured, and by how much they differ; memory in GB, of the largest "
        "rank. states: weights, optimizer and buffers, between two steps; a step adds gradients, "
        "activations and gathered weights; reserved is what torch's allocator took, device what the driver "
        "counts."
    )

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.rows: list[Term] = []
        self.border_title = "Plan and measured, GB"

    def show(self, rows: list[Term]) -> None:
        self.rows = rows
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        room = max(7, (width - 12) // 3)
        lines: list[Line] = []
        for row in self.rows:
            style = theme.WARN if row.missed else theme.DIM
            mark = f" {theme.GLYPHS.tight}" if row.missed else "  "
            off = fmt.signed_percent(row.measured / row.planned - 1) + mark
            lines.append(
                (
                    (fmt.fit(row.name, 12), theme.DIM),
                    (fmt.fit(f"~{row.show(row.planned)}", room, right=True), theme.DIM),
                    (fmt.fit(f"={row.show(row.measured)}", room, right=True), theme.TEXT),
                    (fmt.fit(off, room, right=True), style),
                )
            )
        return lines
