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

from ftdash.engine.check.findings import Finding, Severity
from ftdash.engine.configs import TrainArgs
from ftdash.engine.launch.demo import demo_spec
from ftdash.engine.launch.spec import Backend, LaunchError
from ftdash.engine.model.load import ModelError, resolve
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.recipes import RecipeError
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import launching, theme
from ftdash.tui.launching import Checked, Differed, Launched, LogsFound, SiteSeen, Stopped, Wanted
from ftdash.tui.messages import Changed, RunChosen
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.config import config_text
from ftdash.tui.panes.launch_inputs import (
    NO_RECIPE,
    backend_controls,
    diff_text,
    job_text,
    run_controls,
    show_site,
    show_values,
    switches_text,
    with_value,
)
from ftdash.tui.widgets.check_list import CheckList
from ftdash.tui.widgets.grid import Grid
from ftdash.tui.widgets.launch_summary import NextAction, PlanSummary
from ftdash.tui.widgets.log_view import LogView

CHECK_AFTER_S = 0.4
DIFF = "Diff against the last run of this name"
NEW_LOGS_AFTER_S = 5.0
LIVE = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)


class LaunchPane(Pane):
    TITLE = "Launch"
    HELP = (
        "s  starts the run\n"
        "r  rehearses it first: a small model, the same mesh, on this CPU\n"
        "f  makes the first fix that the checks offer; enter on a finding makes that one\n"
        "k  stops the run that is watched; it asks for the word stop\n"
        "x  goes on with the watched run once it has ended: its plan, data and last whole checkpoint stand "
        "here again, and s starts it\n"
        "c  shows command and files, v what differs from the last run of this name\n"
        "w  chooses debug switches of NCCL and torch\n"
        "o  takes a launcher command of your own instead of the plan\n"
        "Q  shows the queue of Slurm"
    )
    HINTS = (
        "s start  r rehearse  f fix  k stop  x go on  c config  v diff  w switches  o own command  Q queue  "
        "R runs"
    )

    BINDINGS: ClassVar = [
        Binding("s", "start", "Start", show=False),
        Binding("k", "stop", "Stop", show=False),
        Binding("c", "config", "Config", show=False),
        Binding("f", "fix", "Make the first fix", show=False),
        Binding("x", "go_on", "Go on with the ended run", show=False),
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
        self._site_asked, self._site = False, SiteSeen(None)
        self._refused = ""  # why the last start was refused, until an input changes

    def compose(self) -> ComposeResult:
        with Container(id="launch-left"):
            with Container(id="launch-what", classes="framed") as what:
                what.border_title = "What will happen"
                yield PlanSummary()
                yield NextAction()
                yield from run_controls(self.wanted)
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
        self._take(launching.of_plan(self.wanted, plan))

    def _take(self, wanted: Wanted) -> None:
        """Other inputs than a person typed: every control shows its own."""
        self._refused = ""
        self.wanted = wanted
        show_values(self, wanted)
        self._show_backend()
        self._changed()

    @on(Changed)
    def _input_moved(self, event: Changed) -> None:
        event.stop()
        if event.name == "recipe":
            self._choose_recipe(str(event.value))
            return
        self._refused = ""
        self.wanted = with_value(self.wanted, event.name, event.value)
        if event.name == "backend":
            self._show_backend()
        self._changed()

    def _choose_recipe(self, name: str) -> None:
        if name == NO_RECIPE:
            self._take(replace(self.wanted, recipe=""))
            return
        try:
            self._take(launching.of_recipe(self.wanted, name))
        except RecipeError as error:
            self.cockpit.notice(str(error), severity="error")

    def _show_backend(self) -> None:
        for backend in Backend:
            self.set_class(self.wanted.backend == backend, f"-{backend}")
        if self.wanted.backend == Backend.SLURM and not self._site_asked:
            self._site_asked = True
            launching.look_at_site(self.post_message)

    @on(SiteSeen)
    def _site_seen(self, event: SiteSeen) -> None:
        self._site = event
        self._site_asked = event.site is not None  # choosing the backend again asks again
        show_site(self, event)
        self._show_preview()

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
            preview.border_title = DIFF
            launching.differ(self.wanted, self.cockpit.runs_root, self.post_message)
            return
        preview.border_title = "Command and config"
        self.query_one("#preview-text", Static).update(self._preview())

    def _preview(self) -> Text:
        text = self._plan_preview()
        if self.wanted.backend == Backend.SLURM:
            text = Text("\n").join([job_text(self.wanted, self._site), text])
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
            save_steps=self.wanted.save_steps,
            resume=self.wanted.resume or None,
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
        mend = next((finding.fix for finding in errors if finding.change), "")
        self._show_action(event.trouble or (errors[0].text if errors else ""), mend)

    def _show_action(self, trouble: str = "", mend: str = "") -> None:
        action = self.query_one(NextAction)
        if self._starting:
            action.show("starting…", loud=True)
        elif self._refused:
            action.show(f"refused: {fmt.clean(self._refused)}", loud=True)
        elif mend:
            action.show(f"cannot start yet: f sets {fmt.clean(mend)}", loud=True)
        elif trouble:
            action.show(f"look at the checks first: {fmt.clean(trouble)}", loud=True)
        else:
            ranks = "this command" if self.wanted.command else fmt.plural(self.wanted.plan.gpus, "rank")
            verb = {"slurm": "submit to Slurm:", "ssh": "start over ssh:"}.get(self.wanted.backend, "start")
            source = f" from {Path(self.wanted.resume).name}" if self.wanted.resume else ""
            action.show(f"{verb} {ranks}, {self.wanted.steps:,} steps{fmt.clean(source)}")

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

    def action_fix(self) -> None:
        found = self.query_one(CheckList).fixable()
        if found is None:
            self.cockpit.notice("no fix that could be made for you")
            return
        self._mend(found)

    @on(Grid.Selected, "#checks")
    def _fix_selected(self, event: Grid.Selected) -> None:
        event.stop()
        finding: Finding = event.item[0]
        if finding.change:
            self._mend(finding)
        else:
            self.cockpit.notice("this one is yours: nothing here can be changed for it")

    def _mend(self, finding: Finding) -> None:
        self._take(self.wanted.changed(finding.change))
        self.cockpit.notice(f"set: {finding.fix}")

    def action_go_on(self) -> None:
        """The watched run's inputs, with its last whole checkpoint; starting stays a second key."""
        feed = self.cockpit.feed
        if feed is None or self.run_state is None:
            self.cockpit.notice("no run is watched; R chooses one")
            return
        if self.run_state.state in LIVE:
            self.cockpit.notice(f"{feed.run.run_id} still runs; k stops it")
            return
        try:
            self._take(launching.of_ended(self.wanted, feed.run))
        except (LaunchError, RunError) as error:
            self.cockpit.notice(str(error), severity="warning")
            return
        if not self.wanted.resume:
            self.cockpit.notice("it left no whole checkpoint: it would start from the first step")
        self.query_one(NextAction).focus()

    def action_differ(self) -> None:
        self._diff_shown = not self._diff_shown or not self.query_one("#preview").display
        self._show_preview()

    @on(Differed)
    def _differed(self, event: Differed) -> None:
        if not self._diff_shown:
            return
        text = diff_text(event)
        self.query_one("#preview-text", Static).update(text)
        if not self.query_one("#preview").display:  # no room for it on this terminal
            from ftdash.tui.panes.config import ConfigScreen

            self._diff_shown = False
            self.app.push_screen(ConfigScreen(text, DIFF))

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

        self.app.push_screen(ConfigScreen(self._preview(), "Command and config"))

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
            self._find_logs(feed.run)

    def _find_logs(self, run: RunDir) -> None:
        """Away from the screen, which must not wait for a file system."""

        def find_logs() -> None:
            self.post_message(LogsFound(run, log_files(run)))

        launching.in_thread(find_logs)

    @on(LogsFound)
    def _logs_found(self, event: LogsFound) -> None:
        state = self.run_state
        if state is not None and self.cockpit.feed is not None and self.cockpit.feed.run is event.run:
            self.query_one(LogView).open(event.files, state.manifest.world_size)


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
