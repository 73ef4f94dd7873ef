"""The Launch pane: what will happen, what speaks against it, start, stop, and the log."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, VerticalScroll
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Static

from ftdash.engine.check.findings import Severity
from ftdash.engine.configs import TrainArgs
from ftdash.engine.hardware import HardwareError
from ftdash.engine.launch.demo import demo_spec
from ftdash.engine.launch.spec import Device
from ftdash.engine.model.load import ModelError, resolve
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import evaluate
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import launching, theme
from ftdash.tui.launching import Checked, Launched, Stopped, Wanted
from ftdash.tui.messages import Changed, RunChosen
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.config import config_text
from ftdash.tui.widgets.check_list import CheckList
from ftdash.tui.widgets.choice import Choice
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.log_view import LogView
from ftdash.tui.widgets.slider import Slider, geometric
from ftdash.tui.widgets.stacked_bar import VERDICT_LOOK
from ftdash.tui.widgets.text_field import TextField

CHECK_AFTER_S = 0.4
NEW_LOGS_AFTER_S = 5.0
LIVE = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)


class NextAction(LineWidget, can_focus=True):
    """The one obvious thing to do now: start what is described, or stop what runs."""

    HELP = "Enter does what the line says."
    HINTS = "enter do it"
    BINDINGS: ClassVar = [
        Binding("enter,space", "act", "Act", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("down", "app.focus_next", "Next", show=False),
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

    def action_act(self) -> None:
        self.run_action_of_pane()

    def run_action_of_pane(self) -> None:
        pane = next(node for node in self.ancestors if isinstance(node, LaunchPane))
        pane.action_start()

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()

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
        return [first, ((" on this CPU: sizes and speed of the plan are for GPUs", theme.DIM),)]
    try:
        prediction = evaluate(plan)
    except (PlanError, ModelError, HardwareError) as error:
        return [first, ((f" {theme.GLYPHS.no} {fmt.clean(str(error))}", theme.BAD),)]
    symbol, word, style = VERDICT_LOOK[prediction.verdict]
    sizes = f"{fmt.gb(prediction.memory.device)} of {fmt.gb(prediction.memory.capacity)} GB on {plan.gpu}"
    speed = f"  {fmt.rate(prediction.time.tokens_per_s_per_gpu)} tokens/s per GPU ~"
    return [first, ((f" {symbol} {word} ", style), (sizes + speed, theme.DIM))]


class LaunchPane(Pane):
    TITLE = "Launch"
    HELP = (
        "s starts the run, k stops the one that is watched (it asks for the word stop first),\n"
        "c shows command and files, o takes a launcher command of your own instead of the plan.\n"
        "The log follows the watched run; R chooses another one. Runs outlive this screen."
    )
    HINTS = "s start  k stop  c config  o own command  R runs"

    BINDINGS: ClassVar = [
        Binding("s", "start", "Start", show=False),
        Binding("k", "stop", "Stop", show=False),
        Binding("c", "config", "Config", show=False),
        Binding("o", "own", "Own command", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="launch")
        demo = demo_spec()
        assert demo.plan is not None
        self.wanted = Wanted(demo.plan, steps=demo.steps or 0, device=demo.device.value, name=demo.name)
        self.run_state: RunState | None = None
        self._starting = False
        self._check_timer: Timer | None = None
        self._logs_of, self._look_again = "", 0.0

    def compose(self) -> ComposeResult:
        with Container(id="launch-left"):
            with Container(id="launch-what", classes="framed") as what:
                what.border_title = "What will happen"
                yield PlanSummary()
                yield NextAction()
                yield TextField("data", "Data", empty="the small chat set that ships")
                yield Slider(
                    "steps", "Steps", geometric(10, 100_000, 8), self.wanted.steps, fmt=fmt.number, log=True
                )
                yield TextField("out", "Output", empty="below the run directory")
                devices = [(kind.value, kind.value) for kind in Device]
                yield Choice("device", "Device", devices, self.wanted.device)
                yield TextField("name", "Name", self.wanted.name, empty="from the model")
            yield CheckList(id="checks")
        with Container(id="launch-right"):
            with VerticalScroll(id="preview", classes="framed", can_focus=True) as preview:
                preview.border_title = "Command and config"
                yield Static(id="preview-text")
            yield LogView(id="log")

    def on_mount(self) -> None:
        self._changed()

    def first_focus(self) -> Widget:
        return self.query_one(NextAction)

    def needle_target(self) -> Widget:
        return self.query_one(LogView)

    def take_plan(self, plan: Plan) -> None:
        """The Plan pane hands over; what was typed here stays."""
        self.wanted = replace(self.wanted, plan=plan, command="", device="auto", name="")
        self.query_one("#in-device", Choice).set_value("auto", tell=False)
        self.query_one("#in-name", TextField).set_value("", tell=False)
        self._changed()

    @on(Changed)
    def _input_moved(self, event: Changed) -> None:
        event.stop()
        value: Any = int(event.value) if event.name == "steps" else str(event.value)
        self.wanted = replace(self.wanted, **{event.name: value})
        self._changed()

    def _changed(self) -> None:
        self.query_one(PlanSummary).show(self.wanted)
        self._show_action()
        if self._check_timer is not None:
            self._check_timer.stop()
        self._check_timer = self.set_timer(CHECK_AFTER_S, self._check)

    def _check(self) -> None:
        launching.check(self.wanted, self.post_message)
        self.query_one("#preview-text", Static).update(self._preview())

    def _preview(self) -> Text:
        if self.wanted.command:
            return Text(fmt.clean(self.wanted.command), theme.BOLD)
        arguments = TrainArgs(
            model=self.wanted.plan.model or "MODEL",
            output_dir=self.wanted.out or "RUN/out",
            data=self.wanted.data or None,
            steps=self.wanted.steps,
            device=self.wanted.device,
        )
        try:
            return config_text(self.wanted.plan, resolve(self.wanted.plan), arguments)
        except (ModelError, PlanError) as error:
            return Text(f"{theme.GLYPHS.no} {fmt.clean(str(error))}", theme.BAD)

    @on(Checked)
    def _checked(self, event: Checked) -> None:
        self.query_one(CheckList).show(event.findings, event.trouble)
        errors = [finding for finding in event.findings if finding.severity is Severity.ERROR]
        self._show_action(trouble=event.trouble or (errors[0].text if errors else ""))

    def _show_action(self, trouble: str = "") -> None:
        action = self.query_one(NextAction)
        if self._starting:
            action.show("starting…", loud=True)
        elif trouble:
            action.show(f"look at the checks first: {fmt.clean(trouble)}", loud=True)
        else:
            ranks = "this command" if self.wanted.command else fmt.plural(self.wanted.plan.gpus, "rank")
            action.show(f"start {ranks}, {self.wanted.steps:,} steps")

    # Acting

    def action_start(self) -> None:
        if self._starting:
            return
        self._starting = True
        self._show_action()
        launching.start(self.wanted, self.cockpit.runs_root, self.post_message)

    @on(Launched)
    def _launched(self, event: Launched) -> None:
        self._starting = False
        self._show_action()
        if event.run is None:
            self.cockpit.notice(event.trouble, severity="error")
            self.query_one(NextAction).show(f"refused: {event.trouble}", loud=True)
            return
        self.cockpit.notice(f"started {event.run.run_id}: 3 shows its ranks")
        self.app.post_message(RunChosen(event.run))

    def action_stop(self) -> None:
        feed = self.cockpit.feed
        if feed is None or self.run_state is None or self.run_state.state not in LIVE:
            self.cockpit.notice("no live run is watched; R chooses one")
            return
        run = feed.run

        def confirmed(text: str) -> None:
            if text.strip() in ("stop", "save"):
                self.cockpit.notice(f"stopping {run.run_id}…")
                launching.stop(run, self.post_message, save=text.strip() == "save")
            else:
                self.cockpit.notice("not stopped")

        self.cockpit.ask(f"stop {run.run_id}: type stop, or save to save first", "", confirmed)

    @on(Stopped)
    def _stopped(self, event: Stopped) -> None:
        if event.trouble:
            self.cockpit.notice(event.trouble, severity="error")
        else:
            self.cockpit.notice(f"{event.run.run_id} is stopped, no process is left")

    def action_config(self) -> None:
        from ftdash.tui.panes.config import ConfigScreen

        try:
            self.app.push_screen(ConfigScreen(self.wanted.plan, resolve(self.wanted.plan)))
        except (ModelError, PlanError) as error:
            self.cockpit.notice(str(error), severity="warning")

    def action_own(self) -> None:
        def typed(text: str) -> None:
            self.wanted = replace(self.wanted, command=text.strip())
            self._changed()

        self.cockpit.ask("own launcher command (empty: the plan's)", self.wanted.command, typed)

    # The watched run

    def show_run(self, state: RunState | None, trouble: str) -> None:
        self.run_state = state
        feed = self.cockpit.feed
        if state is None or feed is None:
            return
        log = self.query_one(LogView)
        log.border_subtitle = f"{state.run} {state.state.value}"
        now = time.monotonic()
        if state.run != self._logs_of or now > self._look_again:
            self._logs_of, self._look_again = state.run, now + NEW_LOGS_AFTER_S
            log.open(log_files(feed.run), state.manifest.world_size)


def log_files(run: RunDir, limit: int = 64) -> list[Path]:
    """The launcher's log first, then what ranks wrote, without empty files. At most `limit`."""
    try:
        found = [path for path in sorted(run.logs.glob("*.log")) if path.is_file()]
    except OSError:
        return []
    launcher = [path for path in found if path.name == "launcher.log"]
    written = [path for path in found if path not in launcher and _has_text(path)]
    return [*launcher, *written][:limit]


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
