"""What the plan said beside what is measured, term by term, and the curves of two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ftdash.engine.plan import Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.monitor.state import RoutingPoint, RunState
from ftdash.tui.widgets.chart import BrailleChart
from ftdash.tui.widgets.heatmap import ExpertHeatmap
from ftdash.tui.widgets.lines import plain
from ftdash.tui.widgets.overview import Overview
from ftdash.tui.widgets.rank_table import RankTable
from ftdash.tui.widgets.terms import PlanTerms, terms
from tests.support import screens

PREDICTED = evaluate(Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO3, gpu="h100-sxm-80g")).to_json()
MEMORY, TIME = PREDICTED["memory"], PREDICTED["time"]


def measured(state: RunState, factor: float = 1.0) -> RunState:
    """The state with what the plan said, measured `factor` times as large, and a step so much longer."""
    held = MEMORY["model_states"]["weights"] + MEMORY["model_states"]["optimizer"] + MEMORY["buffers"]
    found = {
        "between_steps": held,
        "allocated": MEMORY["allocated"],
        "reserved": MEMORY["reserved"],
        "device": MEMORY["device"],
        "step_s": TIME["step_s"],
    }
    return replace(
        state,
        manifest=structs.replace(state.manifest, predicted=PREDICTED),
        measured={name: value * factor for name, value in found.items()},
    )


def test_what_is_as_planned_differs_by_nothing() -> None:
    rows = terms(measured(screens.run_state(8)))
    names = ["states", "a step adds", "allocated", "reserved", "context", "device", "step", "MFU"]
    assert [row.name for row in rows] == names
    assert all(row.measured == pytest.approx(row.planned) for row in rows)
    assert not any(row.missed for row in rows)


def test_more_memory_and_time_and_less_use_are_marked() -> None:
    rows = terms(measured(screens.run_state(8), 1.2))
    assert all(row.missed for row in rows)
    assert rows[-1].measured == pytest.approx(TIME["mfu"] / 1.2)
    assert not any(row.missed for row in terms(measured(screens.run_state(8), 0.95)))


def test_what_was_not_measured_is_left_out() -> None:
    state = measured(screens.run_state(8))
    only_device = replace(state, measured={"device": MEMORY["device"]})
    assert [row.name for row in terms(only_device)] == ["device"]
    assert terms(replace(state, measured={})) == []
    assert terms(replace(state, manifest=structs.replace(state.manifest, predicted=None))) == []


def test_a_run_on_cpu_is_not_held_to_a_plan_for_gpus() -> None:
    assert terms(measured(screens.run_state(2, on_gpu=False))) == []


async def test_the_pane_shows_the_terms_where_there_is_room(tmp_path: Path) -> None:
    state = measured(screens.run_state(8), 1.2)
    for size, wanted in (((120, 40), True), ((80, 24), False)):
        async with screens.cockpit(tmp_path, state=state, size=size) as (app, pilot):
            await pilot.pause()
            widget = app.panes["monitor"].query_one(PlanTerms)
            assert bool(widget.size.height) is wanted
            if wanted:
                lines = plain(widget.draw(*widget.size)).splitlines()
                assert len(lines) == 8
                assert "+20 %" in lines[2]


async def test_mfu_stands_in_the_overview_and_in_a_wide_table(tmp_path: Path) -> None:
    state = measured(screens.run_state(8))
    async with screens.cockpit(tmp_path, state=state, size=(160, 40)) as (app, pilot):
        await pilot.pause()
        pane = app.panes["monitor"]
        assert f"MFU {TIME['mfu']:.0%}" in plain(pane.query_one(Overview).draw(158, 2)).replace("  ", " ")
        assert "mfu" in [column.key for column in pane.query_one(RankTable).columns()]


async def test_the_memory_of_the_other_run_is_laid_over(tmp_path: Path) -> None:
    state = screens.run_state(8)
    mine = tuple(structs.replace(point, memory_used=60_000_000_000) for point in state.points)
    others = tuple(structs.replace(point, memory_used=50_000_000_000) for point in state.points)
    async with screens.cockpit(tmp_path, state=replace(state, points=mine)) as (app, pilot):
        pane = app.panes["monitor"]
        pane._other = replace(state, points=others)  # type: ignore[attr-defined]
        app.show_newest(pane)
        await pilot.pause()
        chart = pane.query_one("#memory", BrailleChart)
        assert set(chart.values) == {60_000_000_000}
        assert set(chart.other) == {50_000_000_000}
        assert "50.0" in str(chart.border_title)


async def test_the_map_says_how_even_routing_was_over_the_run(tmp_path: Path) -> None:
    routing = tuple(RoutingPoint(step, 0.2 + step / 100, 1.0 - step / 100) for step in range(60))
    state = replace(screens.run_state(8), experts=screens.expert_layers(4, 64), routing=routing)
    async with screens.cockpit(tmp_path, state=state) as (app, pilot):
        await pilot.pause()
        heat = app.panes["monitor"].query_one(ExpertHeatmap)
        words = str(heat.border_subtitle)
        assert "CV 0.79" in words
        assert "entropy 0.41" in words
        curve = words.split("entropy 0.41 ")[1]
        assert curve[0] > curve[-1]  # lower blocks have lower code points
