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

from ftdash.monitor.control import RankSignal
from ftdash.monitor.diagnosis.model import Diagnosis
from ftdash.monitor.diagnosis.report import as_markdown
from ftdash.monitor.records import HANG_CODE
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.examine import Examination, Examined, How, Look
from ftdash.tui.messages import RunChosen
from ftdash.tui.panes import diagnose_acting as acting
from ftdash.tui.panes import diagnose_locals as locals_of
from ftdash.tui.panes.base import Pane
from ftdash.tui.panes.diagnose_act import (
    LIVE,
    Act,
    ActScreen,
    choices,
    confirmation,
    culprit_hosts,
    signal_of,
)
from ftdash.tui.panes.diagnose_acting import Acted, Target
from ftdash.tui.panes.diagnose_compare import MovedTable
from ftdash.tui.panes.diagnose_refusals import other_channels, refusals
from ftdash.tui.panes.diagnose_restart import Restarted, exclude, restart
from ftdash.tui.panes.diagnose_tree import StackTree, python_frames
from ftdash.tui.widgets.grid import Grid
from ftdash.tui.widgets.groups import GroupRow, GroupTable
from ftdash.tui.widgets.stack import StackView
from ftdash.tui.widgets.stall import StallLine
from ftdash.tui.widgets.verdict import Fact, VerdictPanel

# What tells of a hang and changes nothing else, to begin with. TORCH_DISTRIBUTED_DEBUG=DETAIL tells more, and
# ends some jobs: DDP over gloo by a segmentation fault (torch 2.13), others at their start (pytorch#129672).
RESTART_SWITCHES = ("flight-recorder",)


class DiagnosePane(Pane):
    TITLE = "Diagnose"
    HELP = (
        "A run that stands still is examined by itself.\n"
        "d  takes stacks of all ranks, some seconds apart, and names the rank that holds the others up\n"
        "n  the same with native frames: each rank pauses for half a second\n"
        "e  shows all evidence for the verdict; again: the stacks\n"
        "v  shows all stacks as one tree\n"
        "c  shows what moved since the dump before\n"
        "t  shows all threads of a rank, or the main one\n"
        "u  has the rank's own hook write its stacks (SIGUSR2)\n"
        "l  reads the rank's local variables\n"
        "r  copies a report as Markdown and writes it to a file\n"
        "k  lists what can be done: save, stop, kill, relaunch; each asks for words to type"
    )
    HINTS = (
        "d dump  k act…  r report  v tree  c compare  e evidence  n native  t threads  u SIGUSR2  l locals…"
    )

    BINDINGS: ClassVar = [
        Binding("d,D", "examine", "Dump now", show=False),
        Binding("n", "native", "Native", show=False),
        Binding("t", "threads", "All threads", show=False),
        Binding("u", "ask_hook", "SIGUSR2", show=False),
        Binding("l", "locals", "Locals", show=False),
        Binding("v", "view('tree')", "Stack tree", show=False),
        Binding("c", "view('moved')", "Compare", show=False),
        Binding("e", "whole", "All evidence", show=False),
        Binding("r", "report", "Report", show=False),
        Binding("k", "act", "Act", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="diagnose")
        self.run_state: RunState | None = None
        self.look: Look | None = None
        self.before: Look | None = None  # the look before this one
        self.shown_rank: int | None = None
        self._examination: Examination | None = None
        self._seen: tuple[str, RunPhase, int] | None = None  # what was last examined without being asked
        self._next_rank: dict[tuple[int, ...], int] = {}
        self._unfilled: set[str] = set()  # tables that do not show the newest look yet

    def compose(self) -> ComposeResult:
        yield StallLine()
        yield VerdictPanel()
        with Container(id="diagnose-parts"):
            yield GroupTable(id="groups")
            yield StackTree(id="tree")
            yield MovedTable(id="moved")
            stack = StackView(id="group-stack")
            stack.border_title = "Stack"
            yield stack

    def on_mount(self) -> None:
        self.set_interval(1.0, self._show_line)  # the time left runs between two states of the run
        self.action_view("groups")

    def on_unmount(self) -> None:
        if self._examination is not None:
            self._examination.close()

    @property
    def diagnosis(self) -> Diagnosis | None:
        return self.look.diagnosis if self.look is not None else None

    def first_focus(self) -> Widget:
        if self.has_class("-whole"):
            return self.query_one(VerdictPanel)
        return self._shown_table()

    def _shown_table(self) -> Grid:
        return next(table for table in self._tables() if table.display)

    def _tables(self) -> tuple[Grid, ...]:
        return self.query_one(GroupTable), self.query_one(StackTree), self.query_one(MovedTable)

    # What the run does

    def show_run(self, state: RunState | None, trouble: str) -> None:
        if state is not None and self.run_state is not None and state.run != self.run_state.run:
            self._forget()
        self.run_state = state
        self._show_line()
        if trouble:
            self.query_one(VerdictPanel).say(trouble)
        if state is None:
            return
        # A stall and a failure are examined once, by themselves; of a run that moves, what was kept is shown.
        # Of a stall too, first: agents look earlier than a person comes, and before the timeout.
        hangs = sum(alert.code == HANG_CODE for alert in state.alerts)
        seen = (state.run, state.state, hangs)
        if seen == self._seen:
            return
        self._seen = seen
        if state.state is RunPhase.FAILED:
            self._start(How.NOW)
        elif state.state is RunPhase.STALLED or (self.look is None and state.state in LIVE):
            self._start(How.KEPT)
        elif self.look is None and state.state not in LIVE:
            self.query_one(VerdictPanel).say(f"the run has {state.state}: d looks at what it left")

    def _forget(self) -> None:
        self.look = self.before = self.shown_rank = None
        self._next_rank.clear()
        self._unfilled.clear()
        self.query_one(GroupTable).show((), {}, ())
        self.query_one(StackTree).show((), ())
        self.query_one(MovedTable).show({}, {})
        stack = self.query_one(StackView)
        stack.say("")
        stack.border_title = "Stack"
        self.query_one(VerdictPanel).say("d takes the stacks of all ranks of this run")

    def _show_line(self) -> None:
        if self.display:
            self.query_one(StallLine).show(self.run_state, self.look, time.time())

    def _start(self, how: How) -> None:
        feed, state = self.cockpit.feed, self.run_state
        if feed is None or state is None:
            self.cockpit.notice("no run is watched; R chooses one")
            return
        if self._examination is not None:
            self._examination.close()
        if how is not How.KEPT:
            self.query_one(VerdictPanel).looking()
        self._examination = Examination(feed.run, state.manifest.world_size, self.post_message, how=how)
        self._examination.start()

    @on(Examined)
    def _examined(self, event: Examined) -> None:
        if event.look is None:
            if event.trouble and self.look is not None:
                self._show_look(self.look)  # what was seen before is worth more than a look that failed
                self.cockpit.notice(event.trouble, severity="warning")
            elif event.trouble:
                self.query_one(VerdictPanel).say(event.trouble)
            elif (
                self.look is None and self.run_state is not None and self.run_state.state is RunPhase.STALLED
            ):
                self._start(How.NOW)  # nothing was kept
            return
        if self.look is None or self.look.confirmed:
            self.before = self.look
        self.look = event.look
        self._show_look(event.look)

    def _show_look(self, look: Look) -> None:
        verdict = look.diagnosis.verdict
        panel, groups = self.query_one(VerdictPanel), self.query_one(GroupTable)
        panel.show(
            look.diagnosis,
            confirmed=look.confirmed,
            alive=self.run_state is None or self.run_state.state in LIVE,
            kept_at=look.taken if look.by_itself else 0.0,
            code=look.code,
            warnings=self._warnings(look),
        )
        guilty = {culprit.rank for culprit in verdict.culprits}
        ranks = look.ranks
        stacks = {rank: tuple(map(str, python_frames(one))) for rank, one in ranks.items()}
        groups.show(look.diagnosis.groups, stacks, guilty)
        self._unfilled = {"tree", "moved"}
        self._fill(str(self._shown_table().id))
        if groups.selected is not None:
            self._show_group(groups.selected)
        elif guilty:
            self._show_rank(min(guilty))
        self._show_line()

    @staticmethod
    def _warnings(look: Look) -> list[Fact]:
        """Ranks that could not be looked at, each cause with its remedy."""
        facts: list[Fact] = []
        evidence = look.samples[-1].ranks
        for refusal in refusals(evidence):
            known = f" (meanwhile: {refusal.meanwhile})" if refusal.meanwhile else ""
            said = f"rank {fmt.ranks(refusal.ranks)}: {refusal.text}{known}"
            facts.append(Fact("unseen", said, theme.WARN))
            if refusal.remedy and refusal.remedy not in look.diagnosis.verdict.next:
                facts.append(Fact("remedy", refusal.remedy, theme.ACCENT_BOLD))
        for channel, ranks in other_channels(evidence).items():
            text = f"py-spy could not look at rank {fmt.ranks(ranks)}: stacks by {channel}"
            facts.append(Fact("unseen", text, theme.WARN))
        return facts

    def _fill(self, name: str) -> None:
        """Work a table out when it comes on the screen: a thousand ranks take a moment."""
        if self.look is None or name not in self._unfilled:
            return
        self._unfilled.discard(name)
        ranks = self.look.ranks
        if name == "tree":
            guilty = {culprit.rank for culprit in self.look.diagnosis.verdict.culprits}
            self.query_one(StackTree).show(ranks.values(), guilty)
        else:
            before = self.before.ranks if self.before is not None else {}
            self.query_one(MovedTable).show(before or self.look.earlier, ranks)

    # Who is where, and the stack beside it

    @on(Grid.Moved, "#groups")
    def _group_moved(self, event: Grid.Moved) -> None:
        self._show_group(event.item)

    @on(Grid.Selected, "#groups")
    def _group_chosen(self, event: Grid.Selected) -> None:
        row: GroupRow = event.item
        if row.stacks > 1:
            self.query_one(GroupTable).toggle(row)
            return
        ranks = row.group.ranks
        self._next_rank[ranks] = (self._next_rank.get(ranks, 0) + 1) % len(ranks)
        self._show_group(row)

    @on(Grid.Moved, "#tree")
    @on(Grid.Moved, "#moved")
    def _line_moved(self, event: Grid.Moved) -> None:
        if event.item.ranks:
            self._show_rank(event.item.ranks[0])

    def _show_group(self, row: GroupRow) -> None:
        ranks = row.group.ranks
        if not ranks:
            return
        guilty = [culprit.rank for culprit in self.diagnosis.verdict.culprits] if self.diagnosis else []
        first = next((rank for rank in guilty if rank in ranks), ranks[0])
        index = (ranks.index(first) + self._next_rank.get(ranks, 0)) % len(ranks)
        self._show_rank(ranks[index], row.group.frames)

    def _show_rank(self, rank: int, calls: tuple[str, ...] = ()) -> None:
        stack = self.query_one(StackView)
        self.shown_rank = rank
        evidence = self.look.ranks.get(rank) if self.look is not None else None
        where = f" on {fmt.clean(evidence.host)}" if evidence is not None and evidence.host else ""
        stack.border_title = f"rank {rank}{where}"
        if evidence is not None and evidence.process is not None:
            stack.show(evidence)
        else:
            stack.show_frames(f"rank {rank}", calls)

    def action_threads(self) -> None:
        self.query_one(StackView).action_threads()

    def action_view(self, name: str) -> None:
        """Show the tree or what moved instead of the groups, or the groups again."""
        tables = {table.id: table for table in self._tables()}
        had_focus = any(table.has_focus for table in tables.values())
        wanted = "groups" if tables[name].display and name != "groups" else name
        for table_id, table in tables.items():
            table.display = table_id == wanted
        self._fill(wanted)
        if wanted == "moved" and self.look is not None and not self.query_one(MovedTable).items:
            self.cockpit.notice("one dump only: d takes another")
        if had_focus:
            tables[wanted].focus()

    def action_whole(self) -> None:
        """The verdict with all its evidence on the whole pane, or the stacks again."""
        self.toggle_class("-whole")
        panel = self.query_one(VerdictPanel)
        panel.show_whole(self.has_class("-whole"))
        (panel if panel.whole else self.first_focus()).focus()

    # Looking closer

    def action_examine(self) -> None:
        self._start(How.NOW)

    def action_native(self) -> None:
        self._start(How.NATIVE)

    def target(self) -> Target | None:
        """The process of the rank whose stack is shown, None when it is not known."""
        rank = self.shown_rank
        if self.look is None or rank is None:
            return None
        evidence = self.look.ranks.get(rank)
        if evidence is not None and evidence.pid:
            return Target(rank, evidence.pid, evidence.host)
        found = next((c for c in self.look.diagnosis.verdict.culprits if c.rank == rank and c.pid), None)
        return Target(rank, found.pid, found.host) if found is not None else None

    def _need_target(self) -> Target | None:
        target = self.target()
        if target is None:
            self.cockpit.notice("no rank's process is shown yet: d takes the stacks")
        return target

    def action_ask_hook(self) -> None:
        if (target := self._need_target()) is not None and self.cockpit.feed is not None:
            self.cockpit.notice(f"SIGUSR2 to {target.words}; it can cut a blocked system call short")
            acting.send(self.cockpit.feed.run, target, RankSignal.STACKS, self.post_message)

    def action_locals(self) -> None:
        if (target := self._need_target()) is None:
            return

        def confirmed(text: str) -> None:
            if text.strip() == "locals":
                locals_of.read(target, self.post_message)
            else:
                self.cockpit.notice("no locals were read")

        label = f"rank {target.rank}'s locals can hold training data and keys: type locals"
        self.cockpit.ask(label, "", confirmed)

    @on(locals_of.LocalsRead)
    def _locals_read(self, event: locals_of.LocalsRead) -> None:
        if event.trouble:
            self.cockpit.notice(event.trouble, severity="warning")
        else:
            self.app.push_screen(locals_of.LocalsScreen(event.target, event.rows))

    # Telling others

    def action_report(self) -> None:
        if self.look is None or self.run_state is None:
            self.cockpit.notice("nothing to report yet: d takes the stacks")
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.look.taken or time.time()))
        head = f"`{self.run_state.run}` at step {self.run_state.step:,}, {when}"
        text = f"{head}\n\n{as_markdown(self.look.diagnosis)}"
        self.app.copy_to_clipboard(text)  # OSC 52: reaches the person's own terminal, over SSH too

        def save(name: str) -> None:
            if not name.strip():
                return
            path = Path(name.strip()).expanduser()
            try:
                path.write_text(text)
                self.cockpit.notice(f"report written to {path}, and copied")
            except OSError as error:
                self.cockpit.notice(f"cannot write {path}: {error.strerror or error}", severity="error")

        self.cockpit.ask("copied; write the report to", f"{self.run_state.run}.md", save)

    # Acting

    def action_act(self) -> None:
        if self.cockpit.feed is None or self.run_state is None:
            self.cockpit.notice("no run is watched; R chooses one")
            return
        found = choices(self.run_state, self.target(), self.diagnosis)
        self.app.push_screen(ActScreen(found), self._chosen)

    def _chosen(self, act: Act | None) -> None:
        state = self.run_state
        if act is None or state is None:
            return
        if act is Act.RESTART:
            from ftdash.tui.panes.switches import SwitchesScreen

            self.app.push_screen(SwitchesScreen(RESTART_SWITCHES), self._switches_chosen)
            return
        target = self.target()
        label, words = confirmation(act, state, target, self.diagnosis)

        def confirmed(text: str) -> None:
            if text.strip() == words:
                self._do(act, target)
            else:
                self.cockpit.notice("nothing was done")

        self.cockpit.ask(label, "", confirmed)

    def _do(self, act: Act, target: Target | None) -> None:
        feed = self.cockpit.feed
        if feed is None:
            return
        if act in (Act.KILL_RANK, Act.CONTINUE):
            if target is not None:
                acting.send(feed.run, target, signal_of(act), self.post_message)
            return
        self.cockpit.notice(f"ending {feed.run.run_id}…")
        if act is Act.EXCLUDE:
            exclude(feed.run, culprit_hosts(self.diagnosis), self.post_message)
            return
        grace_s = 1.0 if act is Act.KILL_JOB else 20.0
        acting.end(feed.run, self.post_message, save=act is Act.SAVE, grace_s=grace_s)

    def _switches_chosen(self, switches: tuple[str, ...] | None) -> None:
        feed, state = self.cockpit.feed, self.run_state
        if switches is None or feed is None or state is None:
            return
        run = feed.run
        label, words = confirmation(Act.RESTART, state, None, None)

        def confirmed(text: str) -> None:
            if text.strip() == words:
                self.cockpit.notice(f"ending {run.run_id}, then starting it again…")
                restart(run, switches, self.post_message)
            else:
                self.cockpit.notice("nothing was done")

        self.cockpit.ask(label, "", confirmed)

    @on(Restarted)
    def _restarted(self, event: Restarted) -> None:
        self.cockpit.notice(f"started again as {event.run.run_id}")
        self.post_message(RunChosen(event.run))

    @on(Acted)
    def _acted(self, event: Acted) -> None:
        self.cockpit.notice(event.text, severity="error" if event.failed else "information")
        if event.evidence is not None and event.evidence.rank == self.shown_rank:
            self.query_one(StackView).show(event.evidence)
