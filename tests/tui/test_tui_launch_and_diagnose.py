"""Launch says what speaks against a run and starts it; a rank's stack can be had from Monitor."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.engine.launch import local
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.plan import Plan, Strategy
from ftdash.monitor.rundir import RunDir
from ftdash.tui.panes.launch import LaunchPane
from ftdash.tui.widgets.check_list import CheckList
from ftdash.tui.widgets.stack import StackView
from tests.support import screens
from tests.support.screens import cockpit, screen_text, until
from tests.support.stacks import IN_GATHER, IN_REWARD, agent, run_elsewhere


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_elsewhere(tmp_path)


async def test_a_rank_is_dumped_from_monitor_on_a_key(tmp_path: Path, run: RunDir) -> None:
    with agent(run, {0: IN_GATHER, 1: IN_REWARD}):
        async with cockpit(tmp_path, pane="monitor", state=screens.run_state(2), run=run) as (app, pilot):
            await pilot.press("down", "d")
            await until(pilot, lambda: "rewards.py:88" in screen_text(app))
            assert app.screen.query_one(StackView).evidence is not None
            assert app.screen.query_one(StackView).evidence.rank == 1  # type: ignore[union-attr]


async def test_a_dump_without_an_agent_ends_in_a_sentence(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.tui.dumps.PATIENCE_S", 0.3)
    async with cockpit(tmp_path, pane="monitor", state=screens.run_state(2), run=run) as (app, pilot):
        await pilot.press("d")
        await until(pilot, lambda: "no answer for rank 0" in screen_text(app))


async def test_the_checks_of_a_plan_are_listed_with_their_fixes(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        pane = app.query_one(LaunchPane)
        pane.take_plan(Plan(model="qwen3-8b", gpus=4, strategy=Strategy.FSDP))
        await until(pilot, lambda: app.query_one(CheckList).border_title != "Checks")
        findings = app.query_one(CheckList).findings
        assert findings
        assert all(finding.fix for finding in findings)
        assert "accelerate launch" in screen_text(app)


async def test_a_refused_launch_is_one_line_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: LaunchSpec) -> RunDir:
        raise LaunchError("--data none.jsonl: no such file")

    monkeypatch.setattr(local, "launch", refuse)
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "refused: --data none.jsonl" in screen_text(app))
        assert app.feed is None


async def test_a_started_run_is_watched_and_its_log_shown(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LaunchSpec] = []
    monkeypatch.setattr(local, "launch", lambda spec: seen.append(spec) or run)
    (run.logs / "launcher.log").write_text("[rank0]: first step done\n")
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("enter")
        await until(pilot, lambda: "first step done" in screen_text(app))
        assert app.feed is not None
        assert app.feed.run == run
        assert seen[0].plan is not None
        assert seen[0].plan.model == "tiny-moe"
        assert seen[0].runs == tmp_path / "runs"
