"""The list of strategies that fit, fastest first; one becomes the plan."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message

from ftdash.engine.plan import Plan
from ftdash.engine.planner.fit import Candidate
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

MOST_SHOWN = 200


class CandidateTable(Grid):
    """Speed, memory left, and what the configuration is."""

    HELP = "Fastest first, at equal speed by memory left.\nenter  makes it the plan"
    HINTS = "↑↓ candidate  enter take it"
    empty = "trying thousands of plans…"

    def columns(self) -> Sequence[Column]:
        return [
            Column("speed", "tok/s/GPU", 9, right=True),
            Column("left", "GB left", 8, right=True),
            Column("strategy", "strategy", 15),
            Column("mesh", "mesh", 16, drop=1),
            Column("batch", "batch", 8, right=True),
            Column("rest", "the rest", 20, grow=True),
        ]

    def identity(self, item: Candidate) -> Hashable:
        return item.plan

    def cells(self, item: Candidate, columns: Sequence[Column]) -> Line:
        plan, times = item.plan, theme.GLYPHS.times
        degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "ep": plan.ep}
        cells = {
            "speed": (fmt.rate(item.tokens_per_s_per_gpu), theme.BOLD),
            "left": (fmt.gb(item.headroom), theme.OK),
            "strategy": (plan.strategy.value, theme.TEXT),
            "mesh": (" ".join(f"{name} {n}" for name, n in degrees.items() if n > 1), theme.ACCENT),
            "batch": (f"{plan.micro_batch}{times}{plan.grad_accum}", theme.TEXT),
            "rest": (f"{plan.checkpointing}, {plan.loss}, {plan.offload}", theme.DIM),
        }
        return tuple(cells[column.key] for column in columns)


class FitScreen(Overlay[Plan | None]):
    """Searches in a thread; a second search is never started while one runs."""

    HELP = "Every way to run this model, method and global batch on these GPUs that fits."
    BINDINGS: ClassVar = [Binding("escape,q", "close", "Back", show=False)]

    class Found(Message):
        """The search is done, or was refused in one line."""

        def __init__(self, candidates: tuple[Candidate, ...], tried: int, trouble: str = "") -> None:
            super().__init__()
            self.candidates, self.tried, self.trouble = candidates, tried, trouble

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def compose(self) -> ComposeResult:
        with Vertical(id="runs-box") as box:
            box.border_title = "Searching for what fits…"
            box.border_subtitle = "enter take it  esc back"
            yield CandidateTable(id="candidates")

    def on_mount(self) -> None:
        self.query_one(CandidateTable).focus()
        threading.Thread(target=self._search, name="fit-search", daemon=True).start()

    def _search(self) -> None:
        from ftdash.engine.planner.fit import search

        try:
            found = search(self._plan, MOST_SHOWN)
            self.post_message(self.Found(found.candidates, found.tried))
        except Exception as error:  # refused input or a fault: one line in the title
            self.post_message(self.Found((), 0, str(error) or type(error).__name__))

    def on_fit_screen_found(self, event: Found) -> None:
        box = self.query_one("#runs-box")
        if event.trouble:
            box.border_title = Content(fmt.clean(f"{theme.GLYPHS.no} {event.trouble}"))
        elif event.candidates:
            shown = len(event.candidates)
            words = f"The best {shown:,}" if shown == MOST_SHOWN else f"{shown:,} fit"
            box.border_title = f"{words}, of {event.tried:,} tried"
        else:
            box.border_title = f"{theme.GLYPHS.no} none of {event.tried:,} fits these GPUs"
        table = self.query_one(CandidateTable)
        table.say_empty("fewer tokens, more GPUs, qlora or offload may fit" if event.tried else "")
        table.set_items(event.candidates)

    @on(Grid.Selected)
    def _chosen(self, event: Grid.Selected) -> None:
        event.stop()
        self.dismiss(event.item.plan)

    def action_close(self) -> None:
        self.dismiss(None)
