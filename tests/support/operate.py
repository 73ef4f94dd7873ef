"""Works the Launch pane as a person would: keys alone."""

from __future__ import annotations

from textual.pilot import Pilot

from ftdash.tui.cockpit import Cockpit
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


async def stop(app: Cockpit, pilot: Pilot[None]) -> None:
    """Key k, the word it asks for, and the notice that nothing is left."""
    await pilot.press("2", "k")
    await until(pilot, lambda: bool(app.screen.query("Prompt Input")))
    await pilot.press(*"stop", "enter")
    await until(pilot, lambda: "is stopped, no process is left" in screen_text(app), 90)
