"""The expert map, the charts and the stacked bar say what the figures say."""

from __future__ import annotations

import math

import pytest
from textual.app import App, ComposeResult

from ftdash.engine.plan import Checkpointing, Method, Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.monitor.state import ExpertLayer
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets import chart, heatmap
from ftdash.tui.widgets.chart import BrailleChart
from ftdash.tui.widgets.heatmap import ExpertHeatmap
from ftdash.tui.widgets.lines import plain
from ftdash.tui.widgets.speed_panel import speed_bars, speed_words
from ftdash.tui.widgets.stacked_bar import answer, axis, shares, stacked
from ftdash.tui.widgets.strip import table
from tests.support import screens


class Hosted(App[None]):
    def __init__(self, widget: ExpertHeatmap) -> None:
        super().__init__()
        self.widget = widget

    def compose(self) -> ComposeResult:
        yield self.widget


def test_ratios_are_load_over_the_mean() -> None:
    assert heatmap.ratios(ExpertLayer(0, (10, 30, 0, 0))) == [1.0, 3.0, 0.0, 0.0]
    assert heatmap.ratios(ExpertLayer(0, (0, 0))) == [0.0, 0.0]


def test_the_summary_names_the_hottest_and_counts_the_dead() -> None:
    layers = (ExpertLayer(0, (100, 100, 100, 100)), ExpertLayer(7, (0, 50, 50, 300)))
    summary = heatmap.summarise(layers)
    assert (summary.hottest[0].layer, summary.hottest[0].expert, summary.hottest[0].ratio) == (7, 3, 3.0)
    assert (summary.dead, summary.experts) == (1, 8)


def test_a_layer_that_saw_no_token_has_no_dead_experts() -> None:
    assert heatmap.summarise((ExpertLayer(0, (0, 0, 0)),)).dead == 0


def test_the_shade_rises_with_the_load_and_the_dead_are_a_letter() -> None:
    dead, _ = heatmap.shade(0.0)
    heights = [theme.GLYPHS.levels.index(heatmap.shade(ratio)[0]) for ratio in (0.1, 0.5, 1.0, 2.0, 5.0)]
    assert dead not in theme.GLYPHS.levels
    assert heights == sorted(heights)
    assert heights[0] < heights[-1]


def test_pooling_keeps_the_hot_and_the_dead_visible() -> None:
    loads = [1.0] * 64
    loads[17], loads[40] = 6.0, 0.0
    shown = heatmap.pooled(loads, 16)
    assert len(shown) == 16
    assert 6.0 in shown
    assert 0.0 in shown


@pytest.mark.parametrize(("width", "height"), [(78, 8), (110, 30), (140, 94), (20, 3)])
async def test_128_experts_in_94_layers_stay_on_the_screen(width: int, height: int) -> None:
    view = ExpertHeatmap()
    async with Hosted(view).run_test(size=(width + 2, height + 2)):
        view.show(screens.expert_layers(94, 128))
        lines = view.draw(width, height)
        assert len(lines) <= height
        assert all(len(line) <= width for line in plain(lines).splitlines())
        assert theme.HEAT_STYLES[-1] in [style for line in lines for _, style in line]


async def test_zooming_in_shows_one_cell_an_expert_around_the_cursor() -> None:
    view = ExpertHeatmap()
    async with Hosted(view).run_test(size=(60, 20)) as pilot:
        view.show(screens.expert_layers(94, 128))
        view.focus()
        view.action_move(49, 0)
        await pilot.press("z", "down", "end")
        lines = plain(view.draw(56, 18)).splitlines()
        labels = [line.split()[0] for line in lines]
        assert labels[0] == "L41"
        assert "L50 E127" in str(view.border_subtitle)


async def test_top_and_bottom_are_listed_on_demand() -> None:
    view = ExpertHeatmap()
    async with Hosted(view).run_test(size=(80, 20)) as pilot:
        view.show(screens.expert_layers(48, 128))
        view.focus()
        await pilot.press("t")
        text = plain(view.draw(76, 10))
        assert "hottest" in text
        assert "L16/E42" in text


@pytest.mark.parametrize("count", [0, 1, 5, 59, 60, 61, 5000])
def test_a_series_of_any_length_fills_the_columns(count: int) -> None:
    values = [float(n) for n in range(count)]
    found = chart.resample(values, 60)
    assert len(found) == (60 if count else 0)
    if count > 1:
        assert found == sorted(found, key=lambda value: value or 0.0)
        assert found[0] is not None
        assert found[-1] is not None
        assert found[0] < count / 20
        assert found[-1] > count * 0.95 - 1


def test_a_gap_in_a_short_series_stays_a_gap() -> None:
    found = chart.resample([1.0, None, None, 4.0], 40)
    assert found[0] == 1.0
    assert found[-1] == 4.0
    assert found[20] is None


def test_a_young_run_reaches_from_edge_to_edge() -> None:
    view = BrailleChart("Loss", fmt.loss)
    view.values.extend([3.0, 2.0, 1.0])
    rows = plain(view.draw(59, 6)).splitlines()
    assert rows[0][0] != " "
    assert rows[-1][49] != " "


def test_nan_and_missing_values_leave_a_gap_not_a_crash() -> None:
    view = BrailleChart("Loss", fmt.loss)
    view.values.extend([1.0, math.nan, None, math.inf, 2.0] * 20)
    lines = view.draw(60, 6)
    assert len(lines) == 6
    assert "2.000" in plain(lines)


def test_a_falling_series_starts_at_the_top_and_ends_at_the_bottom() -> None:
    view = BrailleChart("Loss", fmt.loss)
    view.values.extend(100.0 - n for n in range(100))
    rows = plain(view.draw(59, 6)).splitlines()
    assert rows[0][0] != " "
    assert rows[5][:4] == "    "
    assert rows[5][46:50].strip()


def test_the_planned_level_is_drawn_even_above_the_data() -> None:
    view = BrailleChart("Speed", fmt.rate)
    view.values.extend([100.0] * 50)
    view.plan = 200.0
    assert plain(view.draw(60, 6)).splitlines()[0].strip().startswith(chr(0x2800 + 1))


def test_an_empty_chart_says_what_it_waits_for() -> None:
    assert "waiting" in plain(BrailleChart("Loss", fmt.loss).draw(60, 6))


PLAN = Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO3, seq_len=4096)


def test_the_bars_parts_add_up_to_the_device() -> None:
    prediction = evaluate(PLAN)
    assert sum(size for _, size in shares(prediction)) == pytest.approx(prediction.memory.device)


@pytest.mark.parametrize("width", [20, 50, 76, 120])
@pytest.mark.parametrize("scale", [0.1, 0.7, 1.0, 3.0])
def test_the_capacity_line_cuts_the_bar_exactly_when_it_does_not_fit(width: int, scale: float) -> None:
    parts = [("weights", 40e9 * scale), ("activations", 30e9 * scale)]
    line = stacked(parts, 80e9, width)
    assert len(line) == width
    (mark,) = [index for index, (char, _) in enumerate(line) if char == theme.GLYPHS.limit]
    filled_after = any(char != " " for char, _ in line[mark + 1 :])
    assert filled_after == (70e9 * scale > 80e9 and width * (1 - 80 / (70 * scale)) >= 1)
    assert "0" in axis(parts, 80e9, width)


def test_the_answer_names_the_verdict_in_words() -> None:
    roomy = evaluate(Plan(model="qwen3-0.6b", gpus=8, method=Method.LORA))
    hopeless = evaluate(Plan(model="deepseek-v3", gpus=1, strategy=Strategy.NONE))
    assert answer(roomy)[0].startswith("✓ fits")
    assert answer(hopeless)[0].startswith("✗ no")


def test_the_strip_has_a_cell_for_every_stage_and_checkpointing() -> None:
    cells = table(PLAN, evaluate)
    assert len(cells) == 18
    full, none = cells[Checkpointing.FULL, Strategy.ZERO3], cells[Checkpointing.NONE, Strategy.ZERO3]
    assert full is not None
    assert none is not None
    assert full[1] < none[1]


def test_the_links_of_the_plan_stand_beside_pcie() -> None:
    from ftdash.engine.hardware import gpu

    prediction = evaluate(PLAN)
    bars = {bar.name: bar for bar in speed_bars(prediction, gpu(PLAN.gpu))}
    assert bars["if on PCIe"].seconds > bars["NVLink traffic"].seconds
    assert "tokens/s per GPU" in speed_words(prediction)
