"""The queue of Slurm above the Launch pane: own jobs and partitions, as old as it says."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from ftdash.engine.slurm.client import Job
from ftdash.engine.slurm.queue import QueueView, QueueWatch
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay


class QueueScreen(Overlay[None]):
    """Never waits for the controller: it shows the last answer and its age."""

    HELP = "Your jobs and the partitions. Slurm is asked seldom, in the background."
    BINDINGS: ClassVar = [Binding("escape,q,Q", "close", "Back", show=False)]

    def __init__(self, watch: QueueWatch | None = None) -> None:
        super().__init__()
        self._watch = watch or QueueWatch()

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="config-box") as box:
            box.border_title = "Queue of Slurm"
            box.border_subtitle = "esc back"
            yield Static(id="queue-text")

    def on_mount(self) -> None:
        self.set_interval(1.0, self._look)
        self._look()

    def _look(self) -> None:
        self.query_one("#queue-text", Static).update(queue_text(self._watch.view(), time.time()))

    def action_close(self) -> None:
        self.dismiss(None)


def expected_start(job: Job, now: float) -> str:
    """When Slurm means to start a waiting job, in local time; empty where it does not say."""
    if job.state != "PENDING" or not job.started:
        return ""
    day = "%H:%M" if abs(job.started - now) < 12 * 3600 else "%d %b %H:%M"
    return f"  starts about {time.strftime(day, time.localtime(job.started))}"


def queue_text(view: QueueView, now: float) -> Text:
    """Jobs, then partitions; before the first answer, that it is awaited or what went wrong."""
    text = Text()
    if view.error:
        text.append(f"{theme.GLYPHS.no} {fmt.clean(view.error)}\n", theme.BAD)
    if not view.asked:
        if not view.error:
            text.append(f"{theme.GLYPHS.waiting} asking Slurm…", theme.DIM)
        return text
    text.append(f"answered {max(0.0, now - view.asked):.0f} s ago\n\n", theme.DIM)
    if not view.jobs:
        text.append("no job of yours is queued or running\n", theme.TEXT)
    for job in view.jobs:
        style = theme.OK if job.state == "RUNNING" else theme.WARN if job.state == "PENDING" else theme.DIM
        text.append(
            f"{fmt.fit(fmt.clean(job.shown_id or job.id), 10)} {fmt.fit(fmt.clean(job.state), 12)}", style
        )
        text.append(f"{fmt.fit(fmt.clean(job.name), 26)} {fmt.plural(job.node_count, 'node')}  ", theme.TEXT)
        text.append(f"{fmt.clean(job.partition)}  {fmt.clean(job.nodes or job.reason)}", theme.DIM)
        text.append(f"{expected_start(job, now)}\n", theme.DIM)
    text.append("\npartitions\n", theme.ACCENT_BOLD)
    for partition in view.partitions:
        states = ", ".join(f"{count} {fmt.clean(state)}" for state, count in sorted(partition.states.items()))
        text.append(f"{fmt.fit(fmt.clean(partition.name), 16)} ", theme.BOLD)
        text.append(f"{states}  {fmt.clean(partition.gres)}\n", theme.DIM)
    return text
