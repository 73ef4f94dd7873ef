"""The Monitor pane: the run in one glance, its ranks, its curves, its experts, its alerts."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widget import Widget

from ftdash.monitor.reader import spread_s
from ftdash.monitor.timeline import aligned
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.base import Pane
from ftdash.tui.widgets.alerts import AlertList
from ftdash.tui.widgets.chart import BrailleChart
from ftdash.tui.widgets.gpu_strip import GpuStrip
from ftdash.tui.widgets.grid import Grid
from ftdash.tui.widgets.heatmap import ExpertHeatmap
from ftdash.tui.widgets.lines import Box
from ftdash.tui.widgets.node_grid import NodeGrid
from ftdash.tui.widgets.overview import Overview, mfu_seconds, on_gpu, promise
from ftdash.tui.widgets.rank_rows import Standing
from ftdash.tui.widgets.rank_table import RankTable
from ftdash.tui.widgets.terms import PlanTerms, terms

if TYPE_CHECKING:
    from ftdash.monitor.rundir import RunDir
    from ftdash.monitor.state import RunState
    from ftdash.tui.replaying import ReplayFeed

MANY_RANKS = 64  # from here on the node grid comes first
ROOM_FOR_CURVE = 9  # lines left over below table and map, where the loss gets a wide curve


class MonitorPane(Pane):
    TITLE = "Monitor"
    HELP = (
        "d  dumps the stacks of the rank under the cursor and shows them; enter opens the rank\n"
        "x  makes one part large: ranks, experts, curves, then all again\n"
        "a  acknowledges the alert under the cursor, enter shows it whole\n"
        "c  lays another run's curves over these, at the same number of tokens; again: takes them away\n"
        "p  plays the run from its beginning; again: returns to what is now\n"
        "space  pauses the replay\n"
        "[ ]  go back and on by a twentieth of it\n"
        "+ -  change its speed"
    )
    HINTS = "d dump stacks  enter rank  x enlarge  c compare  p replay  R runs"

    BINDINGS: ClassVar = [
        Binding("d,D", "dump", "Dump stacks of the rank", show=False),
        Binding("x", "enlarge", "Enlarge a part", show=False),
        Binding("c", "compare", "Lay another run over", show=False),
        Binding("p", "replay", "Play again", show=False),
        Binding("space", "pause", "Pause the replay", show=False),
        Binding("left_square_bracket", "seek(-0.05)", "Back", show=False),
        Binding("right_square_bracket", "seek(0.05)", "On", show=False),
        Binding("plus,equals_sign", "hurry(2.0)", "Faster", show=False),
        Binding("minus", "hurry(0.5)", "Slower", show=False),
    ]
    PARTS: ClassVar = ("", "-only-ranks", "-only-experts", "-only-curves")

    def __init__(self) -> None:
        super().__init__(id="monitor")
        self._enlarged = 0
        self._heights: tuple[int, ...] = ()
        # The largest rank's, one for each state seen: where no step tells it.
        self._memory: deque[float] = deque(maxlen=2000)
        self._run = ""
        self._compared: tuple[object, ...] = ()  # what ranks were last compared in; empty: it is their turn
        self._other: RunState | None = None  # whose curves are laid over

    def compose(self) -> ComposeResult:
        yield Overview()
        with Box(id="monitor-parts"):
            with Box(id="monitor-main"):
                yield NodeGrid(id="nodes")
                yield RankTable(id="ranks")
                yield GpuStrip(id="gpus")
                yield ExpertHeatmap(id="experts")
                yield BrailleChart("Loss", fmt.loss, style=theme.OK, id="loss-wide")
            with Box(id="monitor-side"):
                yield BrailleChart("Tokens/s", fmt.rate, id="speed")
                yield BrailleChart("Loss", fmt.loss, style=theme.OK, id="loss")
                yield BrailleChart("Memory GB", fmt.gb, style=theme.VIOLET, id="memory")
                yield PlanTerms(id="terms", classes="-empty")
                yield AlertList(id="alerts")

    def on_mount(self) -> None:
        self.query_one(NodeGrid).display = False
        self.query_one(GpuStrip).display = False
        self.query_one(ExpertHeatmap).display = False
        self.query_one(AlertList).show(())

    def first_focus(self) -> Widget:
        match self.PARTS[self._enlarged]:
            case "-only-experts":
                return self.query_one(ExpertHeatmap)
            case "-only-curves":
                return self.query_one(AlertList)
            case _:
                return self.query_one(RankTable)

    def needle_target(self) -> Widget:
        return self.query_one(RankTable)

    def show_run(self, state: RunState | None, trouble: str) -> None:
        replay = self._replay()
        self.query_one(Overview).show(state, trouble, replay.words if replay else "")
        if state is None:
            return
        if state.run != self._run:
            self._run = state.run
            self._memory.clear()
            self._other = None
            self.query_one(AlertList).forget()
            self.query_one(RankTable).cursor = 0
        many = len(state.ranks) > MANY_RANKS
        nodes, table, gpus = self.query_one(NodeGrid), self.query_one(RankTable), self.query_one(GpuStrip)
        heat = self.query_one(ExpertHeatmap)
        large = self.PARTS[self._enlarged]
        nodes.display = many and large != "-only-experts"
        # On the smallest terminals the ranks come first; x still shows the experts by themselves.
        cramped = self.has_class("-narrow") and self.has_class("-short")
        gpus.display = bool(state.gpus) and not many and not cramped and not large
        heat.display = bool(state.experts) and (large == "-only-experts" or not (large or (many and cramped)))
        self._share_height(state, many)
        if self._compares(state, replay is not None):
            standing = Standing.of(state.ranks)
            if many:
                nodes.show(state.ranks, state.alerts, standing)
            table.show(state.ranks, state.alerts, standing, mfu_seconds(state))
        else:
            table.show_figures(state.ranks)
        if self.cockpit.feed is not None:
            self.cockpit.feed.attend(table.visible_ranks())
        if gpus.display:
            gpus.show(state.gpus)
        aux_loss = next((rank.aux_loss for rank in state.ranks if rank.aux_loss is not None), None)
        heat.show(state.experts, aux_loss, state.routing)
        self._show_terms(state)
        self._show_curves(state)
        self.query_one(AlertList).show(state.alerts, state.notices, state.now)

    def _compares(self, state: RunState, replay: bool) -> bool:
        """Whether ranks are to be compared with one another: every other time where not all of them are new.

        What is new besides figures, be it a rank, an alert or a place on the screen, is never put off.
        """
        alerts = tuple((alert.code, alert.ranks) for alert in state.alerts)
        known = (state.run, len(state.ranks), state.state, alerts, self._heights, self.size)
        if known == self._compared and not replay and spread_s(len(state.ranks)):
            self._compared = ()
            return False
        self._compared = known
        return True

    def _show_terms(self, state: RunState) -> None:
        widget, rows = self.query_one(PlanTerms), terms(state)
        widget.set_class(not rows, "-empty")
        if len(rows) != len(widget.rows):
            widget.styles.height = len(rows) + 2
        widget.show(rows)

    def _show_curves(self, state: RunState) -> None:
        said = promise(state) if on_gpu(state) else None
        speed_plan = said.tokens_per_s if said else None
        words = fmt.rate(state.tokens_per_s)
        if speed_plan and self._other is None:
            words += f"  plan {theme.GLYPHS.dash} {fmt.rate(speed_plan)}"
        points = state.points
        other = aligned(points, self._other.points) if self._other is not None else []
        beside = next((point for point in reversed(other) if point is not None), None)
        name = fmt.clean(_name(self._other)) if self._other is not None else ""
        if self._other is not None:
            words += f"  {name} {fmt.rate(beside.tokens_per_s if beside else None)}"
        self.query_one("#speed", BrailleChart).show(
            [point.tokens_per_s for point in points],
            other=[point.tokens_per_s if point else None for point in other],
            plan=speed_plan,
            caption=words,
        )
        losses, last = [point.loss for point in points], fmt.loss(state.loss)
        if self._other is not None:
            last += f"  {name} {fmt.loss(beside.loss if beside else None)}"
        for chart in ("#loss", "#loss-wide"):
            self.query_one(chart, BrailleChart).show(
                losses, other=[point.loss if point else None for point in other], caption=last
            )
        largest = max((rank.memory_used or 0 for rank in state.ranks), default=0)
        if largest:
            self._memory.append(float(largest))
        caption = f"largest rank {fmt.gb(largest)}" if largest else ""
        if state.manifest.attached and (logged := state.measured.get("reserved")):
            caption = f"{fmt.gb(largest or None)}  log: reserved {fmt.gb(logged)}"
        if self._other is not None:
            caption = f"{fmt.gb(largest or None)}  {name} {fmt.gb(beside.memory_used if beside else None)}"
        by_step = [point.memory_used for point in points]
        known = any(by_step)
        self.query_one("#memory", BrailleChart).show(
            by_step if known else self._memory,
            other=[point.memory_used if point else None for point in other] if known else (),
            plan=said.reserved if said else None,
            caption=caption,
        )

    def _share_height(self, state: RunState, many: bool) -> None:
        """Small tables and maps take what they need; large ones share the rest."""
        room = self.query_one("#monitor-main").size.height
        table, heat, nodes = (
            self.query_one(RankTable),
            self.query_one(ExpertHeatmap),
            self.query_one(NodeGrid),
        )
        wanted = len(state.ranks) + 3
        layers = heat.lines_for(state.experts) + 2 if heat.display else 0
        gpu_lines = 0
        if self.query_one(GpuStrip).display:
            width = self.query_one("#monitor-main").size.width - 2
            gpu_lines = self.query_one(GpuStrip).lines_for(state.gpus, width) + 2
        heights = (room, wanted if not many else 0, layers, gpu_lines)
        if heights == self._heights or not room:
            return
        self._heights = heights
        if many:
            most = max(6, room - 6 - min(layers, 8))
            width = self.query_one("#monitor-main").size.width - 2
            nodes.show(state.ranks, state.alerts)
            lines = -(-len(nodes.nodes) // nodes.per_line(width, most - 2))
            nodes.styles.height = min(lines + 2, most)
            table.styles.height = "1fr"
            heat.styles.height = min(layers, 8) if lines + 2 >= most else min(layers, max(8, room // 3))
            return
        gpus = min(gpu_lines, max(4, room * 3 // 10)) if gpu_lines else 0
        self.query_one(GpuStrip).styles.height = gpus
        left = room - gpus
        roomy = wanted + layers + ROOM_FOR_CURVE <= left and not self.has_class("-narrow")
        self.set_class(roomy, "-roomy")
        if roomy:
            table.styles.height, heat.styles.height = wanted, layers
        elif not layers:
            table.styles.height = "1fr"
        elif wanted + layers <= left or wanted <= left // 2:
            table.styles.height = wanted
            heat.styles.height = "1fr"
        else:
            table.styles.height = max(5, left - min(layers, left // 2))
            heat.styles.height = "1fr"

    def fitted(self) -> None:
        self._heights = ()
        self.call_after_refresh(self.cockpit.show_newest, self)

    def action_enlarge(self) -> None:
        self.remove_class(*filter(None, self.PARTS))
        self._enlarged = (self._enlarged + 1) % len(self.PARTS)
        if self.PARTS[self._enlarged] == "-only-experts" and not self.query_one(ExpertHeatmap).loads:
            self._enlarged += 1  # a dense model has none
        if self.PARTS[self._enlarged]:
            self.add_class(self.PARTS[self._enlarged])
        self._heights = ()
        self.call_after_refresh(self._enlarge)

    def _enlarge(self) -> None:
        """What had the focus may be gone from the screen, and the keys of the pane with it."""
        self.cockpit.show_newest(self)
        self.first_focus().focus()

    class OtherRead(Message):
        """The run whose curves are to be laid over was read, or could not be."""

        def __init__(self, state: RunState | None, trouble: str) -> None:
            super().__init__()
            self.state, self.trouble = state, trouble

    def action_compare(self) -> None:
        from ftdash.tui.panes.runs import RunsScreen

        if self._other is not None:
            self._other = None
            self.cockpit.show_newest(self)
        elif self._run:
            self.app.push_screen(RunsScreen(self.cockpit.runs_root, self._lay_over))

    def _lay_over(self, run: RunDir) -> None:
        """Read the other run whole, in a thread: a long one takes seconds."""
        from ftdash.monitor.reader import RunReader
        from ftdash.monitor.rundir import RunError

        def read() -> None:
            try:
                self.post_message(self.OtherRead(RunReader(run).read_whole(), ""))
            except (RunError, OSError) as error:
                self.post_message(self.OtherRead(None, " ".join(str(error).split())))

        threading.Thread(target=read, name="other-run", daemon=True).start()

    def on_monitor_pane_other_read(self, event: OtherRead) -> None:
        if event.state is None:
            self.cockpit.notice(event.trouble)
            return
        self._other = event.state
        self.cockpit.show_newest(self)

    def _replay(self) -> ReplayFeed | None:
        from ftdash.tui.replaying import ReplayFeed

        feed = self.cockpit.feed
        return feed if isinstance(feed, ReplayFeed) else None

    def action_replay(self) -> None:
        if (feed := self.cockpit.feed) is not None:
            self.cockpit.follow(feed.run, again=self._replay() is None)

    def action_pause(self) -> None:
        if (replay := self._replay()) is not None:
            replay.pause()

    def action_seek(self, share: float) -> None:
        if (replay := self._replay()) is not None:
            replay.move(share)

    def action_hurry(self, factor: float) -> None:
        if (replay := self._replay()) is not None:
            replay.hurry(factor)

    def action_dump(self) -> None:
        self._open_rank(dump=True)

    @on(Grid.Selected, "#ranks")
    def _rank_opened(self) -> None:
        self._open_rank(dump=False)

    def _open_rank(self, *, dump: bool) -> None:
        rank = self.query_one(RankTable).selected_rank()
        feed = self.cockpit.feed
        if rank is None or feed is None:
            self.cockpit.notice("no rank under the cursor yet")
            return
        from ftdash.tui.panes.rank import RankScreen

        state = feed.peek()
        attached = state is not None and state.manifest.attached
        self.app.push_screen(RankScreen(feed.run, rank, dump=dump, attached=attached))

    @on(Grid.Selected, "#alerts")
    def _alert_opened(self, event: Grid.Selected) -> None:
        from ftdash.tui.panes.alert import AlertScreen

        self.app.push_screen(AlertScreen(event.item[0]))

    @on(NodeGrid.Chosen)
    def _node_chosen(self, event: NodeGrid.Chosen) -> None:
        table = self.query_one(RankTable)
        table.set_needle("" if table.needle == event.host else event.host)
        table.focus()


def _name(state: RunState) -> str:
    """A run's own name, or the last part of its id, short enough for a title."""
    return (state.manifest.name or state.run)[-16:]
