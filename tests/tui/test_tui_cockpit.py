"""The cockpit: four panes at every size, their keys, hostile text, and no loss of the terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ftdash.monitor.records import HANG_CODE
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import Alert, RunPhase
from ftdash.tui import theme
from ftdash.tui.messages import RunUpdated
from ftdash.tui.panes.help import HelpScreen
from ftdash.tui.panes.rank import RankScreen
from ftdash.tui.widgets.alerts import AlertList
from tests.support import screens
from tests.support.screens import HOSTILE, cockpit, screen_text, until

SIZES = [(80, 24), (120, 40), (200, 60)]
PANES = ["plan", "launch", "monitor", "diagnose"]


@pytest.mark.parametrize("pane", PANES)
async def test_every_pane_draws_within_every_size(tmp_path: Path, pane: str) -> None:
    state = screens.with_straggler(screens.run_state(8))
    async with cockpit(tmp_path, pane=pane, size=SIZES[0], state=state) as (app, pilot):
        for size in SIZES:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            text = screen_text(app)
            lines = text.splitlines()
            assert len(lines) == size[1]
            assert "1 Plan" in lines[0]
            assert "4 Diagnose" in lines[0]
            assert "? help" in lines[-1]
            expected = {
                "plan": "Does it fit?",
                "launch": "What will happen",
                "monitor": "Ranks 8",
                "diagnose": "Verdict",
            }
            assert expected[pane] in text


async def test_keys_1_to_4_change_the_pane_and_only_visible_ones_are_made(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan", size=(100, 30)) as (app, pilot):
        assert set(app.panes) == {"plan"}
        await pilot.press("3")
        assert app.active == "monitor"
        assert set(app.panes) == {"plan", "monitor"}
        assert not app.panes["plan"].display
        await pilot.press("4")
        await pilot.press("2")
        await pilot.press("1")
        assert app.active == "plan"
        assert [name for name, pane in app.panes.items() if pane.display] == ["plan"]


async def test_wide_terminals_show_two_panes_side_by_side(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="monitor", size=(200, 50), state=screens.run_state(8)) as (app, pilot):
        assert app.visible_panes() == ("monitor", "diagnose")
        left, right = app.panes["monitor"].region, app.panes["diagnose"].region
        assert left.right == right.x
        assert left.height == right.height
        await pilot.press("4")
        assert app.active == "diagnose"
        assert app.panes["monitor"].display


async def test_typed_digits_reach_a_slider_and_leave_the_panes_alone(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan", size=(120, 40)) as (app, pilot):
        app.query_one("#in-gpus").focus()
        await pilot.press("4", "enter")
        assert app.active == "plan"
        assert app.query_one("#plan").plan.gpus == 4  # type: ignore[attr-defined]


async def test_hostile_text_is_shown_as_it_is(tmp_path: Path) -> None:
    state = screens.with_hostile_text(screens.run_state(6))
    state = replace(state, manifest=Manifest(run="r", name=HOSTILE[0], reason=HOSTILE[3], world_size=6))
    async with cockpit(tmp_path, pane="monitor", size=(120, 40), state=state) as (app, pilot):
        text = screen_text(app)
        for shown in ("[/usr/bin/x]", "[rank0]", "[node_modules]", "[bold red]loud[/]", "[link=x"):
            assert shown in text
        await pilot.press("2", "4")
        await pilot.pause()
        assert "[/usr/bin/x]" in screen_text(app)


async def test_a_hostile_notice_is_no_markup(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan", size=(120, 40)) as (app, pilot):
        for text in HOSTILE:
            app.notice(text)
        await pilot.pause()
        shown = screen_text(app)
        assert "[/usr/bin/x]" in shown
        assert "[node_modules]" in shown


async def test_a_broken_run_directory_is_a_notice(tmp_path: Path) -> None:
    broken = RunDir(tmp_path / "runs" / "broken")
    broken.path.mkdir(parents=True)
    broken.manifest_path.write_text("{ not json")
    async with cockpit(tmp_path, pane="monitor", size=(140, 40)) as (app, pilot):
        app.follow(broken)
        await until(pilot, lambda: "run.json" in screen_text(app))
        await pilot.press("1", "4", "3")
        assert app.is_running


async def test_a_state_that_cannot_be_drawn_is_a_notice(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="monitor", state=screens.run_state(2)) as (app, pilot):
        app.feed.state = replace(screens.run_state(2), ranks=None)  # type: ignore[union-attr, arg-type]
        app.show_newest(app.panes["monitor"])
        await pilot.pause()
        assert "cannot show this state" in " ".join(screen_text(app).split())


async def test_help_tells_of_the_widget_its_pane_and_everything(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="monitor", size=(120, 40), state=screens.run_state(4)) as (app, pilot):
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.pause()
        text = screen_text(app)
        for expected in ("Here: Ranks", "The Monitor pane", "Everywhere", "sorts by the next column"):
            assert expected in text
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)


async def test_the_filter_narrows_the_ranks_and_escape_gives_them_back(tmp_path: Path) -> None:
    state = screens.with_straggler(screens.run_state(8))
    async with cockpit(tmp_path, pane="monitor", state=state) as (app, pilot):
        await pilot.press("slash", "s", "l", "o", "w")
        await pilot.pause()
        assert "1 match 'slow'" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "match" not in screen_text(app)


async def test_enter_opens_the_rank_under_the_cursor(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="monitor", state=screens.run_state(4)) as (app, pilot):
        await pilot.press("down", "down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, RankScreen)
        assert app.screen.rank.rank == 2
        assert "gpu-000 · pid 4002" in screen_text(app)
        await pilot.press("4")
        assert app.active == "diagnose"


async def test_every_state_of_a_run_has_a_symbol_and_a_word(tmp_path: Path) -> None:
    state = screens.run_state(2)
    async with cockpit(tmp_path, pane="monitor", size=(80, 24), state=state) as (app, pilot):
        for phase in RunPhase:
            app.feed.state = replace(state, state=phase)  # type: ignore[union-attr]
            app.show_newest(app.panes["monitor"])
            await pilot.pause()
            line = screen_text(app).splitlines()[1]
            assert phase.value in line
            assert line.strip()[0] in "●◐‖✓✗○"


async def test_a_run_that_stands_still_points_to_diagnose_and_names_the_culprit_first(tmp_path: Path) -> None:
    generic = Alert("stalled", "error", "no progress for 90 s", (), 200.0)
    named = Alert(HANG_CODE, "error", "rank 1 is outside of any collective", (), 100.0)
    state = replace(screens.run_state(2), state=RunPhase.STALLED, alerts=(generic, named))
    async with cockpit(tmp_path, pane="monitor", size=(80, 24), state=state) as (app, pilot):
        app.post_message(RunUpdated())
        await until(pilot, lambda: "4 Diagnose ‖" in screen_text(app).splitlines()[0])
        assert "4 says who holds it up" in screen_text(app).splitlines()[1]
        assert [alert.code for alert in app.query_one(AlertList).alerts] == [HANG_CODE, "stalled"]
        await pilot.press("question_mark")
        app.feed.state = replace(state, state=RunPhase.RUNNING)  # type: ignore[union-attr]
        app.post_message(RunUpdated())  # arrives while a screen stands above the panes
        await pilot.pause()
        await pilot.press("escape")
        await until(pilot, lambda: "‖" not in screen_text(app).splitlines()[0])


async def test_without_colour_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    state = screens.with_straggler(screens.run_state(8))
    async with cockpit(tmp_path, pane="monitor", state=state) as (app, _):
        assert app.no_color
        text = screen_text(app)
        assert "[3 Monitor]" in text
        assert "▼" in text
        assert "▲" in text


def test_poor_terminals_get_plain_characters() -> None:
    assert theme.wants_ascii({"TERM": "linux", "LANG": "en_US.UTF-8"})
    assert theme.wants_ascii({"TERM": "xterm-256color", "LANG": "de_DE.ISO-8859-1"})
    assert not theme.wants_ascii({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"})
    assert theme.wants_ascii({"TERM": "xterm-256color", "LANG": "en_US.UTF-8", "FTDASH_ASCII": "1"})
    fields = [getattr(theme.ASCII, name) for name in theme.Glyphs.__slots__ if name != "ascii"]
    assert all(ord(char) < 128 for value in fields for char in "".join(value))


ASCII_PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.support import screens
async def main():
    for pane in ("plan", "launch", "monitor", "diagnose"):
        async with screens.cockpit(Path(sys.argv[1]), pane=pane, state=screens.run_state(8)) as (app, pilot):
            await pilot.pause(0.2)
            print(screens.screen_text(app))
asyncio.run(main())
"""


def test_a_plain_terminal_sees_no_character_beyond_ascii(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environ = {**os.environ, "FTDASH_ASCII": "1", "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", ASCII_PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
    )
    strange = {char for char in done.stdout if ord(char) > 127}
    assert not strange
    assert "Does it fit?" in done.stdout


def test_opening_the_screen_loads_no_heavy_library_and_paints_before_textual() -> None:
    program = (
        "import sys\n"
        "from ftdash.tui import cli, app, splash\n"
        "assert 'textual' not in sys.modules and 'rich' not in sys.modules\n"
        "assert '1 Plan' in splash.first_frame(80, 24, '')\n"
        "from ftdash.tui import cockpit\n"
        "for name in cockpit.ORDER: cockpit.make_pane(name)\n"
        "heavy = {'torch', 'numpy', 'pandas', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_frame_comes_first_and_quitting_gives_the_terminal_back(tmp_path: Path) -> None:
    environ = {**os.environ, "FTDASH_HOME": str(tmp_path), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    child, fd = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-m", "ftdash.tui.cli"], environ)
    try:
        screen = _read_until(fd, b"Does it fit?")
        assert screen.index(b"1 Plan") < screen.index(b"Does it fit?")
        assert screen.startswith(b"\x1b[?1049h")
        os.write(fd, b"q")
        rest = _read_until(fd, None)
        assert b"\x1b[?1049l" in rest
        assert b"\x1b[?25h" in rest
        assert b"Traceback" not in screen + rest
        _, status = os.waitpid(child, 0)
        child = 0
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(fd)
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _read_until(fd: int, marker: bytes | None, patience_s: float = 20.0) -> bytes:
    """What the program writes, up to `marker`, or to its end."""
    found = b""
    deadline = time.monotonic() + patience_s
    while marker is None or marker not in found:
        assert time.monotonic() < deadline, found[-2000:]
        ready, _, _ = select.select([fd], [], [], 0.2)
        if ready:
            try:
                chunk = os.read(fd, 65536)
            except OSError:
                break
            if not chunk:
                break
            found += chunk
    return found
