"""A run is played again and laid over another one in the Monitor; acknowledged alerts stay so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from ftdash.monitor.replay import Replay
from ftdash.monitor.state import Alert, Point
from ftdash.monitor.timeline import aligned
from ftdash.tui.panes.monitor import MonitorPane
from ftdash.tui.replaying import ReplayFeed
from ftdash.tui.widgets.alerts import AlertList
from ftdash.tui.widgets.chart import BrailleChart
from tests.support import screens
from tests.support.cluster import Cluster
from tests.support.screens import cockpit, screen_text, until


def steps_shown(text: str) -> int:
    found = re.search(r"step ([\d,]+) of", text)
    return int(found[1].replace(",", "")) if found else -1


def second_line(text: str) -> str:
    return text.splitlines()[2]


async def test_a_run_is_played_again_with_seek_pause_and_speed(tmp_path: Path) -> None:
    run = Cluster(4, per_node=2).create(tmp_path / "runs", "played", state="finished", steps=200)
    async with cockpit(tmp_path, pane="monitor", size=(140, 40)) as (app, pilot):
        app.follow(run)
        await until(pilot, lambda: steps_shown(screen_text(app)) == 200)
        await pilot.press("p")
        await until(pilot, lambda: "replay" in second_line(screen_text(app)))
        await until(pilot, lambda: 0 <= steps_shown(screen_text(app)) < 150)
        assert isinstance(app.feed, ReplayFeed)
        await pilot.press("space")
        await until(pilot, lambda: ", paused" in screen_text(app))
        paused_at = steps_shown(screen_text(app))
        await pilot.press("right_square_bracket", "right_square_bracket")
        await until(pilot, lambda: steps_shown(screen_text(app)) in range(paused_at + 15, paused_at + 25))
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: steps_shown(screen_text(app)) in range(paused_at + 5, paused_at + 15))
        await pilot.press("plus", "plus", "minus")
        assert app.feed.speed == 20.0
        await pilot.press(*["right_square_bracket"] * 20)
        await until(pilot, lambda: steps_shown(screen_text(app)) == 200)
        await pilot.press("p")
        await until(pilot, lambda: "replay" not in second_line(screen_text(app)))
        assert not isinstance(app.feed, ReplayFeed)


def test_a_replay_of_nothing_is_trouble_and_a_moment_stays_within_the_run(tmp_path: Path) -> None:
    told = []
    run = Cluster(2, per_node=2).create(tmp_path / "runs", "short", state="finished", steps=20)
    feed = ReplayFeed(run, lambda: told.append(1))
    player = Replay(run)
    feed._start, feed._end, feed._at = player.start, player.end, player.start
    feed.move(-0.5)
    assert feed._at == player.start
    feed.move(7.0)
    assert feed._at == player.end
    assert "at its end" in feed.words
    feed.pause()
    assert feed._at == player.start
    for _ in range(50):
        feed.hurry(2.0)
    assert feed.speed == 4096.0
    run.manifest_path.unlink()
    gone = ReplayFeed(run, lambda: told.append(1))
    gone.start()
    gone._thread.join(10)
    assert "no run.json" in gone.trouble
    assert told


def test_two_runs_are_aligned_by_tokens_and_by_steps_without_them() -> None:
    mine = [Point(step, 0.0, 3.0, None, tokens=step * 100) for step in range(1, 6)]
    other = [Point(step, 0.0, float(step), None, tokens=step * 200) for step in range(1, 3)]
    assert [point.loss if point else None for point in aligned(mine, other)] == [1.0, 1.0, 2.0, 2.0, None]
    bare = [structs.replace(point, tokens=0) for point in other]
    assert [point.loss if point else None for point in aligned(mine, bare)] == [1.0, 2.0, None, None, None]
    assert aligned([], other) == []
    assert aligned(mine, []) == [None] * 5


async def test_another_runs_curves_are_laid_over_and_taken_away(tmp_path: Path) -> None:
    mine = Cluster(2, per_node=2).create(tmp_path / "runs", "20260101-a-mine", state="finished", steps=120)
    Cluster(4, per_node=2).create(tmp_path / "runs", "20260102-b-other", state="finished", steps=80)
    async with cockpit(tmp_path, pane="monitor", size=(140, 40)) as (app, pilot):
        app.follow(mine)
        await until(pilot, lambda: steps_shown(screen_text(app)) == 120)
        await pilot.press("c")
        await until(pilot, lambda: "Runs 2" in screen_text(app))
        await pilot.press("enter")
        pane = app.panes["monitor"]
        assert isinstance(pane, MonitorPane)
        chart = pane.query_one("#loss", BrailleChart)
        await until(pilot, lambda: any(value is not None for value in chart.other))
        assert len(chart.other) == len(chart.values) == 120
        assert "20260102-b-other"[-16:] in str(chart.border_title)
        await pilot.press("c")
        await until(pilot, lambda: not chart.other)


async def test_an_acknowledged_alert_stays_acknowledged_while_it_holds(tmp_path: Path) -> None:
    state = screens.run_state(4)
    async with cockpit(tmp_path, pane="monitor", size=(140, 40), state=state) as (app, pilot):
        pane, alerts = app.panes["monitor"], app.panes["monitor"].query_one(AlertList)

        def at(second: int) -> None:
            found = Alert("memory-creep", "warning", f"grows by {second} MiB", (1,), state.now + second)
            app.feed.state = replace(  # type: ignore[union-attr]
                state, now=state.now + second, alerts=(found,), notices=(f"reading {second} MiB",)
            )
            app.show_newest(pane)

        at(0)
        alerts.focus()
        await pilot.press("a")
        assert [alert.severity for alert in alerts.alerts] == ["note"]
        for second in range(1, 5):
            at(second)
        assert [alert.severity for alert in alerts.alerts] == ["note"]
        await pilot.press("A")
        assert [alert.text for alert in alerts.alerts] == ["grows by 4 MiB", "reading 4 MiB"]
        assert alerts.alerts[0].t == state.now


async def test_a_gpu_that_is_not_sure_to_be_the_ranks_own_is_marked_and_explained(tmp_path: Path) -> None:
    state = screens.run_state(4)
    ranks = list(state.ranks)
    ranks[0] = structs.replace(ranks[0], gpu_unsure="mapping unsure: CUDA_DEVICE_ORDER is not set")
    state = replace(state, ranks=tuple(ranks))
    async with cockpit(tmp_path, pane="monitor", size=(140, 40), state=state) as (app, pilot):
        assert screen_text(app).count("%?") == 1
        await pilot.press("enter")
        await pilot.pause()
        assert "mapping unsure" in screen_text(app)


async def test_a_map_that_was_hidden_shows_what_is_now_when_it_comes_back(tmp_path: Path) -> None:
    state = screens.run_state(4)
    async with cockpit(tmp_path, pane="monitor", size=(120, 40), state=state) as (app, pilot):
        pane = app.panes["monitor"]
        for experts in (state.experts, (), state.experts):
            app.feed.state = replace(state, experts=experts)  # type: ignore[union-attr]
            app.show_newest(pane)
            await pilot.pause()
            assert ("L0 " in screen_text(app), "no experts" in screen_text(app)) == (bool(experts), False)
