"""What else? Every stage × checkpointing of the same run, each with verdict and GB."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from rich.style import Style

from ftdash.engine.plan import Checkpointing, Plan, PlanError, Strategy
from ftdash.engine.planner.result import Prediction, Verdict
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part
from ftdash.tui.widgets.stacked_bar import VERDICT_LOOK

STRIP_STAGES = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP, Strategy.HSDP)
Cell = tuple[Verdict, int] | None  # None: this combination cannot be


def table(plan: Plan, evaluate: Callable[[Plan], Prediction]) -> dict[tuple[Checkpointing, Strategy], Cell]:
    """Verdict and device bytes of each neighbour of the plan."""
    cells: dict[tuple[Checkpointing, Strategy], Cell] = {}
    for checkpointing in Checkpointing:
        for strategy in STRIP_STAGES:
            neighbour = replace(plan, strategy=strategy, checkpointing=checkpointing)
            if strategy is not Strategy.HSDP and plan.strategy is Strategy.HSDP:
                neighbour = replace(neighbour, replicate=None)
            try:
                prediction = evaluate(neighbour)
                cells[checkpointing, strategy] = (prediction.verdict, prediction.memory.device)
            except PlanError:
                cells[checkpointing, strategy] = None
    return cells


class StageStrip(LineWidget):
    """The plan's own cell stands in brackets."""

    HELP = "Every stage × checkpointing for the same model, GPUs and sequence, in GB per GPU."

    def __init__(self) -> None:
        super().__init__(id="strip", classes="framed")
        self.border_title = "What else?  every stage × checkpointing, GB per GPU"
        self.cells: dict[tuple[Checkpointing, Strategy], Cell] = {}
        self.plan: Plan | None = None

    def show(self, plan: Plan, evaluate: Callable[[Plan], Prediction]) -> None:
        self.plan = plan
        self.cells = table(plan, evaluate)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.plan is None:
            return []
        label = 11 if width >= 60 else 7
        room = max(7, (width - label) // len(STRIP_STAGES))
        head: list[Part] = [(fmt.fit("", label), theme.DIM)]
        head += [(fmt.fit(" " + stage.value, room), theme.DIM) for stage in STRIP_STAGES]
        lines: list[Line] = [tuple(head)]
        for checkpointing in Checkpointing:
            parts: list[Part] = [(fmt.fit(checkpointing.value[: label - 1], label), theme.DIM)]
            for stage in STRIP_STAGES:
                text, style = self._cell(self.cells.get((checkpointing, stage)))
                here = stage is self.plan.strategy and checkpointing is self.plan.checkpointing
                text = f"[{text}]" if here else f" {text} "
                parts.append((fmt.fit(text, room), style + Style(bold=here)))
            lines.append(tuple(parts))
        return lines

    @staticmethod
    def _cell(cell: Cell) -> tuple[str, Style]:
        if cell is None:
            return "n/a", theme.DIM
        verdict, device = cell
        symbol, _, style = VERDICT_LOOK[verdict]
        return f"{symbol} {fmt.gb(device, 0)}", style
