"""Does it fit? The stacked memory bar of the worst phase against the capacity line, and every phase small."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.style import Style

from ftdash.engine.planner.result import PhaseName, Prediction, Verdict
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part

VERDICT_LOOK: dict[Verdict, tuple[str, str, Style]] = {
    Verdict.FITS: (theme.GLYPHS.fits, "fits", theme.OK),
    Verdict.TIGHT: (theme.GLYPHS.tight, "tight", theme.WARN),
    Verdict.DOES_NOT_FIT: (theme.GLYPHS.no, "no", theme.BAD),
}
PHASE_WORDS = {
    PhaseName.LOAD: "load",
    PhaseName.FORWARD_END: "forward",
    PhaseName.BACKWARD_START: "backward",
    PhaseName.BACKWARD_END: "bwd end",
    PhaseName.OPTIMIZER_STEP: "step",
    PhaseName.SAVE: "save",
}
PHASE_AT = {
    PhaseName.LOAD: "while loading",
    PhaseName.FORWARD_END: "at the end of forward",
    PhaseName.BACKWARD_START: "at the start of backward",
    PhaseName.BACKWARD_END: "at the end of backward",
    PhaseName.OPTIMIZER_STEP: "in the optimizer step",
    PhaseName.SAVE: "while saving",
}
CACHED = "cached"  # by the allocator for other moments and streams
CONTEXT = "context"  # CUDA, its libraries and NCCL

Share = tuple[str, float]


def shares(prediction: Prediction) -> list[Share]:
    """The peak's terms that are not zero, in the planner's order, and what else the device holds then."""
    memory = prediction.memory
    terms = [(term.value, float(size)) for term, size in memory.peak.terms() if size > 0]
    cached = memory.reserved - sum(size for _, size in terms)
    others = [(CACHED, float(cached)), (CONTEXT, float(memory.context))]
    return [*terms, *(share for share in others if share[1] > 0)]


def stacked(parts: Sequence[Share], limit: float, width: int) -> Line:
    """One bar of `width` cells: shaded parts, then the capacity line at its place. Sizes in one unit."""
    total = sum(size for _, size in parts)
    full = max(total, limit * 1.06, 1e-9)
    mark = min(width - 1, round(limit / full * width))
    cells: list[Part] = []
    position = 0.0
    for index, (_, size) in enumerate(parts):
        left, position = round(position / full * width), position + size
        right = round(position / full * width)
        shade = theme.GLYPHS.shades[index % len(theme.GLYPHS.shades)]
        style = theme.TERM_STYLES[index % len(theme.TERM_STYLES)]
        cells += [(shade, style)] * (right - left)
    cells += [(" ", theme.DIM)] * (width - len(cells))
    over = total > limit
    cells[mark] = (theme.GLYPHS.limit, theme.BAD if over else theme.BOLD)
    return tuple(cells)


def axis(parts: Sequence[Share], limit: float, width: int) -> str:
    """Round GB figures over the bar of `stacked`, each at its place."""
    full = max(sum(size for _, size in parts), limit * 1.06, 1e-9) / fmt.GB
    raw = full / 5
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw)
    text = "0"
    mark = step
    while mark < full:
        label = f"{mark:g}"
        at = round(mark / full * width) - len(label) // 2
        if at <= len(text) or at + len(label) + 3 > width:
            break
        text = text.ljust(at) + label
        mark += step
    return f"{text} GB"


def answer(prediction: Prediction) -> tuple[str, Style]:
    """The answer in words: verdict, size, where it peaks."""
    symbol, word, style = VERDICT_LOOK[prediction.verdict]
    memory = prediction.memory
    sizes = f"{fmt.gb(memory.device)} of {fmt.gb(memory.capacity)} GB"
    return f"{symbol} {word}: {sizes} {PHASE_AT[memory.peak_phase]}", style


class StackedBar(LineWidget):
    """The answer, the bar, its legend, each phase, and the host's RAM."""

    HELP = "The bar is what one GPU holds at its worst moment; the line is the GPU's memory."

    def __init__(self) -> None:
        super().__init__(id="fit", classes="framed")
        self.border_title = "Does it fit?"
        self.prediction: Prediction | None = None
        self.trouble = ""

    def show(self, prediction: Prediction | None, trouble: str = "") -> None:
        """A prediction, or the line that says why this combination cannot be."""
        self.prediction, self.trouble = prediction, trouble
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.trouble:
            words = fmt.clean(self.trouble)
            lines: list[Line] = [((f"{theme.GLYPHS.no} ", theme.BAD), (words[: width - 2], theme.BAD))]
            rest = words[width - 2 :]
            return [*lines, ((f"  {rest}", theme.BAD),)] if rest else lines
        if self.prediction is None:
            return []
        prediction = self.prediction
        text, style = answer(prediction)
        parts = shares(prediction)
        bar = stacked(parts, prediction.memory.capacity, width)
        lines = [((text, style + Style(bold=True)),)]
        if height > 7:
            lines.append(((axis(parts, prediction.memory.capacity, width), theme.DIM),))
        lines.append(bar)
        lines += self._legend(parts, width)
        lines += self._phases(prediction, width)
        host = prediction.memory.host_ram_per_node
        imbalance = prediction.memory.imbalance
        extra = f"   hottest expert rank up to +{fmt.gb(imbalance)} GB ~" if imbalance else ""
        full = prediction.memory.host.saving_full
        saving = f", {fmt.gb(full)} saving a full state dict" if full > host else ""
        lines.append(((f"host RAM per node {fmt.gb(host)} GB{saving}{extra}", theme.DIM),))
        return lines

    @staticmethod
    def _legend(parts: Sequence[Share], width: int) -> list[Line]:
        lines: list[list[Part]] = [[]]
        used = 0
        for index, (name, size) in enumerate(parts):
            text = f" {name} {fmt.gb(size)}  "
            if used + len(text) + 1 > width and lines[-1]:
                lines.append([])
                used = 0
            shade = theme.GLYPHS.shades[index % len(theme.GLYPHS.shades)]
            lines[-1] += [(shade, theme.TERM_STYLES[index % len(theme.TERM_STYLES)]), (text, theme.TEXT)]
            used += len(text) + 1
        return [tuple(line) for line in lines]

    @staticmethod
    def _phases(prediction: Prediction, width: int) -> list[Line]:
        capacity = prediction.memory.capacity or 1
        lines: list[list[Part]] = [[]]
        used = 0
        for phase in prediction.memory.phases:
            worst = phase.name is prediction.memory.peak_phase
            name, value = PHASE_WORDS[phase.name], fmt.gb(phase.total)
            level = theme.GLYPHS.levels[max(1, min(8, round(phase.total / capacity * 8)))]
            length = len(name) + len(value) + 5
            if used + length - 2 > width and lines[-1]:
                lines.append([])
                used = 0
            lines[-1] += [
                (f"{name} ", theme.BOLD if worst else theme.DIM),
                (level, theme.WARN if worst else theme.ACCENT),
                (f" {value}  ", theme.BOLD if worst else theme.DIM),
            ]
            used += length
        return [tuple(line) for line in lines]
