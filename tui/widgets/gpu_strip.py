"""The GPU strip: one cell block a GPU, with memory, utilisation, power and heat, node by node."""

from __future__ import annotations

from collections.abc import Sequence

from ftdash.monitor.state import GpuState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part

BLOCK = 40


class GpuStrip(LineWidget):
    """Each GPU: index, memory bar, utilisation, power against its limit, temperature, what throttles it."""

    HELP = (
        "One block a GPU: memory, utilisation, power, temperature; a lost GPU or a throttle reason is named."
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.gpus: tuple[GpuState, ...] = ()
        self.border_title = "GPUs"

    @staticmethod
    def lines_for(gpus: Sequence[GpuState], width: int) -> int:
        """Lines that these GPUs need in `width` cells."""
        return -(-len(gpus) // max(1, (width - 2) // BLOCK))

    def show(self, gpus: tuple[GpuState, ...]) -> None:
        if gpus == self.gpus:
            return
        self.gpus = gpus
        ill = sum(1 for gpu in gpus if gpu.state != "ok")
        names = sorted({fmt.clean(gpu.name) for gpu in gpus if gpu.name})
        title = f"GPUs {len(gpus)}  {', '.join(names)}" + (f"  {theme.GLYPHS.no} {ill} ill" if ill else "")
        self.retitle(title)
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        per_line = max(1, width // BLOCK)
        several = len({gpu.host for gpu in self.gpus}) > 1
        lines: list[Line] = []
        for start in range(0, len(self.gpus), per_line):
            parts: list[Part] = []
            for gpu in self.gpus[start : start + per_line]:
                parts += self._block(gpu, several)
            lines.append(tuple(parts))
        return lines

    @staticmethod
    def _block(gpu: GpuState, several: bool) -> list[Part]:
        name = fmt.fit(str(gpu.index), 3)
        if several:
            full = f"{fmt.clean(gpu.host).split('.')[0]}/{gpu.index}"  # its end tells GPUs apart
            name = fmt.fit(full if len(full) <= 9 else f"…{full[-8:]}", 10)
        if gpu.state != "ok":
            text = fmt.fit(f"{theme.GLYPHS.no} {gpu.state} {fmt.clean(gpu.error)}", BLOCK - len(name) - 1)
            return [(name, theme.BOLD), (text + " ", theme.BAD)]
        share = (
            gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else 0.0
        )
        style = theme.fullness(share)
        util = fmt.UNKNOWN if gpu.util is None else f"{gpu.util}%"
        power = fmt.UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        heat = fmt.UNKNOWN if gpu.temp_c is None else f"{gpu.temp_c}°"
        mark = f"{theme.GLYPHS.tight} {gpu.throttle[0]}" if gpu.throttle else ""
        rest = BLOCK - len(name) - 8 - 1 - 5 - 6 - 5
        return [
            (name, theme.BOLD),
            (fmt.bar(share, 8, theme.GLYPHS.blocks) + " ", style),
            (fmt.fit(util, 5, right=True), theme.TEXT),
            (fmt.fit(power, 6, right=True), theme.TEXT),
            (fmt.fit(heat, 4, right=True) + " ", theme.WARN if (gpu.temp_c or 0) > 84 else theme.DIM),
            (fmt.fit(mark, rest), theme.WARN),
        ]
