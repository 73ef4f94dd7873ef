"""The Diagnose pane: the verdict in a sentence, who is where, and the stacks for those who doubt it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.widget import Widget

from ftdash.monitor.diagnosis.model import Diagnosis, Group, RankEvidence
from ftdash.monitor.diagnosis.report import as_markdown
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import launching, theme
from ftdash.tui.examine import Examination, Examined
from ftdash.tui.launching import Stopped
from ftdash.tui.panes.base import Pane
from ftdash.tui.widgets.grid import Grid
from ftdash.tui.widgets.groups import GroupTable
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.overview import PHASE_LOOK
from ftdash.tui.widgets.stack import StackView
from ftdash.tui.widgets.verdict import VerdictPanel

LIVE = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)


class StallLine(LineWidget):
    """How the run stands, since when nothing moved, and how much evidence there is."""

    def __init__(self) -> None:
        super().__init__(id="stall-line")
        self.state: RunState | None = None
        self.evidence = ""

    def show(self, state: RunState | None, evidence: str) -> None:
        self.state, self.evidence = state, evidence
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.state is None:
            return [((" no run is watched: R chooses one", theme.DIM),)]
        state = self.state
        symbol, style = PHASE_LOOK[state.state]
        words = f" {symbol} {state.state.value} "
        ages = [rank.heartbeat_age_s for rank in state.ranks if rank.heartbeat_age_s is not None]
        since = f"for {fmt.duration(max(ages))} " if ages and state.state is RunPhase.STALLED else ""
        left = f"{since}at step {state.step:,}  {fmt.clean(state.manifest.name or state.run)}"
        room = width - len(words) - len(left) - 1
        return [
            (
                (words, style),
                (left, theme.TEXT),
                (fmt.fit(self.evidence, max(0, room), right=True), theme.DIM),
            )
        ]


class DiagnosePane(Pane):
    TITLE = "Diagnose"
    HELP = (
        "d takes stacks of all ranks, some seconds apart, and names the rank that holds the others up.\n"
        "n takes them once with native frames (each rank pauses for half a second), t shows all threads,\n"
        "r writes a report as Markdown and copies it, k stops the run after you typed stop.\n"
        "A run that stalls while this pane is open is examined once by itself."
    )
    HINTS = "d dump  n native  t all threads  r report  k stop…"

    BINDINGS: ClassVar = [
        Binding("d,D", "examine(False)", "Dump now", show=False),
        Binding("n", "examine(True)", "Native", show=False),
        Binding("t", "threads", "All threads", show=False),
        Binding("r", "report", "Report", show=False),
        Binding("k", "stop", "Stop", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="diagnose")
        self.run_state: RunState | None = None
        self.diagnosis: Diagnosis | None = None
        self.evidence: dict[int, RankEvidence] = {}
        self.samples = 0
        self._examination: Examination | None = None
        self._examined_stall: tuple[str, int] | None = None
        self._rank_shown: dict[tuple[int, ...], int] = {}

    def compose(self) -> ComposeResult:
        yield StallLine()
        yield VerdictPanel()
        with Container(id="diagnose-parts"):
            yield GroupTable(id="groups")
            stack = StackView(id="group-stack")
            stack.border_title = "Stack"
            yield stack

    def on_unmount(self) -> None:
        if self._examination is not None:
            self._examination.close()

    def first_focus(self) -> Widget:
        return self.query_one(GroupTable)

    def show_run(self, state: RunState | None, trouble: str) -> None:
        if state is not None and self.run_state is not None and state.run != self.run_state.run:
            self._forget()
        self.run_state = state
        self._show_line()
        if trouble:
            self.query_one(VerdictPanel).say(trouble)
        if state is None:
            return
        stall = (state.run, state.step)
        if state.state is RunPhase.STALLED and self._examined_stall != stall:
            self._examined_stall = stall
            self.action_examine(False)

    def _forget(self) -> None:
        self.diagnosis, self.evidence, self.samples = None, {}, 0
        self.query_one(GroupTable).set_items([])
        self.query_one(StackView).say("")
        self.query_one(VerdictPanel).say("d takes the stacks of all ranks of this run")

    def _show_line(self) -> None:
        evidence = ""
        if self.samples and self.run_state is not None:
            of = self.run_state.manifest.world_size
            evidence = f"evidence {len(self.evidence)} of {of} ranks, {fmt.plural(self.samples, 'sample')}"
        self.query_one(StallLine).show(self.run_state, evidence)

    def action_examine(self, native: bool) -> None:
        feed, state = self.cockpit.feed, self.run_state
        if feed is None or state is None:
            self.cockpit.notice("no run is watched; R chooses one")
            return
        if self._examination is not None:
            self._examination.close()
        self.query_one(VerdictPanel).say("taking the stacks of all ranks…")
        self._examination = Examination(feed.run, state.manifest.world_size, self.post_message, native=native)
        self._examination.start()

    @on(Examined)
    def _examined(self, event: Examined) -> None:
        self.evidence = {one.rank: one for one in event.evidence}
        self.samples = event.samples
        panel, groups = self.query_one(VerdictPanel), self.query_one(GroupTable)
        if event.diagnosis is None:
            panel.say(event.trouble)
        else:
            self.diagnosis = event.diagnosis
            panel.show(event.diagnosis, confirmed=event.confirmed)
            groups.show(event.diagnosis.groups, event.diagnosis.verdict.culprits)
            if groups.selected is not None:
                self._show_stack(groups.selected[0])
        self._show_line()

    @on(Grid.Moved, "#groups")
    def _group_moved(self, event: Grid.Moved) -> None:
        self._show_stack(event.item[0])

    @on(Grid.Selected, "#groups")
    def _group_chosen(self, event: Grid.Selected) -> None:
        group: Group = event.item[0]
        self._rank_shown[group.ranks] = (self._rank_shown.get(group.ranks, 0) + 1) % len(group.ranks)
        self._show_stack(group)

    def _show_stack(self, group: Group) -> None:
        stack = self.query_one(StackView)
        if not group.ranks:
            return
        rank = group.ranks[self._rank_shown.get(group.ranks, 0)]
        evidence = self.evidence.get(rank)
        stack.border_title = f"rank {rank}" + (
            f" on {fmt.clean(evidence.host)}" if evidence is not None else ""
        )
        if evidence is not None and (evidence.threads or evidence.process is not None):
            stack.show(evidence)
        else:
            stack.show_frames(f"rank {rank}", group.frames)

    def action_threads(self) -> None:
        self.query_one(StackView).action_threads()

    def action_report(self) -> None:
        if self.diagnosis is None or self.run_state is None:
            self.cockpit.notice("nothing to report yet: d takes the stacks")
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        head = f"`{self.run_state.run}` at step {self.run_state.step:,}, {when}"
        text = f"{head}\n\n{as_markdown(self.diagnosis)}"
        self.app.copy_to_clipboard(text)

        def save(name: str) -> None:
            if not name.strip():
                return
            path = Path(name.strip()).expanduser()
            try:
                path.write_text(text)
                self.cockpit.notice(f"report written to {path}, and copied")
            except OSError as error:
                self.cockpit.notice(f"cannot write {path}: {error.strerror or error}", severity="error")

        self.cockpit.ask("write the report to", f"{self.run_state.run}.md", save)

    def action_stop(self) -> None:
        feed, state = self.cockpit.feed, self.run_state
        if feed is None or state is None or state.state not in LIVE:
            self.cockpit.notice("no live run is watched")
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
        self.cockpit.notice(event.trouble or f"{event.run.run_id} is stopped, no process is left")
