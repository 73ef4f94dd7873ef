"""The Launch pane: what will happen, what speaks against it, start, stop, and the log."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

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
from ftdash.engine.launch.demo import demo_spec
from ftdash.engine.launch.spec import Backend, Device
from ftdash.engine.model.load import ModelError, resolve
from ftdash.engine.plan import Plan, PlanError
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import launching, theme
from ftdash.tui.launching import Checked, Differed, Launched, Stopped, Wanted
from ftdash.tui.messages import Changed, RunChosen
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.config import config_text
from ftdash.tui.panes.launch_inputs import backend_controls, diff_text, job_text, switches_text, with_value
from ftdash.tui.widgets.check_list import CheckList
from ftdash.tui.widgets.choice import Choice
from ftdash.tui.widgets.launch_summary import NextAction, PlanSummary
from ftdash.tui.widgets.log_view import LogView
from ftdash.tui.widgets.slider import Slider, geometric
from ftdash.tui.widgets.text_field import TextField

CHECK_AFTER_S = 0.4
NEW_LOGS_AFTER_S = 5.0
LIVE = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)


class LaunchPane(Pane):
    TITLE = "Launch"
    HELP = (
        "s starts the run, r rehearses it first: a small model, the same mesh, on this CPU.\n"
        "k stops the run that is watched (it asks for the word stop first), c shows command and files,\n"
        "v what differs from the last run of this name, w the debug switches, Q the queue of Slurm,\n"
        "o takes a launcher command of your own instead of the plan.\n"
        "The log follows the watched run; R chooses another one. Runs outlive this screen."
    )
    HINTS = "s start  r rehearse  k stop  c config  v diff  w switches  o own command  Q queue  R runs"

    BINDINGS: ClassVar = [
        Binding("s", "start", "Start", show=False),
        Binding("k", "stop", "Stop", show=False),
        Binding("c", "config", "Config", show=False),
        Binding("o", "own", "Own command", show=False),
        Binding("r", "rehearse", "Rehearse on this CPU", show=False),
        Binding("v", "differ", "Diff against the last run", show=False),
        Binding("w", "switches", "Debug switches", show=False),
        Binding("Q", "queue", "Queue of Slurm", show=False),
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
        self._diff_shown = False
        self._refused = ""  # why the last start was refused, until an input changes

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
                yield from backend_controls(self.wanted)
            yield CheckList(id="checks")
        with Container(id="launch-right"):
            with VerticalScroll(id="preview", classes="framed", can_focus=True) as preview:
                preview.border_title = "Command and config"
                yield Static(id="preview-text")
            yield LogView(id="log")

    def on_mount(self) -> None:
        self._show_backend()
        self._changed()

    def first_focus(self) -> Widget:
        return self.query_one(NextAction)

    def needle_target(self) -> Widget:
        return self.query_one(LogView)

    def take_plan(self, plan: Plan) -> None:
        """The Plan pane hands over; what was typed here stays."""
        self._refused = ""
        self.wanted = replace(self.wanted, plan=plan, command="", device="auto", name="")
        self.query_one("#in-device", Choice).set_value("auto", tell=False)
        self.query_one("#in-name", TextField).set_value("", tell=False)
        self._changed()

    @on(Changed)
    def _input_moved(self, event: Changed) -> None:
        event.stop()
        self._refused = ""
        self.wanted = with_value(self.wanted, event.name, event.value)
        if event.name == "backend":
            self._show_backend()
        self._changed()

    def _show_backend(self) -> None:
        for backend in Backend:
            self.set_class(self.wanted.backend == backend, f"-{backend}")

    def _changed(self) -> None:
        self.query_one(PlanSummary).show(self.wanted)
        self._show_action()
        if self._check_timer is not None:
            self._check_timer.stop()
        self._check_timer = self.set_timer(CHECK_AFTER_S, self._check)

    def _check(self) -> None:
        launching.check(self.wanted, self.post_message)
        self._show_preview()

    def _show_preview(self) -> None:
        preview = self.query_one("#preview")
        if self._diff_shown and not self.wanted.command:
            preview.border_title = "Diff against the last run of this name"
            launching.differ(self.wanted, self.cockpit.runs_root, self.post_message)
            return
        preview.border_title = "Command and config"
        self.query_one("#preview-text", Static).update(self._preview())

    def _preview(self) -> Text:
        text = self._plan_preview()
        if self.wanted.backend == Backend.SLURM:
            text = Text("\n").join([job_text(self.wanted), text])
        if self.wanted.switches:
            text = Text("\n").join([switches_text(self.wanted.switches), text])
        return text

    def _plan_preview(self) -> Text:
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
        elif self._refused:
            action.show(f"refused: {fmt.clean(self._refused)}", loud=True)
        elif trouble:
            action.show(f"look at the checks first: {fmt.clean(trouble)}", loud=True)
        else:
            ranks = "this command" if self.wanted.command else fmt.plural(self.wanted.plan.gpus, "rank")
            verb = {"slurm": "submit to Slurm:", "ssh": "start over ssh:"}.get(self.wanted.backend, "start")
            action.show(f"{verb} {ranks}, {self.wanted.steps:,} steps")

    # Acting

    @on(NextAction.Act)
    def _act(self) -> None:
        self.action_start()

    def action_rehearse(self) -> None:
        from ftdash.tui.panes.rehearsal import RehearsalScreen

        if self.wanted.command:
            self.cockpit.notice("only a plan can be rehearsed, not a command", severity="warning")
            return
        self.app.push_screen(RehearsalScreen(self.wanted.plan))

    def action_differ(self) -> None:
        self._diff_shown = not self._diff_shown
        self._show_preview()

    @on(Differed)
    def _differed(self, event: Differed) -> None:
        if self._diff_shown:
            self.query_one("#preview-text", Static).update(diff_text(event))

    def action_switches(self) -> None:
        from ftdash.tui.panes.switches import SwitchesScreen

        def chosen(names: tuple[str, ...] | None) -> None:
            if names is not None:
                self.wanted = replace(self.wanted, switches=names)
                self._changed()

        self.app.push_screen(SwitchesScreen(self.wanted.switches), chosen)

    def action_queue(self) -> None:
        from ftdash.tui.panes.queue import QueueScreen

        self.app.push_screen(QueueScreen())

    def action_start(self) -> None:
        if self._starting:
            return
        self._starting = True
        self._show_action()
        launching.start(self.wanted, self.cockpit.runs_root, self.post_message)

    @on(Launched)
    def _launched(self, event: Launched) -> None:
        self._starting, self._refused = False, event.trouble
        self._show_action()
        if event.run is None:
            self.cockpit.notice(event.trouble, severity="error")
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
            self._refused = ""
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
