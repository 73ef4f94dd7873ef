"""Is it fast? Compute against what each link carries, as planned and on PCIe alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

from ftdash.engine.hardware import Gpu
from ftdash.engine.planner.result import Prediction
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget

LINK_WORDS = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}


@dataclass(frozen=True, slots=True)
class SpeedBar:
    """One line: what takes how long in a step, and what of it the step waits for."""

    name: str
    seconds: float
    note: str
    style: Style


def link_word(link: str) -> str:
    """nvlink, pcie4 and the like, as people write them."""
    return next((word for start, word in LINK_WORDS.items() if link.startswith(start)), link)


def speed_bars(prediction: Prediction, gpu: Gpu | None) -> list[SpeedBar]:
    """Compute, each link's traffic, and the traffic inside a node if it had to cross PCIe."""
    bars = [SpeedBar("compute", prediction.time.compute_s, "", theme.OK)]
    links = list(dict.fromkeys(collective.link for collective in prediction.traffic.collectives))
    for link in links:
        members = [one for one in prediction.traffic.collectives if one.link == link]
        time_s, exposed = sum(one.time_s for one in members), sum(one.exposed_s for one in members)
        note = f"+{fmt.seconds(exposed)} exposed" if exposed > 0.001 * max(time_s, 1e-9) else "hidden"
        bars.append(SpeedBar(f"{link_word(link)} traffic", time_s, note, theme.ACCENT))
    if gpu is not None and (
        inside := sum(prediction.traffic.link_bytes(link) for link in links if link == "nvlink")
    ):
        on_pcie = inside / gpu.pcie_bytes_per_s
        exposed = max(0.0, on_pcie - prediction.time.compute_s)
        note = f"+{fmt.seconds(exposed)} exposed ~" if exposed > 0 else "hidden ~"
        bars.append(SpeedBar("if on PCIe", on_pcie, note, theme.WARN))
    return bars


def speed_words(prediction: Prediction) -> str:
    """The answer in one line."""
    time = prediction.time
    bound = {"compute": "compute-bound", "memory": "memory-bound"}.get(
        time.bound_by, f"bound by {link_word(time.bound_by)}"
    )
    return f"{bound}: {fmt.rate(time.tokens_per_s_per_gpu)} tokens/s per GPU ~"


class SpeedPanel(LineWidget):
    """Bars on one time scale."""

    HELP = "All bars share one scale. Traffic under the compute bar is hidden, beyond it the step waits."

    def __init__(self) -> None:
        super().__init__(id="fast", classes="framed")
        self.border_title = "Is it fast?"
        self.prediction: Prediction | None = None
        self.gpu: Gpu | None = None
        self.price = 0.0

    def show(self, prediction: Prediction | None, gpu: Gpu | None, price: float = 0.0) -> None:
        """`price` is of one GPU-hour, 0 where it is not known."""
        self.prediction, self.gpu, self.price = prediction, gpu, price
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        prediction = self.prediction
        if prediction is None:
            return [(("no answer for this combination", theme.DIM),)]
        time = prediction.time
        lines: list[Line] = [((speed_words(prediction), theme.BOLD),)]
        bars = speed_bars(prediction, self.gpu)
        lines += self._bars(bars, width)
        words = f"step {fmt.seconds(time.step_s)} · MFU {fmt.percent(time.mfu)}"
        if time.bubble > 0.005:
            words += f" · bubble {fmt.percent(time.bubble)}"
        if prediction.plan.mean_len is not None:
            words += f" · data {fmt.percent(time.useful_share)} of tokens ~"
        per_billion = time.gpu_hours(1e9) if time.tokens_per_s_per_gpu else None
        hours = f"{fmt.number(per_billion)} GPU-hours"
        if self.price and per_billion is not None:
            words += f" · {per_billion * self.price:,.0f} per 1 B tokens, {hours}"
        else:
            words += f" · {hours} per 1 B tokens"
        lines.append(((words, theme.DIM),))
        return lines

    @staticmethod
    def _bars(bars: Sequence[SpeedBar], width: int) -> list[Line]:
        longest = max((bar.seconds for bar in bars), default=0.0) or 1.0
        room = max(6, width - 16 - 8 - 20)
        lines: list[Line] = []
        for bar in bars:
            filled = fmt.bar(bar.seconds / longest, room, theme.GLYPHS.blocks)
            lines.append(
                (
                    (fmt.fit(bar.name, 15), theme.DIM),
                    (filled, bar.style),
                    (fmt.fit(fmt.seconds(bar.seconds), 8, right=True), theme.TEXT),
                    (f"  {bar.note}", theme.WARN if "exposed" in bar.note else theme.DIM),
                )
            )
        return lines
