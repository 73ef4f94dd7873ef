"""How the run stands: since when nothing moved, when its collectives time out, how much evidence there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget
from ftdash.tui.widgets.overview import PHASE_LOOK

if TYPE_CHECKING:
    from ftdash.tui.examine import Look


class StallLine(LineWidget):
    """One line. The time left is drawn only while the run still waits in that collective."""

    def __init__(self) -> None:
        super().__init__(id="stall-line")
        self.state: RunState | None = None
        self.look: Look | None = None
        self.now = 0.0

    def show(self, state: RunState | None, look: Look | None, now: float) -> None:
        """`now` is UTC seconds."""
        self.state, self.look, self.now = state, look, now
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        state = self.state
        if state is None:
            return [((" no run is watched: R chooses one", theme.DIM),)]
        symbol, style = PHASE_LOOK[state.state]
        words = f" {symbol} {state.state.value} "
        ages = [rank.heartbeat_age_s for rank in state.ranks if rank.heartbeat_age_s is not None]
        stalled = state.state is RunPhase.STALLED
        since = f"for {fmt.duration(max(ages))} " if ages and stalled else ""
        parts = [(words, style), (f"{since}at step {state.step:,}", theme.TEXT)]
        if stalled and (left := self._time_left()):
            parts.append((f"  {left}", theme.WARN))
        used = sum(cell_len(text) for text, _ in parts)
        wordings = self._evidence()
        evidence = next((text for text in wordings if used + cell_len(text) + 4 <= width), wordings[-1])
        name = f"  {fmt.clean(state.manifest.name or state.run)}"
        if used + cell_len(name) + cell_len(evidence) + 3 <= width:
            parts.append((name, theme.DIM))
            used += cell_len(name)
        parts.append(("  " + fmt.fit(evidence, max(0, width - used - 3), right=True), theme.DIM))
        return [tuple(parts)]

    def _time_left(self) -> str:
        if self.look is None or not self.look.ends:
            return ""
        left_s = self.look.ends - self.now
        sign = "~" if self.look.ends_source.startswith("assumed") else ""
        if left_s <= 0:
            return f"{sign}its collective's time is over"
        return f"collective times out in {sign}{fmt.duration(left_s)}"

    def _evidence(self) -> tuple[str, ...]:
        """How much was seen, in ever fewer words."""
        if self.look is None or not self.look.samples or self.state is None:
            return ("",)
        samples, world = self.look.samples, self.state.manifest.world_size
        seen = sum(bool(one.threads) for one in samples[-1].ranks)
        full = f"evidence {seen:,} of {world:,} ranks, {fmt.plural(len(samples), 'sample')}"
        return full, f"{seen:,} of {world:,} ranks", f"{seen:,}/{world:,}"
