"""The list of what can be done about a stuck run; each entry says what it does, or why it cannot be had."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container

from ftdash.monitor.control import RankSignal
from ftdash.monitor.diagnosis.model import Diagnosis
from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.diagnose_acting import Target
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

LIVE = (RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STALLED)


class Act(StrEnum):
    """By the key that chooses it."""

    SAVE = "s"
    KILL_RANK = "r"
    CONTINUE = "c"
    STOP = "t"
    KILL_JOB = "k"
    RESTART = "d"
    EXCLUDE = "x"


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the list. `blocked` says why it cannot be done now, "" when it can."""

    act: Act
    name: str
    what: str
    blocked: str = ""


def choices(state: RunState, target: Target | None, diagnosis: Diagnosis | None) -> list[Choice]:
    """What can be done about this run, the mildest first. `target` is the rank whose stack is shown."""
    ended = "" if state.state in LIVE else f"the run has {state.state}"
    no_rank = ended or ("" if target is not None else "no process is known: d takes the stacks first")
    who = f"rank {target.rank}" if target is not None else "one rank"
    where = f"pid {target.pid} on {target.host}" if target is not None else ""
    culprits = {culprit.rank for culprit in diagnosis.verdict.culprits} if diagnosis is not None else set()
    if target is not None and target.rank in culprits:
        where += " (the culprit)"
    saving = "a checkpoint at the end of this step"
    if state.state is RunPhase.STALLED:
        saving = "a stuck rank never gets there: stops after 10 min"
    again = "from the start" if state.manifest.plan is None else "from the last checkpoint"
    found = [
        Choice(Act.SAVE, "save and stop", saving, ended),
        Choice(Act.STOP, "stop the job", "SIGTERM to all ranks, SIGKILL after 20 s", ended),
        Choice(Act.KILL_RANK, f"kill {who}", f"SIGKILL: {where}", no_rank),
        Choice(Act.KILL_JOB, "kill the job", "all processes of all nodes, SIGKILL after 1 s", ended),
        Choice(
            Act.RESTART,
            "relaunch",
            f"with debug switches, {again}",
            "" if state.manifest.backend == "local" else "only for a run that was started on this machine",
        ),
    ]
    if state.manifest.backend == "slurm":
        hosts = culprit_hosts(diagnosis)
        found.append(
            Choice(
                Act.EXCLUDE,
                f"exclude {', '.join(hosts)}" if hosts else "exclude the node",
                "ends the job and submits it again without that node",
                "" if hosts else "no culprit's node is known: d takes the stacks first",
            )
        )
    if diagnosis is not None and str(diagnosis.verdict.kind) == "stopped-rank":
        found.insert(0, Choice(Act.CONTINUE, f"continue {who}", f"SIGCONT: {where}", no_rank))
    return found


def culprit_hosts(diagnosis: Diagnosis | None) -> list[str]:
    """The nodes of the culprits, sorted."""
    if diagnosis is None:
        return []
    return sorted({culprit.host for culprit in diagnosis.verdict.culprits if culprit.host})


def confirmation(
    act: Act, state: RunState, target: Target | None, diagnosis: Diagnosis | None
) -> tuple[str, str]:
    """The question with everything that will be hit, and the words to type."""
    run = f"{state.manifest.name or state.run}, {fmt.plural(len(state.ranks), 'rank')}"
    if hosts := sorted({rank.host for rank in state.ranks}):
        run += f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
    words = {
        Act.SAVE: "save",
        Act.STOP: "stop",
        Act.KILL_JOB: "kill job",
        Act.RESTART: "relaunch",
        Act.EXCLUDE: " ".join(["exclude", *culprit_hosts(diagnosis)]),
        Act.KILL_RANK: f"kill {target.rank}" if target is not None else "",
        Act.CONTINUE: f"continue {target.rank}" if target is not None else "",
    }[act]
    one_rank = act in (Act.KILL_RANK, Act.CONTINUE)
    whom = target.words if one_rank and target is not None else run
    return f"{whom}: type {words}", words


def signal_of(act: Act) -> RankSignal:
    """The signal of an act on one rank."""
    return RankSignal.KILL if act is Act.KILL_RANK else RankSignal.CONTINUE


class ActList(Grid):
    """One line a choice; what cannot be done says why."""

    HELP = "enter  takes the line under the cursor; the letter before a line takes that one"
    HINTS = "↑↓ choose  enter take  esc back"
    HEADER = False

    def columns(self) -> Sequence[Column]:
        name = max((len(choice.name) for choice in self.items), default=20)
        return [Column("key", "", 1), Column("name", "", name + 1), Column("what", "", 20, grow=True)]

    def identity(self, item: Choice) -> Hashable:
        return item.act

    def cells(self, item: Choice, columns: Sequence[Column]) -> Line:
        if item.blocked:
            return ((" ", theme.FAINT), (item.name, theme.DIM), (f"not now: {item.blocked}", theme.DIM))
        return ((item.act.value, theme.ACCENT_BOLD), (item.name, theme.BOLD), (item.what, theme.TEXT))


class ActScreen(Overlay[Act | None]):
    """Answers with what was chosen; asking for the words is the pane's part."""

    HELP = "Nothing happens before you have typed the words that the next line asks for."
    BINDINGS: ClassVar = [Binding("escape,q", "close", "Back", show=False)]

    def __init__(self, found: Sequence[Choice]) -> None:
        super().__init__()
        self._found = found

    def compose(self) -> ComposeResult:
        with Container(id="act-box") as box:
            box.border_title = "What to do"
            box.border_subtitle = "esc back"
            yield ActList(id="acts")

    def on_mount(self) -> None:
        table = self.query_one(ActList)
        table.set_items(self._found)
        table.focus()

    def on_key(self, event: events.Key) -> None:
        chosen = next((choice for choice in self._found if choice.act.value == event.key), None)
        if chosen is not None:
            event.stop()
            self._take(chosen)

    @on(Grid.Selected, "#acts")
    def _selected(self, event: Grid.Selected) -> None:
        self._take(event.item)

    def _take(self, choice: Choice) -> None:
        if choice.blocked:
            self.app.notify(choice.blocked, severity="warning", markup=False)
        else:
            self.dismiss(choice.act)

    def action_close(self) -> None:
        self.dismiss(None)
