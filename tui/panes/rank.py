"""One rank, close up: its figures, and the stacks that it was caught in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size

from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RankState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.dumps import DumpWatch, StackAnswer
from ftdash.tui.panes.overlay import Overlay
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.stack import StackView

if TYPE_CHECKING:
    from ftdash.tui.cockpit import Cockpit


ROOMY = 100  # columns from which the figures stand in two columns


def _known(words: Iterable[str]) -> str:
    """What is known, in one line."""
    return " · ".join(words) or fmt.UNKNOWN


def _cell(name: str, text: str, width: int) -> Line:
    """A figure and its name in `width` cells."""
    return (fmt.fit(name, 11), theme.DIM), (fmt.fit(text, max(1, width - 12)) + " ", theme.TEXT)


class RankFigures(LineWidget):
    """What is known of one rank, in two columns."""

    def __init__(self, rank: RankState, *, logged: bool = False) -> None:
        """`logged`: no hook is in the rank, what torch holds is what its log printed last."""
        super().__init__(id="rank-figures")
        self.rank = rank
        self.logged = logged

    def show(self, rank: RankState) -> None:
        self.rank = rank
        self.redraw()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.draw(width, 0))

    def draw(self, width: int, height: int) -> list[Line]:
        rank = self.rank
        times = {
            "data": rank.data_s,
            "forward": rank.forward_s,
            "backward": rank.backward_s,
            "optimizer": rank.optimizer_s,
        }
        split = _known(f"{name} {fmt.seconds(value)}" for name, value in times.items() if value)
        torch = {"allocated": rank.allocated, "reserved": rank.reserved, "peak": rank.peak}
        numbers = {"": rank.loss, "aux ": rank.aux_loss, "grad norm ": rank.grad_norm}
        cpu = fmt.UNKNOWN if rank.cpu is None else f"{rank.cpu:.0f}%"
        process = f"cpu {cpu} · state {fmt.clean(rank.process_state) or fmt.UNKNOWN}"
        pairs = [
            ("state", f"{rank.state.value}{' · ' + fmt.clean(rank.phase) if rank.phase else ''}"),
            ("where", f"{fmt.clean(rank.host)} · pid {rank.pid} · {fmt.clean(rank.device)}"),
            ("step", f"{rank.step:,} · epoch {rank.epoch:.2f}"),
            (
                "loss",
                _known(f"{name}{fmt.loss(value)}" for name, value in numbers.items() if value is not None),
            ),
            ("speed", f"{fmt.rate(rank.tokens_per_s)} tokens/s · step {fmt.seconds(rank.step_s)}"),
            ("memory", f"{fmt.size(rank.memory_used)} of {fmt.size(rank.memory_total)}"),
            (
                "log says" if self.logged and rank.reserved else "torch",
                _known(f"{name} {fmt.size(value)}" for name, value in torch.items() if value is not None),
            ),
            ("gpu", _gpu_words(rank)),
            ("process", f"{process} · last sign {fmt.duration(rank.heartbeat_age_s)} ago"),
        ]
        half = width // 2 if width >= ROOMY else width
        cells = [_cell(name, text, half) for name, text in pairs]
        times_line = _cell("step time", split, width)
        if half == width:
            return [*cells, times_line]
        middle = -(-len(cells) // 2)
        return [
            *(
                cells[index] + (cells[index + middle] if index + middle < len(cells) else ())
                for index in range(middle)
            ),
            times_line,
        ]


def _gpu_words(rank: RankState) -> str:
    """The GPU that the rank is joined to, and why that is not certain where it is not."""
    gpu = rank.gpu
    if gpu is None:
        return fmt.UNKNOWN
    words = [f"{gpu.index} {fmt.clean(gpu.name)}".strip(), fmt.clean(gpu.uuid)]
    if gpu.state != "ok":
        words.append(f"{gpu.state} {fmt.clean(gpu.error)}".strip())
    words += [fmt.clean(rank.gpu_unsure), *map(fmt.clean, gpu.throttle)]
    return " · ".join(word for word in words if word)


class RankScreen(Overlay[None]):
    """Drill-down of one rank; `d` dumps its stacks again."""

    HELP = (
        "d  dumps the stacks of this rank\n"
        "n  the same with native frames; pauses it for half a second\n"
        "t  shows all threads, or the main one"
    )

    BINDINGS: ClassVar = [
        Binding("escape,q,enter", "close", "Back", show=False),
        Binding("d,D", "dump(False)", "Dump", show=False),
        Binding("n", "dump(True)", "Native", show=False),
        Binding("t", "threads", "All threads", show=False),
    ]

    def __init__(self, run: RunDir, rank: RankState, *, dump: bool, attached: bool = False) -> None:
        super().__init__()
        self._attached = attached
        self._run = run
        self.rank = rank
        self._dump_first = dump
        self._watch: DumpWatch | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="rank-screen") as box:
            box.border_title = Content(f"rank {self.rank.rank} on {fmt.clean(self.rank.host) or '?'}")
            box.border_subtitle = "d dump stacks  n native  t all threads  esc back"
            yield RankFigures(self.rank, logged=self._attached)
            yield StackView(id="rank-stack")

    def on_mount(self) -> None:
        stack = self.query_one(StackView)
        stack.focus()
        if self._dump_first:
            self.action_dump(False)
        else:
            stack.say("d dumps the stacks of this rank")
        self.set_interval(1.0, self._refresh_figures)

    def on_unmount(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _refresh_figures(self) -> None:
        feed = cast("Cockpit", self.app).feed
        state = feed.peek() if feed is not None else None
        if state is not None:
            for rank in state.ranks:
                if rank.rank == self.rank.rank:
                    self.rank = rank
                    self.query_one(RankFigures).show(rank)

    def action_dump(self, native: bool) -> None:
        if self._watch is not None:
            self._watch.close()
        self.query_one(StackView).say(
            f"asking the agent of {fmt.clean(self.rank.host) or 'the node'} for the stacks…"
        )
        self._watch = DumpWatch(self._run, (self.rank.rank,), native=native, deliver=self.post_message)
        self._watch.start()

    def on_stack_answer(self, event: StackAnswer) -> None:
        stack = self.query_one(StackView)
        if event.trouble:
            stack.say(event.trouble)
        for evidence in event.evidence:
            stack.show(evidence)

    def action_threads(self) -> None:
        self.query_one(StackView).action_threads()

    def action_close(self) -> None:
        self.dismiss(None)
