"""The overview line of a run: state, step, loss, speed, time left, and how it stands to its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.style import Style

from ftdash.monitor.state import RunPhase, RunState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part

PHASE_LOOK: dict[RunPhase, tuple[str, Style]] = {
    RunPhase.STARTING: (theme.GLYPHS.waiting, theme.ACCENT),
    RunPhase.RUNNING: (theme.GLYPHS.live, theme.OK),
    RunPhase.STALLED: (theme.GLYPHS.stalled, theme.BAD),
    RunPhase.FINISHED: (theme.GLYPHS.done, theme.OK),
    RunPhase.FAILED: (theme.GLYPHS.no, theme.BAD),
    RunPhase.STOPPED: (theme.GLYPHS.idle, theme.WARN),
}
LONGEST_NAME = 28


@dataclass(frozen=True, slots=True)
class Promise:
    """What the plan promised, where it did: bytes on a device and reserved by torch, tokens/s of the run."""

    memory: float | None = None
    reserved: float | None = None
    tokens_per_s: float | None = None


def promise(state: RunState) -> Promise:
    """The stored prediction's device bytes and tokens/s over all ranks; empty for a run without a plan."""
    stored = state.manifest.predicted or {}
    per_gpu = _number(stored, "time", "tokens_per_s_per_gpu")
    return Promise(
        memory=_number(stored, "memory", "device"),
        reserved=_number(stored, "memory", "reserved"),
        tokens_per_s=None if per_gpu is None else per_gpu * max(1, state.manifest.world_size),
    )


def _number(stored: dict[str, Any], section: str, key: str) -> float | None:
    part = stored.get(section)
    value = part.get(key) if isinstance(part, dict) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


def mfu_seconds(state: RunState) -> float | None:
    """The plan's FLOP of a step over its GPUs' peak rate: divided by a step's time, its MFU."""
    stored = state.manifest.predicted or {}
    mfu, step_s = _number(stored, "time", "mfu"), _number(stored, "time", "step_s")
    return mfu * step_s if mfu and step_s and on_gpu(state) else None


def on_gpu(state: RunState) -> bool:
    """False for a run on the CPU, where a prediction for GPUs promises nothing, and before it is known."""
    return any(rank.gpu is not None or rank.device.startswith("cuda") for rank in state.ranks)


def whole_words(parts: Sequence[Part], width: int) -> list[Part]:
    """The parts from the left that fit whole; what is left out takes the label before it along."""
    kept = list(parts)
    while kept and sum(cell_len(text) for text, _ in kept) > width:
        kept.pop()
        while kept and kept[-1][0].endswith(" "):
            kept.pop()
    return kept


class Overview(LineWidget):
    """Two lines at most: what runs, and what a step is made of."""

    def __init__(self) -> None:
        super().__init__(id="overview")
        self.state: RunState | None = None
        self.trouble = ""
        self.replay = ""

    def show(self, state: RunState | None, trouble: str = "", replay: str = "") -> None:
        """A state, or one line of trouble with the run directory; `replay`: where a replay stands."""
        self.state, self.trouble, self.replay = state, trouble, replay
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.trouble:
            return [((f" {theme.GLYPHS.no} ", theme.BAD), (fmt.clean(self.trouble), theme.TEXT))]
        state = self.state
        if state is None:
            return [
                ((f" {theme.GLYPHS.idle} no run is watched", theme.TEXT),),
                (("   2 Launch starts one, R chooses one", theme.DIM),),
            ]
        return [self._first(state, width), self._second(state, width)]

    def _first(self, state: RunState, width: int) -> Line:
        symbol, style = PHASE_LOOK[state.state]
        of = f" of {state.max_steps:,}" if state.max_steps else ""
        losses = [point.loss for point in state.points]
        name = fmt.clean(state.manifest.name or state.run)
        parts: list[Part] = [
            (f" {symbol} {state.state.value}  ", style),
            (fmt.fit(name, min(LONGEST_NAME, cell_len(name))), theme.BOLD),
            ("  step ", theme.DIM),
            (f"{state.step:,}{of}", theme.TEXT),
            ("  loss ", theme.DIM),
            (fmt.loss(state.loss), theme.TEXT),
        ]
        if width >= 100:
            parts.append((" " + fmt.spark(losses, 8, theme.GLYPHS.levels), theme.ACCENT))
        stalled = state.state is RunPhase.STALLED
        if state.tokens_per_s is not None and not stalled:
            parts += [("  ", theme.DIM), (f"{fmt.rate(state.tokens_per_s)} tokens/s", theme.TEXT)]
        if stalled:
            parts += [("  4", theme.ACCENT), (" says who holds it up", theme.BAD)]
        elif state.eta_s is not None and state.state is RunPhase.RUNNING:
            parts += [("  eta ", theme.DIM), (fmt.duration(state.eta_s), theme.TEXT)]
        elif state.manifest.ended and state.manifest.started:
            parts += [
                ("  took ", theme.DIM),
                (fmt.duration(state.manifest.ended - state.manifest.started), theme.TEXT),
            ]
        parts = whole_words(parts, width)
        if state.manifest.reason and state.state in (RunPhase.FAILED, RunPhase.STOPPED):
            room = width - sum(cell_len(text) for text, _ in parts)
            parts.append((fmt.fit(f"  {fmt.clean(state.manifest.reason)}", max(0, room)), style))
        return tuple(parts)

    def _second(self, state: RunState, width: int) -> Line:
        parts: list[Part] = [("   ", theme.DIM)]
        if self.replay:
            parts.append((f"{self.replay}   ", theme.ACCENT_BOLD))
        if state.batch:
            parts += [("a step ", theme.DIM), (fmt.plural(state.batch, "sequence"), theme.TEXT)]
        if state.tokens_per_step:
            parts += [("  ", theme.DIM), (f"= {fmt.number(state.tokens_per_step)} loss tokens", theme.TEXT)]
        parts += self._against_plan(state)
        plan = state.manifest.plan or {}
        strategy, method = plan.get("strategy"), plan.get("method")
        if isinstance(strategy, str):
            words = f"{strategy} {theme.GLYPHS.times} {state.manifest.world_size}  {method or ''}"
            parts += [("  ", theme.DIM), (fmt.clean(words), theme.DIM)]
        return tuple(whole_words(parts, width))

    @staticmethod
    def _against_plan(state: RunState) -> list[Part]:
        said = promise(state)
        if said == Promise():
            return []
        if not on_gpu(state):
            cpu = any(rank.device.startswith("cpu") for rank in state.ranks)
            return [("  on CPU, the plan is for GPUs", theme.DIM)] if cpu else []
        parts: list[Part] = []
        memory = max((rank.memory_used or 0 for rank in state.ranks), default=0)
        for word, measured, planned, worse_above in (
            ("memory", memory, said.memory, True),
            ("speed", state.tokens_per_s, said.tokens_per_s, False),
        ):
            if not measured or not planned:
                continue
            share = measured / planned - 1
            missed = share > 0.1 if worse_above else share < -0.1
            mark = f" {theme.GLYPHS.tight}" if missed else ""
            parts += [
                (f"  {word} ", theme.DIM),
                (fmt.signed_percent(share) + mark, theme.WARN if missed else theme.OK),
            ]
        useful_s, step_s = mfu_seconds(state), state.measured.get("step_s")
        if useful_s and step_s:
            parts += [("  MFU ", theme.DIM), (fmt.percent(useful_s / step_s), theme.TEXT)]
        return [("  plan:", theme.DIM), *parts] if parts else []
