"""The windows above the Plan pane: the simulation beside the closed form, and the list of what fits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ftdash.engine.plan import Method, Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.fit import Search, search
from ftdash.engine.simulate.run import Simulation
from ftdash.tui import format as fmt
from ftdash.tui.panes.fit import CandidateTable, FitScreen
from ftdash.tui.panes.plan import PlanPane
from ftdash.tui.panes.simulation import SimulationScreen
from tests.support.screens import HOSTILE, cockpit, screen_text, until

SMALL = Plan(model="qwen3-0.6b", gpus=4, strategy=Strategy.FSDP, method=Method.LORA)


async def test_the_list_of_fits_is_the_search_and_one_becomes_the_plan(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = app.query_one(PlanPane)
        pane.set_plan(SMALL)
        await pilot.press("f")
        await until(pilot, lambda: "tried" in str(app.screen.query_one("#runs-box").border_title))
        expected = search(SMALL, 200)
        table = app.screen.query_one(CandidateTable)
        assert [item.plan for item in table.items] == [item.plan for item in expected.candidates]
        assert f"{len(expected.candidates):,} fit, of {expected.tried:,} tried" in screen_text(app)
        await pilot.press("down", "enter")
        await until(pilot, lambda: pane.plan == expected.candidates[1].plan)
        assert f"{fmt.gb(evaluate(pane.plan).memory.device)} of" in screen_text(app)


async def test_leaving_the_list_of_fits_keeps_the_plan(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = app.query_one(PlanPane)
        pane.set_plan(SMALL)
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, FitScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, FitScreen))
        assert pane.plan == SMALL


async def test_when_nothing_fits_the_list_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = replace(search(SMALL, 1), candidates=(), tried=1234)
    monkeypatch.setattr("ftdash.engine.planner.fit.search", lambda plan, limit: nothing)
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        await pilot.press("f")
        await until(pilot, lambda: "none of 1,234 fits these GPUs" in screen_text(app))
        await pilot.press("enter")
        assert isinstance(app.screen, FitScreen)


@pytest.mark.parametrize("words", HOSTILE)
async def test_a_search_that_fails_is_its_own_words_not_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    def fail(plan: Plan, limit: int) -> Search:
        raise ValueError(f"no such: {words}")

    monkeypatch.setattr("ftdash.engine.planner.fit.search", fail)
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        await pilot.press("f")
        await until(pilot, lambda: f"no such: {fmt.clean(words)}" in screen_text(app))


def stubbed(monkeypatch: pytest.MonkeyPatch, found: Simulation | Exception, go_on: threading.Event) -> None:
    """The real simulation starts a torch process for many seconds; this one answers when it is let go."""

    def simulate(plan: Plan, progress: Callable[[str], None]) -> Simulation:
        progress("2 layers of [rank0] \x1b[31m")
        assert go_on.wait(30)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("ftdash.engine.simulate.run.simulate", simulate)


async def test_the_simulation_stands_beside_the_closed_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = evaluate(SMALL)
    simulated = int(prediction.memory.allocated / 1.1)
    found = Simulation(
        allocated=simulated,
        breakdown={"weights": 2 * 10**9, "activations": 10**9},
        peak_part="backward",
        parts={"backward": simulated},
        trainable_params=1,
        simulated_layers=(2, 4),
        seconds=7.0,
    )
    go_on = threading.Event()
    stubbed(monkeypatch, found, go_on)
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        app.query_one(PlanPane).set_plan(SMALL)
        await pilot.press("s")
        await until(pilot, lambda: "2 layers of [rank0]" in screen_text(app))
        assert "\x1b" not in screen_text(app)
        go_on.set()
        await until(pilot, lambda: "closed form" in screen_text(app))
        text = screen_text(app)
        assert fmt.size(simulated) in text
        assert fmt.size(prediction.memory.allocated) in text
        assert "+10" in text
        assert "2 and 4 layers run" in text
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SimulationScreen))


async def test_a_simulation_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    go_on.set()
    stubbed(monkeypatch, RuntimeError("[bold red]no torch[/]"), go_on)
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "✗ [bold red]no torch[/]" in screen_text(app))


async def test_a_simulation_left_early_does_not_disturb_the_pane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    stubbed(monkeypatch, RuntimeError("too late"), go_on)
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "2 layers of" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SimulationScreen))
        go_on.set()
        await pilot.pause(0.2)
        assert "too late" not in screen_text(app)
