"""What is painted again: only the lines that changed, only the widgets that they are in."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from textual.app import App, ComposeResult
from textual.geometry import Size
from textual.pilot import Pilot
from textual.strip import Strip

from ftdash.monitor.state import RunState
from ftdash.tui.format import rate
from ftdash.tui.widgets import chart as charts
from ftdash.tui.widgets.chart import BrailleChart
from ftdash.tui.widgets.rank_rows import RankRow
from ftdash.tui.widgets.rank_table import RankTable
from tests.support import screens
from tests.support.screens import screen_text, until


class TwoCharts(App[None]):
    CSS = "BrailleChart { height: 10; border: round white; } #other { display: none; }"

    def compose(self) -> ComposeResult:
        yield BrailleChart("Speed", rate, id="speed")
        yield BrailleChart("Other", rate, id="other")
        yield BrailleChart("Loss", rate, id="loss")


def drawn_lines(app: App[None], chart: str, pilot: Pilot[None]) -> list[int]:
    """Collects the numbers of the lines that the chart is asked for from now on."""
    widget = app.query_one(f"#{chart}", BrailleChart)
    asked: list[int] = []
    draw_line = widget.render_line

    def render_line(y: int) -> Strip:
        asked.append(y)
        return draw_line(y)

    widget.render_line = render_line  # type: ignore[method-assign]
    return asked


async def test_a_new_title_paints_no_line_of_the_curve_and_no_other_widget() -> None:
    app = TwoCharts()
    async with app.run_test(size=(80, 30)) as pilot:
        speed, loss = app.query_one("#speed", BrailleChart), app.query_one("#loss", BrailleChart)
        speed.show([1.0, 2.0, 3.0], caption="3")
        loss.show([3.0, 2.0, 1.0])
        await pilot.pause()
        asked = [drawn_lines(app, name, pilot) for name in ("speed", "loss")]
        speed.show([1.0, 2.0, 3.0], caption="[bold]4")
        await pilot.pause()
        assert "Speed  [bold]4" in screen_text(app)
        assert asked == [[], []]


async def test_a_curve_that_only_grew_follows_a_moment_later_and_a_leap_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(charts, "GROWN_EVERY_S", 3600.0)
    monkeypatch.setattr(charts, "LATEST_S", 3600.0)
    app = TwoCharts()
    async with app.run_test(size=(80, 30)) as pilot:
        speed = app.query_one("#speed", BrailleChart)
        speed.show([1.0, 2.0], caption="2")
        await pilot.pause()
        at_first = screen_text(app)
        speed.show([1.0, 2.0, 90.0], caption="2")
        await pilot.pause()
        assert screen_text(app) == at_first
        speed.show([float(n) for n in range(50)], caption="2")
        await pilot.pause()
        leapt = screen_text(app)
        assert leapt != at_first
        monkeypatch.setattr(charts, "LATEST_S", time.monotonic() - speed._drawn_at + 0.2)
        speed.show([float(n) for n in range(52)], caption="2")
        await until(pilot, lambda: "51" in screen_text(app))


async def test_a_widget_that_was_hidden_or_resized_is_drawn_as_it_is_now() -> None:
    app = TwoCharts()
    async with app.run_test(size=(80, 30)) as pilot:
        other = app.query_one("#other", BrailleChart)
        other.show([1.0, 2.0])
        other.display = True
        await pilot.pause()
        assert "waiting" not in screen_text(app).split("Other")[1].split("Loss")[0]
        other.display = False
        other.show([5.0, 777.0], caption="now")
        await pilot.pause()
        other.display = True
        await pilot.pause()
        assert "777" in screen_text(app)
        await pilot.resize_terminal(60, 30)
        await pilot.pause()
        assert app.size == Size(60, 30)
        assert all(len(line) == 60 for line in screen_text(app).splitlines())
        assert "777" in screen_text(app)


async def test_in_a_run_that_is_read_in_turns_figures_are_new_at_once_and_comparisons_every_other_time(
    tmp_path: Path,
) -> None:
    state = screens.with_straggler(screens.run_state(1024, moe=False), 333)
    async with screens.cockpit(tmp_path, size=(120, 40), state=state) as (app, pilot):
        pane, table = app.panes["monitor"], app.query_one(RankTable)

        async def seen(rank: int, **figures: object) -> str:
            app.feed.state = replaced(app.feed.state, rank, **figures)  # type: ignore[union-attr]
            app.show_newest(pane)
            await pilot.pause()
            return screen_text(app)

        await seen(333)
        await seen(333)
        assert "4,321" in await seen(333, tokens_per_s=1239.0, step=4321)
        assert "77.7" in await seen(333, memory_used=int(77.7e9))
        assert "88.8" in await seen(333, memory_used=int(88.8e9))
        for _ in range(2):
            await seen(7, step_s=5.0)
        assert [row.state.rank for row in table.items if isinstance(row, RankRow)] == [7, 333]
        app.feed.state = replace(app.feed.state, alerts=())  # type: ignore[union-attr]
        app.show_newest(pane)
        assert not any(row.note for row in table.items if isinstance(row, RankRow))


def replaced(state: RunState, rank: int, **figures: object) -> RunState:
    ranks = list(state.ranks)
    ranks[rank] = structs.replace(ranks[rank], **figures)
    return replace(state, ranks=tuple(ranks))
