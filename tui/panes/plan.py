"""The Plan pane: inputs at the left, and what they cost at the right, while they move."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec.structs import replace
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widget import Widget

from ftdash.engine.hardware import Gpu, HardwareError, gpu, gpu_names
from ftdash.engine.model.load import ModelError, preset_names, resolve
from ftdash.engine.plan import Method, Plan, PlanError, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.result import Advice, Prediction
from ftdash.monitor.rundir import decode_json
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.messages import Changed, PlanHandedOver
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.plan_inputs import PRICE, Control, changed, first_controls, more_controls, shown
from ftdash.tui.widgets.advice import AdviceList
from ftdash.tui.widgets.choice import Choice, Picker
from ftdash.tui.widgets.grid import Grid
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.slider import Slider
from ftdash.tui.widgets.speed_panel import SpeedPanel
from ftdash.tui.widgets.stacked_bar import VERDICT_LOOK, StackedBar
from ftdash.tui.widgets.strip import StageStrip

if TYPE_CHECKING:
    from ftdash.engine.calibrate import Calibration

START = Plan(
    model="qwen3-30b-a3b",
    gpus=8,
    strategy=Strategy.FSDP,
    method=Method.LORA,
    seq_len=4096,
)
NEIGHBOURS_AFTER_S = 0.12  # the strip and the advice follow when a slider rests this long
MORE_AFTER_S = 0.5
ROOM_FOR_MORE = 34  # lines
LARGEST_PLAN = 1_000_000  # bytes of a saved plan


class BatchLine(LineWidget):
    """Effective batch and tokens per step, what is pinned, and the offer to hold the tokens."""

    def __init__(self) -> None:
        super().__init__(id="batch")
        self.lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        self.lines = lines
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return self.lines


class PlanPane(Pane):
    TITLE = "Plan"
    HELP = (
        "Everything at the right is computed anew while an input moves; ~ marks an assumption.\n"
        "enter  hands the plan to Launch\n"
        "c  shows the files that it becomes\n"
        "m  opens the other inputs\n"
        "x  gives the answers the whole pane\n"
        "f  finds the fastest fit\n"
        "s  simulates a step of the real model class, without a GPU\n"
        "h  holds the tokens of a step while the GPUs move\n"
        "p  pins this plan; v shows both side by side, P goes back to it\n"
        "ctrl+s  saves the plan to a file, ctrl+o loads one"
    )
    HINTS = (
        "enter to Launch  c config  m more  x answers  f find a fit  s simulate  p pin  v compare  "
        "^s save  ^o load"
    )

    BINDINGS: ClassVar = [
        Binding("enter", "hand_over", "Hand over to Launch", show=False),
        Binding("c", "config", "Config", show=False),
        Binding("m", "more", "More inputs", show=False),
        Binding("x", "enlarge", "Only the answers", show=False),
        Binding("f", "find", "Find a fit", show=False),
        Binding("s", "simulate", "Simulate", show=False),
        Binding("h", "hold", "Hold tokens", show=False),
        Binding("p", "pin", "Pin", show=False),
        Binding("v", "compare", "Compare with the pinned plan", show=False),
        Binding("P", "unpin", "Back to the pinned plan", show=False),
        Binding("ctrl+s", "save", "Save", show=False),
        Binding("ctrl+o", "load", "Load", show=False),
    ]

    def __init__(self, plan: Plan = START) -> None:
        super().__init__(id="plan")
        self.plan = plan
        self.prediction: Prediction | None = None
        self.trouble = ""
        self.pinned: Prediction | None = None
        self.file = ""
        self.price = 0.0  # of one GPU-hour; 0: not known
        self._held: int | None = None  # tokens of a step before the GPUs moved
        self._neighbours: Timer | None = None
        self._calibration: Calibration | None = None  # read when the first answers stand

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="inputs", classes="framed", can_focus=False) as inputs:
            inputs.border_title = "Run"
            with Container(id="controls"):
                yield from first_controls(self.plan, preset_names(), gpu_names())
            yield BatchLine()
        with Container(id="answers"):
            yield StackedBar()
            yield SpeedPanel()
            yield StageStrip()
            yield AdviceList(id="advice", classes="framed")

    def on_mount(self) -> None:
        self.evaluate()

    async def _more_where_room(self) -> None:
        """A tall screen shows all inputs, once the first ones are there."""
        if self.query_one("#inputs").size.height >= ROOM_FOR_MORE and not self.query("#more"):
            await self._make_more()

    def first_focus(self) -> Widget:
        return self.query_one("#in-model")

    # Evaluation

    def evaluate(self) -> None:
        """Compute the plan and draw the answers; what needs more plans follows a moment later."""
        try:
            self.prediction, self.trouble = evaluate(self.plan), ""
        except (PlanError, ModelError, HardwareError) as error:
            self.prediction, self.trouble = None, str(error)
        self.query_one(StackedBar).show(self.prediction, self.trouble)
        self.query_one(SpeedPanel).show(self.prediction, self._gpu(), self.price)
        self._show_inputs()
        self._show_neighbours_soon()

    def _show_neighbours_soon(self) -> None:
        if self._neighbours is not None:
            self._neighbours.stop()
        self._neighbours = self.set_timer(NEIGHBOURS_AFTER_S, self._show_neighbours)

    def _gpu(self) -> Gpu | None:
        try:
            return gpu(self.plan.gpu)
        except HardwareError:
            return None

    def _show_inputs(self) -> None:
        if self.prediction is not None:
            model = self.prediction.model
            words = f"{fmt.count(model.total_params)}"
            if model.active_params != model.total_params:
                words += f", {fmt.count(model.active_params)} active"
            if model.trainable_params != model.total_params:
                words += f", {fmt.count(model.trainable_params)} trained"
            self.query_one("#inputs").border_title = f"Run  {words}"
            if self.plan.params is None:
                self.query_one("#in-params", Slider).set_value(float(model.total_params), tell=False)
        self.query_one(BatchLine).show(self._batch_lines())

    def _batch_lines(self) -> list[Line]:
        plan, times = self.plan, theme.GLYPHS.times
        spread = max(1, plan.gpus // max(1, plan.tp * plan.cp * plan.pp))
        batch = spread * plan.micro_batch * plan.grad_accum
        tokens = batch * plan.seq_len
        accumulated = f" {times} {plan.grad_accum}" if plan.grad_accum > 1 else ""
        sizes = f"batch {spread} {times} {plan.micro_batch}{accumulated} {times} {plan.seq_len:,}"
        lines: list[Line] = [((f" {sizes} = ", theme.DIM), (f"{tokens:,} tokens a step", theme.BOLD))]
        if self._held and self._held != tokens and (accum := self._holding()) is not None:
            words = f" h holds {self._held:,}: accumulate {accum}"
            lines.append(((words, theme.ACCENT),))
        if self.pinned is not None:
            lines.append(self._against_pinned(self.pinned))
        return lines

    def _against_pinned(self, pinned: Prediction) -> Line:
        symbol, _, style = VERDICT_LOOK[pinned.verdict]
        speed_then = fmt.rate(pinned.time.tokens_per_s_per_gpu)
        words = f" v: pinned {symbol} {fmt.gb(pinned.memory.device)} GB {speed_then} tok/s"
        if self.prediction is None:
            return ((words, style),)
        delta = (self.prediction.memory.device - pinned.memory.device) / 1e9
        speed = self.prediction.time.tokens_per_s_per_gpu / pinned.time.tokens_per_s_per_gpu - 1
        return ((words, style), (f"  now {delta:+.1f} GB {fmt.signed_percent(speed)}", theme.TEXT))

    def _holding(self) -> int | None:
        """Accumulation steps that keep the held tokens; None where no whole number does."""
        plan = self.plan
        spread = max(1, plan.gpus // max(1, plan.tp * plan.cp * plan.pp))
        once = spread * plan.micro_batch * plan.seq_len
        return self._held // once if self._held and self._held >= once and self._held % once == 0 else None

    def _show_measured(self) -> None:
        """What runs of this kind measured; nothing before `ftdash calibrate` learned any."""
        from ftdash.engine.calibrate import correct, learned

        if self._calibration is None:
            self._calibration = learned()
        found = correct(self.prediction, self._calibration) if self.prediction is not None else None
        words = ""
        if found is not None:
            speed = fmt.rate(found.tokens_per_s_per_gpu)
            words = f"as measured {found.because}: {fmt.gb(found.device)} GB, {speed} tokens/s a GPU"
        self.query_one("#advice").border_subtitle = Content(words)

    def _show_neighbours(self) -> None:
        strip = self.query_one(StageStrip)
        if strip.display and strip.size.height:
            try:
                strip.show(self.plan, evaluate)
            except (ModelError, HardwareError):
                strip.cells = {}
        self.query_one(AdviceList).show(self.prediction.advice if self.prediction is not None else ())
        self._show_measured()

    def set_plan(self, plan: Plan) -> None:
        """Take over a whole plan: every control follows."""
        self.plan = plan
        for control in self.query(".control"):
            value = shown(plan, control.name or "")
            if value is not None and isinstance(control, Slider | Choice | Picker):
                control.set_value(value, tell=False)  # type: ignore[arg-type]
        self.evaluate()

    def fitted(self) -> None:
        if self.size.width:
            self._show_neighbours_soon()
            self.set_timer(MORE_AFTER_S, self._more_where_room)

    @on(Changed)
    def _input_moved(self, event: Changed) -> None:
        event.stop()
        if event.name == PRICE:
            self.price = float(event.value)
            self.query_one(SpeedPanel).show(self.prediction, self._gpu(), self.price)
            return
        before = self.plan
        try:
            self.plan = changed(self.plan, event.name, event.value)
        except ValueError as error:
            self.cockpit.notice(str(error), severity="warning")
            return
        if event.name == "gpus":
            if self._held is None:
                self._held = self._tokens(before)
        elif event.name in ("micro_batch", "grad_accum", "seq_len"):
            self._held = None
        if event.name in ("model", "params"):
            self.query_one("#in-model", Picker).set_value(str(shown(self.plan, "model")), tell=False)
        self.evaluate()

    @staticmethod
    def _tokens(plan: Plan) -> int:
        spread = max(1, plan.gpus // max(1, plan.tp * plan.cp * plan.pp))
        return spread * plan.micro_batch * plan.grad_accum * plan.seq_len

    # Keys

    def action_hand_over(self) -> None:
        if self.prediction is None:
            self.cockpit.notice(self.trouble or "nothing planned yet", severity="warning")
            return
        self.post_message(PlanHandedOver(self.plan))

    @on(Grid.Selected, "#advice")
    def _apply(self, event: Grid.Selected) -> None:
        event.stop()
        advice: Advice = event.item[0]
        if advice.plan is None:
            self.cockpit.notice("this advice is for you to act on: no input stands for it")
            return
        self.set_plan(advice.plan)
        self.cockpit.notice(f"applied: {advice.text}")

    async def action_more(self) -> None:
        """Open or close the other inputs; they are made when they are first wanted."""
        extra = self.query("#more")
        if not extra:
            controls = await self._make_more()
            controls[0].focus()
        else:
            extra.first().display = not extra.first().display

    async def _make_more(self) -> list[Control]:
        controls: list[Control] = more_controls(self.plan)
        await self.query_one("#inputs").mount(Container(*controls, id="more"), after="#controls")
        return controls

    def action_enlarge(self) -> None:
        """Give the answers the whole pane, or the inputs their place back."""
        self.toggle_class("-only-answers")
        target = self.query_one(AdviceList) if self.has_class("-only-answers") else self.first_focus()
        target.focus()
        self._show_neighbours_soon()

    def action_config(self) -> None:
        from ftdash.tui.panes.config import ConfigScreen, plan_text

        try:
            shape = resolve(self.plan)
        except (ModelError, PlanError) as error:
            self.cockpit.notice(str(error), severity="warning")
            return
        self.app.push_screen(ConfigScreen(plan_text(self.plan, shape)))

    def action_find(self) -> None:
        from ftdash.tui.panes.fit import FitScreen

        def chosen(plan: Plan | None) -> None:
            if plan is not None:
                self.set_plan(plan)

        self.app.push_screen(FitScreen(self.plan), chosen)

    def action_simulate(self) -> None:
        from ftdash.tui.panes.simulation import SimulationScreen

        if self.prediction is None:
            self.cockpit.notice(self.trouble, severity="warning")
            return
        self.app.push_screen(SimulationScreen(self.prediction))

    def action_hold(self) -> None:
        accum = self._holding()
        if accum is None:
            self.cockpit.notice("no whole number of accumulation steps keeps the tokens of a step")
            return
        self.set_plan(replace(self.plan, grad_accum=accum))

    def action_pin(self) -> None:
        self.pinned = self.prediction
        self._show_inputs()

    def action_compare(self) -> None:
        from ftdash.tui.panes.plan_compare import CompareScreen

        if self.pinned is None or self.prediction is None:
            words = "pin a plan with p first, then change it" if self.pinned is None else self.trouble
            self.cockpit.notice(words, severity="warning")
            return
        self.app.push_screen(CompareScreen(self.pinned, self.prediction))

    def action_unpin(self) -> None:
        if self.pinned is not None:
            self.set_plan(self.pinned.plan)

    def action_save(self) -> None:
        name = self.file or f"{fmt.clean(self.plan.model or 'run').replace('/', '-')}.plan"
        self.cockpit.ask("save plan as", name, self._save)

    def _save(self, name: str) -> None:
        if not name.strip():
            return
        path = Path(name.strip()).expanduser()
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.plan.to_dict()), indent=2) + b"\n")
        except OSError as error:
            self.cockpit.notice(f"cannot save {path}: {error.strerror or error}", severity="error")
            return
        self.file = str(path)
        self.cockpit.notice(f"saved {path}")

    def action_load(self) -> None:
        self.cockpit.ask("load plan", self.file or "", self._load)

    def _load(self, name: str) -> None:
        if not name.strip():
            return
        path = Path(name.strip()).expanduser()
        try:
            if path.stat().st_size > LARGEST_PLAN:
                raise OSError("too large for a plan")
            stored = decode_json(path.read_bytes(), dict)
            inner = stored.get("plan")
            plan = Plan.from_dict(inner if isinstance(inner, dict) else stored)
        except OSError as error:
            self.cockpit.notice(f"cannot read {path}: {error.strerror or error}", severity="error")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.cockpit.notice(f"{path} is no plan: {error}", severity="error")
        else:
            self.file = str(path)
            self.set_plan(plan)
