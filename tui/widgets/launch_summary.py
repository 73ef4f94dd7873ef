"""What will happen: the plan in two lines, and the one obvious thing to do now."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding
from textual.message import Message

from ftdash.engine.hardware import HardwareError
from ftdash.engine.model.load import ModelError
from ftdash.engine.plan import PlanError
from ftdash.engine.planner import evaluate
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.launching import Wanted
from ftdash.tui.widgets.control import Control
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.stacked_bar import VERDICT_LOOK


class NextAction(Control):
    """The one obvious thing to do now: start what is described, or stop what runs."""

    HELP = "enter  does what the line says"
    HINTS = "enter do it"
    BINDINGS: ClassVar = [
        Binding("enter,space", "act", "Act", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="next-action", classes="control")
        self.sentence, self.style = "", theme.OK

    def show(self, sentence: str, *, loud: bool = False) -> None:
        self.sentence = sentence
        self.style = theme.WARN if loud else theme.OK
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        focus = self.has_focus
        mark = theme.GLYPHS.pointer if focus else theme.GLYPHS.closed
        return [((fmt.fit(f"{mark} {self.sentence}", width), theme.BOLD + self.style),)]

    class Act(Message):
        """Enter was pressed on the line."""

    def action_act(self) -> None:
        self.post_message(self.Act())

    def on_click(self) -> None:
        self.action_act()


class PlanSummary(LineWidget):
    """The plan in two lines."""

    def __init__(self) -> None:
        super().__init__(id="plan-summary")
        self.lines: list[Line] = []

    def show(self, wanted: Wanted) -> None:
        self.lines = summary(wanted)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return self.lines


def summary(wanted: Wanted) -> list[Line]:
    """Model, strategy and ranks; then whether it fits, or the own command."""
    if wanted.command:
        return [((" own command ", theme.DIM), (fmt.clean(wanted.command), theme.BOLD))]
    plan, times = wanted.plan, theme.GLYPHS.times
    name = plan.model or plan.config or f"{fmt.count(plan.params)} parameters"
    first: Line = (
        (f" {fmt.clean(name)}", theme.BOLD),
        (f"  {plan.strategy} {times} {plan.gpus}  {plan.method}  ", theme.TEXT),
        (f"{plan.micro_batch} {times} {plan.grad_accum} {times} {plan.seq_len:,} tokens a rank", theme.DIM),
    )
    if wanted.device == "cpu":
        return [first, ((" on this CPU; the plan's figures are for GPUs", theme.DIM),)]
    try:
        prediction = evaluate(plan)
    except (PlanError, ModelError, HardwareError) as error:
        return [first, ((f" {theme.GLYPHS.no} {fmt.clean(str(error))}", theme.BAD),)]
    symbol, word, style = VERDICT_LOOK[prediction.verdict]
    sizes = f"{fmt.gb(prediction.memory.device)} of {fmt.gb(prediction.memory.capacity)} GB on {plan.gpu}"
    speed = f"  {fmt.rate(prediction.time.tokens_per_s_per_gpu)} tokens/s per GPU ~"
    return [first, ((f" {symbol} {word} ", style), (sizes + speed, theme.DIM))]
