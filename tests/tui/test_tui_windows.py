"""Windows above the panes show what the pane means, at the size of a small terminal too."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ftdash.monitor.state import Alert
from ftdash.tui.panes.config import ConfigScreen
from ftdash.tui.panes.launch import DIFF, LaunchPane
from ftdash.tui.panes.rank import RankFigures
from ftdash.tui.widgets.alerts import AlertList
from ftdash.tui.widgets.choice import Choice
from ftdash.tui.widgets.gpu_strip import GpuStrip
from ftdash.tui.widgets.lines import plain
from tests.support import screens
from tests.support.screens import cockpit, screen_text, until

SMALL = (80, 24)


async def test_the_config_of_launch_holds_what_was_chosen_there(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch", size=(120, 40)) as (app, pilot):
        steps = app.query_one(LaunchPane).wanted.steps
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, ConfigScreen)
        assert f"--steps {steps} " in " ".join(screen_text(app).split())


async def test_a_small_terminal_shows_the_diff_in_a_window(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch", size=SMALL) as (app, pilot):
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, ConfigScreen))
        assert DIFF in screen_text(app)


async def test_a_long_alert_is_read_whole_in_a_narrow_list(tmp_path: Path) -> None:
    words = "rank 3 runs at 1,240 tokens/s where its peers run at 2,140: power cap of its GPU, on gpu-000"
    state = replace(screens.run_state(4), alerts=(Alert("slow", "warning", words, (3,), 5.0),))
    async with cockpit(tmp_path, pane="monitor", size=(120, 40), state=state) as (app, pilot):
        await pilot.pause()
        rows = app.query_one(AlertList).items
        assert len(rows) > 1
        assert " ".join(line for _, _, line in rows) == words
        shown = " ".join(line[-42:].strip("│ ") for line in screen_text(app).splitlines())
        assert "its GPU, on gpu-000" in shown


def test_a_rank_on_the_cpu_has_no_row_of_middle_dots() -> None:
    rank = structs.replace(screens.rank_state(0, on_gpu=False), aux_loss=None)
    lines = plain(RankFigures(rank).draw(110, 0)).splitlines()
    assert not any("· ·" in line for line in lines)
    assert lines[-1].startswith("step time")
    assert "optimizer" in lines[-1]


def test_options_stand_closer_before_one_is_cut() -> None:
    options = [(name, name) for name in ("ddp", "z1", "z2", "z3", "fsdp", "hsdp")]
    choice = Choice("strategy", "Stage", options, "fsdp")
    assert plain(choice.draw(60, 1)).split() == ["Stage", "ddp", "z1", "z2", "z3", "[fsdp]", "hsdp"]
    assert plain(choice.draw(38, 1)).split() == ["Stage", "ddp", "z1", "z2", "z3", "[fsdp]", "hsdp"]
    cut = plain(choice.draw(30, 1))
    assert "[fsdp]" in cut
    assert cut.endswith("…")


async def test_x_shows_each_part_of_the_monitor_alone_and_then_all_again(tmp_path: Path) -> None:
    parts = {"Ranks 4", "Experts: load", "Tokens/s", "Loss"}
    async with cockpit(tmp_path, pane="monitor", size=SMALL, state=screens.run_state(4)) as (app, pilot):
        for alone in ({"Ranks 4"}, {"Experts: load"}, {"Tokens/s", "Loss"}, parts):
            await pilot.press("x")
            await until(
                pilot, lambda wanted=alone: {part for part in parts if part in screen_text(app)} == wanted
            )
            assert app.screen.focused is not None


async def test_a_dense_model_has_no_experts_to_enlarge(tmp_path: Path) -> None:
    state = screens.run_state(4, moe=False)
    async with cockpit(tmp_path, pane="monitor", size=SMALL, state=state) as (app, pilot):
        await pilot.press("x")
        await until(pilot, lambda: "Loss" not in screen_text(app))
        await pilot.press("x")
        await until(pilot, lambda: "Loss" in screen_text(app) and "Ranks 4" not in screen_text(app))


@pytest.mark.parametrize("terminal", ["xterm", "xterm-256color"])
def test_what_is_good_costly_and_bad_keeps_a_colour_of_its_own(terminal: str) -> None:
    code = (
        "from ftdash.tui import theme; from rich.color import ColorSystem as S\n"
        "system = S.STANDARD if theme.FEW_COLOURS else S.EIGHT_BIT\n"
        "styles = (theme.TEXT, theme.ACCENT, theme.OK, theme.WARN, theme.BAD)\n"
        "print(theme.FEW_COLOURS, len({style.color.downgrade(system).number for style in styles}))"
    )
    environment = {**os.environ, "TERM": terminal, "COLORTERM": ""}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert told.stdout.split() == [str(terminal == "xterm"), "5"], told.stderr


async def test_an_alert_opens_whole_and_leaves_room_for_the_others(tmp_path: Path) -> None:
    advice = "raise the coefficient of the auxiliary loss [x] or freeze the router while the data is small"
    found = "routing narrows in 3 layers: entropy of layer 17 fell from 0.98 to 0.41 of its maximum"
    alerts = tuple(
        Alert(f"router-{n}", "warning", f"{found}; {advice}; use ratios of sequences", (n,)) for n in range(4)
    )
    state = replace(screens.run_state(8), alerts=alerts)
    async with cockpit(tmp_path, size=(120, 40), state=state) as (app, pilot):
        listed = app.query_one(AlertList)
        lines = [(alert.code, number) for alert, number, _ in listed.items]
        assert {code for code, _ in lines} == {alert.code for alert in alerts}
        assert len(lines) <= listed.size.height
        listed.focus()
        chosen = listed.items[listed.cursor][0]
        await pilot.press("enter")
        await pilot.pause()
        text = " ".join(line.strip("│ ") for line in screen_text(app).splitlines())
        assert found in text
        assert advice in text
        assert f"{chosen.code} · warning · rank {chosen.ranks[0]}" in text
        await pilot.press("enter")
        await pilot.pause()
        assert len(app.screen_stack) == 1


@pytest.mark.parametrize("gpus", [8, 16])
async def test_all_gpus_of_a_node_are_on_the_screen(tmp_path: Path, gpus: int) -> None:
    state = screens.run_state(8)
    held_back = structs.replace(state.gpus[0], throttle=("power cap",))
    all_gpus = tuple(structs.replace(state.gpus[0], index=n, temp_c=30 + n) for n in range(gpus))
    for shown in (all_gpus, (held_back, *all_gpus[1:])):
        async with cockpit(tmp_path, size=(120, 40), state=replace(state, gpus=shown)) as (app, pilot):
            await pilot.pause()
            text = plain(app.query_one(GpuStrip)._lines)
            assert all(f"{30 + n}°" in text for n in range(1, gpus))
            assert ("power" in text) == bool(shown[0].throttle)


def test_gpus_without_room_are_counted_and_the_ill_among_them_named() -> None:
    gpu = screens.run_state(8).gpus[0]
    strip = GpuStrip()
    strip.gpus = tuple(structs.replace(gpu, index=n, state="lost" if n == 60 else "ok") for n in range(64))
    lines = strip.draw(76, 4)
    assert len(lines) == 4
    assert "55 more, 1 of them ill" in plain(lines[3:])
    instance = structs.replace(gpu, index=3, mig_index=1, util=None)
    strip.gpus = (gpu, instance)
    assert "3:1 " in plain(strip.draw(76, 4))


async def test_memory_that_only_the_log_tells_is_shown_as_such(tmp_path: Path) -> None:
    state = screens.run_state(2, moe=False)
    state = replace(
        state,
        manifest=structs.replace(state.manifest, attached=True, predicted=None),
        measured={"reserved": 56e9},
    )
    async with cockpit(tmp_path, size=(120, 50), state=state) as (app, pilot):
        await pilot.pause()
        assert "log: reserved 56.0" in screen_text(app)
        await pilot.press("enter")
        await pilot.pause()
        assert "log says" in screen_text(app)
