"""The simulation beside the closed form: the real model class under fake tensors, in a process of its own."""

from __future__ import annotations

import threading
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static

from ftdash.engine.planner.result import Prediction
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.panes.overlay import Overlay


class SimulationScreen(Overlay[None]):
    """Progress in words, then the two answers and their difference."""

    HELP = "Runs one training step of the real model class without a GPU; takes seconds."
    BINDINGS: ClassVar = [Binding("escape,q", "close", "Back", show=False)]

    class Told(Message):
        """A line of progress, or the end."""

        def __init__(self, text: Text, *, done: bool) -> None:
            super().__init__()
            self.text, self.done = text, done

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        self._prediction = prediction

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="config-box") as box:
            box.border_title = "Simulating one step of one rank…"
            box.border_subtitle = "esc back"
            yield Static(id="simulation-text")

    def on_mount(self) -> None:
        threading.Thread(target=self._simulate, name="simulation", daemon=True).start()

    def _simulate(self) -> None:
        from ftdash.engine.simulate.run import simulate
        from ftdash.engine.simulate.terms import side_by_side

        def progress(words: str) -> None:
            self.post_message(self.Told(Text(fmt.clean(words), theme.DIM), done=False))

        try:
            found = simulate(self._prediction.plan, progress)
        except Exception as error:  # what cannot be simulated, a missing library, a fault: one line
            words = fmt.clean(str(error) or type(error).__name__)
            self.post_message(self.Told(Text(f"{theme.GLYPHS.no} {words}", theme.BAD), done=True))
            return
        closed = self._prediction.memory.allocated
        text = Text()
        text.append(
            f"simulated     {fmt.size(found.allocated):>10}   peak in {found.peak_part}\n", theme.BOLD
        )
        share = fmt.signed_percent(closed / found.allocated - 1)
        text.append(f"closed form ~ {fmt.size(closed):>10}   {share}\n\n", theme.TEXT)
        text.append(f"  {'':<22}{'simulated':>11}{'closed form':>13}{'GB off':>9}\n", theme.DIM)
        for pair in side_by_side(found.breakdown, self._prediction.memory.peak):
            off = (pair.planned - pair.simulated) / 1e9
            sizes = f"{fmt.size(pair.simulated):>11}{fmt.size(pair.planned):>13}{off:>+9.2f}"
            text.append(f"  {pair.name:<22}{sizes}\n", theme.TEXT)
        depths = " and ".join(map(str, found.simulated_layers))
        text.append(
            f"\n{found.seconds:.0f} s; {depths} layers run; no CUDA context, no fragmentation", theme.DIM
        )
        self.post_message(self.Told(text, done=True))

    def on_simulation_screen_told(self, event: Told) -> None:
        self.query_one("#simulation-text", Static).update(event.text)
        if event.done:
            self.query_one("#config-box").border_title = "Simulation"

    def action_close(self) -> None:
        self.dismiss(None)
