"""What is painted again: only the lines that changed, only the widgets that they are in."""

from __future__ import annotations

import time

import pytest
from textual.app import App, ComposeResult
from textual.geometry import Size
from textual.pilot import Pilot

from ftdash.tui.format import rate
from ftdash.tui.widgets import chart as charts
from ftdash.tui.widgets.chart import BrailleChart
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

    def render_line(y: int):  # type: ignore[no-untyped-def]
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
