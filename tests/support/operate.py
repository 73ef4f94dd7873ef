"""Works the Launch pane as a person would: keys alone."""

from __future__ import annotations

from pathlib import Path

from textual.pilot import Pilot

from ftdash.monitor.liveness import FINAL
from ftdash.tui.cockpit import Cockpit
from ftdash.tui.panes.launch import LaunchPane
from tests.support.screens import screen_text, until


async def type_into(app: Cockpit, pilot: Pilot[None], field: str, text: str) -> None:
    """Enter, the text, enter."""
    app.query_one(f"#in-{field}").focus()
    await pilot.press("enter")
    await until(pilot, lambda: bool(app.screen.query("Prompt Input")))
    await pilot.press(*text, "enter")
    await until(pilot, lambda: not app.screen.query("Prompt Input"))


async def press_on(app: Cockpit, pilot: Pilot[None], field: str, *keys: str) -> None:
    app.query_one(f"#in-{field}").focus()
    await pilot.press(*keys)


async def start_and_watch(app: Cockpit, pilot: Pilot[None], hosts: list[str], wait_s: float = 180) -> None:
    """From the filled-in pane to a Monitor that shows a step of every host's ranks."""
    before = app.feed.run if app.feed is not None else None
    await pilot.press("s")
    await until(pilot, lambda: app.feed is not None and app.feed.run is not before, wait_s)
    await pilot.press("3")

    def all_step() -> bool:
        state = app.feed.peek() if app.feed is not None else None
        found = {rank.host for rank in state.ranks if rank.step > 2} if state is not None else set()
        return found == set(hosts)

    await until(pilot, all_step, wait_s)
    await until(pilot, lambda: all(host in screen_text(app) for host in hosts), wait_s)


async def stop(app: Cockpit, pilot: Pilot[None], word: str = "stop") -> None:
    """Key k, the word it asks for (stop or save), and the notice that nothing is left."""
    await pilot.press("2", "k")
    await until(pilot, lambda: bool(app.screen.query("Prompt Input")))
    await pilot.press(*word, "enter")
    await until(pilot, lambda: "is stopped, no process is left" in screen_text(app), 90)


async def go_on(app: Cockpit, pilot: Pilot[None]) -> None:
    """Key x on a run that has ended: the next start is offered from its checkpoint."""
    await until(pilot, lambda: app.feed is not None and app.feed.peek().state in FINAL, 30)
    await pilot.press("2", "x")
    pane = app.query_one(LaunchPane)
    await until(pilot, lambda: bool(pane.wanted.resume))
    await until(pilot, lambda: "steps from che" in screen_text(app))  # as much as a narrow screen shows
    assert Path(pane.wanted.resume).name.startswith("checkpoint-")
