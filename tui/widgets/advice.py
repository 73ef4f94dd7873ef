"""Advice on a plan: remedies with what they save, wrapped to the width; enter applies one."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Sequence

from ftdash.engine.planner.result import Advice
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

SAVES_WIDTH, SPEED_WIDTH = 9, 10
AdviceRow = tuple[Advice, int, str]  # the advice, which of its lines this is, and the line's text


class AdviceList(Grid):
    """Each advice was planned again with its remedy; what no input stands for is dim."""

    HELP = "Each remedy was planned again: GB saved, speed kept.\nenter  applies the one under the cursor"
    HINTS = "↑↓ advice  enter apply"
    HEADER = False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.advice: tuple[Advice, ...] = ()
        self.border_title = "Advice"

    def show(self, advice: Sequence[Advice]) -> None:
        self.advice = tuple(advice)
        self.border_title = (
            f"Advice {len(advice)}" if advice else f"Advice {theme.GLYPHS.fits} nothing to say"
        )
        room = max(16, self.size.width - sum(self._figure_widths()) - 5)
        rows: list[AdviceRow] = []
        for one in self.advice:
            lines = textwrap.wrap(fmt.clean(one.text), room) or [""]
            rows += [(one, number, line) for number, line in enumerate(lines)]
        self.set_items(rows)

    def _figure_widths(self) -> tuple[int, int]:
        """Widths of what is saved and of the speed: nothing where no advice has the figure."""
        saves = any(one.saves_bytes > 0 for one in self.advice)
        speed = any(abs(one.speed - 1) >= 0.01 for one in self.advice)
        return SAVES_WIDTH * saves, SPEED_WIDTH * speed

    def columns(self) -> Sequence[Column]:
        saves, speed = self._figure_widths()
        return [
            Column("mark", "", 1),
            Column("text", "", 16, grow=True),
            Column("saves", "", saves, right=True),
            Column("speed", "", speed, right=True),
        ]

    def identity(self, item: AdviceRow) -> Hashable:
        return item[0].code, item[1]

    def cells(self, item: AdviceRow, columns: Sequence[Column]) -> Line:
        advice, number, text = item
        style = theme.TEXT if advice.plan is not None else theme.DIM
        if number:
            return (("", style), (text, style), ("", style), ("", style))
        mark = theme.GLYPHS.arrow[-1] if advice.plan is not None else theme.GLYPHS.dot
        saves = f"{theme.GLYPHS.minus}{fmt.gb(advice.saves_bytes)} GB" if advice.saves_bytes > 0 else ""
        share = advice.speed - 1
        speed = f"{fmt.signed_percent(share)} speed"[:SPEED_WIDTH] if abs(share) >= 0.01 else ""
        return (
            (mark, theme.ACCENT if advice.plan is not None else theme.DIM),
            (text, style),
            (saves, theme.OK),
            (speed, theme.OK if share >= 0 else theme.WARN),
        )

    def on_resize(self) -> None:
        super().on_resize()
        self.show(self.advice)
