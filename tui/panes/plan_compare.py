"""Two plans side by side: the inputs that differ, and what each of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll

from ftdash.engine.plan import Plan
from ftdash.engine.planner.result import Prediction
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.stacked_bar import VERDICT_LOOK

NAME_WIDTH = 22
VALUE_WIDTH = 18
SMALL = 0.005  # a difference below half a percent is none to a reader


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison; `better` is None where neither side is."""

    name: str
    pinned: str
    now: str
    change: str = ""
    better: bool | None = None


def differing_inputs(pinned: Plan, now: Plan) -> list[Row]:
    """The inputs that the two plans do not share, by the names of their flags."""
    return [
        Row(f"--{name.replace('_', '-')}", _words(a), _words(b))
        for name in Plan.__struct_fields__
        if (a := getattr(pinned, name)) != (b := getattr(now, name))
    ]


def _words(value: object) -> str:
    if value is None or value == ():
        return "auto" if value is None else "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else fmt.clean(str(value))


def figures(pinned: Prediction, now: Prediction) -> list[Row]:
    """What each plan costs: memory first, then host, traffic and time."""
    rows = [
        Row("verdict", _verdict(pinned), _verdict(now)),
        _size("GB a GPU", pinned.memory.device, now.memory.device),
        _size("  reserved", pinned.memory.reserved, now.memory.reserved),
        _size("  allocated", pinned.memory.allocated, now.memory.allocated),
        _size("  model states", pinned.memory.model_states.total, now.memory.model_states.total),
    ]
    rows += [
        _size(f"  at {a.name.value}", a.total, b.total)
        for a, b in zip(pinned.memory.phases, now.memory.phases, strict=True)
    ]
    a, b = pinned.time, now.time
    return [
        *rows,
        _size("host RAM a node, GB", pinned.memory.host_ram_per_node, now.memory.host_ram_per_node),
        _size("sent a step, GB", pinned.traffic.step_bytes, now.traffic.step_bytes),
        Row("tokens a step", fmt.number(a.tokens_per_step), fmt.number(b.tokens_per_step)),
        _speed("tokens/s a GPU ~", a.tokens_per_s_per_gpu, b.tokens_per_s_per_gpu),
        Row("step", fmt.seconds(a.step_s), fmt.seconds(b.step_s)),
        Row("MFU", fmt.percent(a.mfu), fmt.percent(b.mfu)),
        Row("bound by", a.bound_by, b.bound_by),
        Row("GPU-hours a 1 B tokens", fmt.number(a.gpu_hours(1e9)), fmt.number(b.gpu_hours(1e9))),
    ]


def _verdict(prediction: Prediction) -> str:
    return f"{VERDICT_LOOK[prediction.verdict][0]} {prediction.verdict.value}"


def _size(name: str, pinned: float, now: float) -> Row:
    better = None if abs(now - pinned) <= SMALL * max(pinned, now) else now < pinned
    change = "" if better is None else f"{(now - pinned) / 1e9:+,.1f}"
    return Row(name, fmt.gb(pinned), fmt.gb(now), change, better)


def _speed(name: str, pinned: float, now: float) -> Row:
    better = None if abs(now - pinned) <= SMALL * max(pinned, now) else now > pinned
    change = "" if better is None or not pinned else fmt.signed_percent(now / pinned - 1)
    return Row(name, fmt.rate(pinned), fmt.rate(now), change, better)


class Comparison(LineWidget):
    """The rows as a table of three columns and the difference."""

    def __init__(self, pinned: Prediction, now: Prediction) -> None:
        super().__init__(id="comparison")
        self.rows = [
            Row("", "pinned", "now", "difference"),
            *(differing_inputs(pinned.plan, now.plan) or [Row("inputs", "the same", "the same")]),
            Row("", "", ""),
            *figures(pinned, now),
        ]
        self.styles.height = len(self.rows)

    def draw(self, width: int, height: int) -> list[Line]:
        value = max(10, min(VALUE_WIDTH, (width - NAME_WIDTH - 12) // 2))
        return [self._line(row, value) for row in self.rows]

    @staticmethod
    def _line(row: Row, value: int) -> Line:
        looks: dict[bool | None, Style] = {None: theme.TEXT, True: theme.OK, False: theme.WARN}
        return (
            (fmt.fit(row.name, NAME_WIDTH), theme.DIM),
            (fmt.fit(row.pinned, value, right=True), theme.TEXT),
            (fmt.fit(row.now, value, right=True), theme.BOLD),
            (f"  {row.change}", looks[row.better]),
        )


class CompareScreen(Overlay[None]):
    """The pinned plan beside the one that moves."""

    HELP = "The pinned plan beside the present one; green is less memory or more speed."
    BINDINGS: ClassVar = [Binding("escape,q,v", "close", "Back", show=False)]

    def __init__(self, pinned: Prediction, now: Prediction) -> None:
        super().__init__()
        self._both = (pinned, now)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="config-box") as box:
            box.border_title = "Pinned and present plan"
            box.border_subtitle = "esc back"
            yield Comparison(*self._both)

    def action_close(self) -> None:
        self.dismiss(None)
