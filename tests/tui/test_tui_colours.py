"""A small screen where the terminal has 256 colours, 16, or none: the same text, all of it legible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SNAPSHOT = """
import asyncio, json, sys
from pathlib import Path
from rich.terminal_theme import DEFAULT_TERMINAL_THEME as PALETTE
from textual.geometry import Size
from tests.support import screens

def shades(colour, system, ground):
    if colour is None or colour.is_default:
        return None, None
    seen = colour.downgrade(system) if system else colour
    return seen.type.name, tuple(seen.get_truecolor(PALETTE, foreground=not ground))

async def main():
    panes = {}
    for pane in ("plan", "monitor"):
        state = screens.with_straggler(screens.run_state(8))
        async with screens.cockpit(Path(sys.argv[1]), pane=pane, size=(80, 24), state=state) as (app, pilot):
            await pilot.pause()
            system = app.console._color_system
            panes[pane] = [
                [(s.text, *shades(s.style and s.style.color, system, False),
                  *shades(s.style and s.style.bgcolor, system, True)) for s in strip]
                for strip in app.screen._compositor.render_strips(Size(80, 24))
            ]
    print(json.dumps([app.console.color_system, panes]))
asyncio.run(main())
"""
TERMINALS = {
    "256 colours": {"TERM": "xterm-256color"},
    "16 colours": {"TERM": "screen"},
    "no colour": {"TERM": "screen", "NO_COLOR": "1"},
}
LEGIBLE = 2.0  # contrast of text and ground; WCAG asks 3 of large text, and hints are paler on purpose


class Piece(NamedTuple):
    text: str
    kind: str | None
    colour: list[int] | None
    ground_kind: str | None
    ground: list[int] | None


def luminance(rgb: list[int]) -> float:
    """WCAG 2.2, relative luminance of an sRGB colour."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(piece: Piece) -> float:
    light, dark = sorted(
        (luminance(piece.colour or [255, 255, 255]), luminance(piece.ground or [0, 0, 0])), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


def snapshots(tmp_path: Path) -> dict[str, tuple[str, dict[str, list[list[Piece]]]]]:
    """Colour system and lines of each pane, by terminal: the theme is chosen when it is imported."""
    plain = {name: value for name, value in os.environ.items() if name not in ("COLORTERM", "NO_COLOR")}
    plain |= {"LC_ALL": "C.UTF-8", "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", SNAPSHOT, str(tmp_path)]
    running = {
        name: subprocess.Popen(command, env=plain | terminal, stdout=subprocess.PIPE, text=True)
        for name, terminal in TERMINALS.items()
    }
    told = {}
    for name, process in running.items():
        written, _ = process.communicate()
        assert process.returncode == 0, name
        system, panes = json.loads(written)
        told[name] = (
            system,
            {pane: [[Piece(*piece) for piece in line] for line in lines] for pane, lines in panes.items()},
        )
    return told


def test_a_small_screen_is_legible_with_few_colours_and_with_none(tmp_path: Path) -> None:
    told = snapshots(tmp_path)
    assert [system for system, _ in told.values()] == ["256", "standard", "standard"]
    text = {
        name: {
            pane: ["".join(piece.text for piece in line) for line in lines] for pane, lines in panes.items()
        }
        for name, (_, panes) in told.items()
    }
    assert text["16 colours"] == text["256 colours"]
    for name, (_, panes) in told.items():
        pieces = [piece for lines in panes.values() for line in lines for piece in line]
        words = [piece for piece in pieces if any(char.isalnum() for char in piece.text)]
        assert not [(name, piece) for piece in words if contrast(piece) < LEGIBLE]
        if name == "16 colours":
            assert {kind for piece in pieces for kind in (piece.kind, piece.ground_kind)} <= {
                None,
                "STANDARD",
            }
        if name == "no colour":
            assert all(max(piece.colour) - min(piece.colour) <= 2 for piece in pieces if piece.colour)
    shown = text["no colour"]
    assert len(shown["monitor"]) == 24
    assert "[3 Monitor]" in shown["monitor"][0]
    assert "[1 Plan]" in shown["plan"][0]
