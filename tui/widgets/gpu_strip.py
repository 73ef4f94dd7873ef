"""The GPU strip: one cell block a GPU, with memory, utilisation, power and heat, node by node."""

from __future__ import annotations

from collections.abc import Sequence

from ftdash.monitor.state import GpuState
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget, Part

NAME, LONG_NAME = 4, 10  # cells of a number, and of one with its host
FIGURES = 16  # cells of utilisation, power and temperature
SHORT_BAR, LONG_BAR = 4, 8
MARK = 12  # "▲ power cap "


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
        """Lines that these GPUs like to have in `width` cells."""
        return -(-len(gpus) // max(1, width // _block_width(gpus)))

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
        if not self.gpus or not height:
            return []
        most = max(1, width // _block_width(self.gpus, least=True))
        comfortable = max(1, width // _block_width(self.gpus))
        per_line = min(max(comfortable, -(-len(self.gpus) // height)), max(most, comfortable))
        room = width // per_line
        several = _of_several_hosts(self.gpus)
        marked = any(gpu.throttle for gpu in self.gpus)
        lines: list[Line] = []
        for start in range(0, len(self.gpus), per_line):
            parts: list[Part] = []
            for gpu in self.gpus[start : start + per_line]:
                parts += self._block(gpu, several, room, MARK if marked else 0)
            lines.append(tuple(parts))
        if len(lines) > height:
            left_out = self.gpus[(height - 1) * per_line :]
            ill = sum(gpu.state != "ok" for gpu in left_out)
            words = f"{theme.GLYPHS.ellipsis} {len(left_out)} more" + (f", {ill} of them ill" if ill else "")
            lines[height - 1 :] = [((words, theme.BAD if ill else theme.DIM),)]
        return lines

    @staticmethod
    def _block(gpu: GpuState, several: bool, room: int, mark_width: int) -> list[Part]:
        number = str(gpu.index) if gpu.mig_index is None else f"{gpu.index}:{gpu.mig_index}"
        name = fmt.fit(number, NAME)
        if several:
            full = f"{fmt.clean(gpu.host).split('.')[0]}/{number}"  # its end tells GPUs apart
            name = fmt.fit(full if len(full) < LONG_NAME else f"…{full[2 - LONG_NAME :]}", LONG_NAME)
        if gpu.state != "ok":
            text = fmt.fit(f"{theme.GLYPHS.no} {gpu.state} {fmt.clean(gpu.error)}", room - len(name) - 1)
            return [(name, theme.BOLD), (text + " ", theme.BAD)]
        share = (
            gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else 0.0
        )
        style = theme.fullness(share)
        util = fmt.UNKNOWN if gpu.util is None else f"{gpu.util}%"
        power = fmt.UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        heat = fmt.UNKNOWN if gpu.temp_c is None else f"{gpu.temp_c}°"
        mark = f"{theme.GLYPHS.tight} {gpu.throttle[0]}" if gpu.throttle else ""
        rest = room - len(name) - FIGURES
        bar = max(SHORT_BAR, min(LONG_BAR, rest - 1 - mark_width))
        return [
            (name, theme.BOLD),
            (fmt.bar(share, bar, theme.GLYPHS.blocks) + " ", style),
            (fmt.fit(util, 5, right=True), theme.TEXT),
            (fmt.fit(power, 6, right=True), theme.TEXT),
            (fmt.fit(heat, 4, right=True) + " ", theme.WARN if (gpu.temp_c or 0) > 84 else theme.DIM),
            (fmt.fit(mark, max(0, rest - 1 - bar)), theme.WARN),
        ]


def _of_several_hosts(gpus: Sequence[GpuState]) -> bool:
    return len({gpu.host for gpu in gpus}) > 1


def _block_width(gpus: Sequence[GpuState], *, least: bool = False) -> int:
    """Cells of one GPU: with all that is said of it, or the least that tells memory, use, power and heat."""
    name = LONG_NAME if _of_several_hosts(gpus) else NAME
    return name + FIGURES + (SHORT_BAR + 1 if least else LONG_BAR - 2 + MARK)
