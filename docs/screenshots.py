"""Draws the screenshots of the README of a live demo: `COLORTERM=truecolor python docs/screenshots.py RUN`.

Every picture is the real program on real data; only the window frame is added by Rich.
"""

from __future__ import annotations

import asyncio
import html
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from ftdash.engine.plan import ExpertLora, Method, Plan, Strategy
from ftdash.monitor.rundir import RunDir, find_run
from ftdash.tui.cockpit import Cockpit
from ftdash.tui.panes.diagnose import DiagnosePane
from ftdash.tui.panes.plan import PlanPane

FOLDER = Path(__file__).parent
SIZE = (120, 40)
CELL = 12.2  # width of a character in Rich's SVG, in pixels
FONT_SIZE = CELL / 0.602  # the advance of DejaVu Sans Mono and Menlo in em, so that lines join
ASCENT, DOT_STEP, DOT = 15.5, 5.4, 2.4  # of a braille cell: top above the baseline, rows apart, a dot's side
BRAILLE, BRAILLE_BITS = 0x2800, ((0, 3), (1, 4), (2, 5), (6, 7))  # bit of each dot, by row and column
_TEXT = re.compile(r'(<text [^>]*?)x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>([^<]*)</text>')
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


def dots(text: str, left: float, baseline: float) -> str:
    """The braille characters of a text as an SVG path: few monospaced fonts have them in their own width."""
    steps = []
    for column, char in enumerate(text):
        bits = ord(char) - BRAILLE
        if not 0 < bits < 256:
            continue
        for row, pair in enumerate(BRAILLE_BITS):
            for side, bit in enumerate(pair):
                if bits >> bit & 1:
                    x = left + column * CELL + 2 + side * CELL / 2
                    y = baseline - ASCENT + row * DOT_STEP
                    steps.append(f"M{x:.0f} {y:.0f}h{DOT}v{DOT}h-{DOT}z")
    return "".join(steps)


def self_contained(svg: str) -> str:
    """The SVG without web fonts, braille as drawn dots, and blanks at the beginning of a text as a shift of
    its place: renderers differ in whether they draw them."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    svg = re.sub(r"font-family: Fira Code, ?monospace;?", f"font-family: {FONTS};", svg)
    svg = svg.replace("font-family: arial;", f"font-family: {FONTS};")
    svg = svg.replace("font-size: 20px;", f"font-size: {FONT_SIZE:.2f}px;")

    def shifted(match: re.Match[str]) -> str:
        head, x, y, length, rest, text = match.groups()
        if path := dots(html.unescape(text), float(x), float(y)):
            colour = re.search(r'class="[^"]*"', head + rest)
            return f'<path {colour.group() if colour else ""} d="{path}"/>'
        blanks = 0
        while text.startswith("&#160;"):
            text, blanks = text.removeprefix("&#160;"), blanks + 1
        if not text:
            return ""
        left, width = float(x) + blanks * CELL, float(length) - blanks * CELL
        return f'{head}x="{left:g}" y="{y}" textLength="{width:g}"{rest}>{text}</text>'

    return _TEXT.sub(shifted, svg)


async def until(pilot: Pilot[None], holds: Callable[[], bool], patience_s: float = 240.0) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline
        await pilot.pause(0.2)


def save(app: Cockpit, name: str) -> None:
    path = FOLDER / f"screenshot-{name}.svg"
    path.write_text(self_contained(app.export_screenshot(title="ftdash")))
    print(path)


async def draw(run: RunDir) -> None:
    app = Cockpit(run=run, pane="monitor")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.feed is not None and app.feed.peek() is not None)
        await until(pilot, lambda: len(app.feed.peek().points) > 60)  # type: ignore[union-attr]
        await pilot.pause(12)  # the memory curve is drawn from what was seen
        save(app, "demo")
        await pilot.press("4", "d")
        diagnose = app.query_one(DiagnosePane)
        await until(pilot, lambda: diagnose.diagnosis is not None)
        await pilot.pause(7)
        save(app, "diagnose")
        await pilot.press("2")
        await pilot.pause(2)
        save(app, "launch")
        await pilot.press("1")
        await pilot.pause(0.5)
        plan = Plan(
            model="qwen3-30b-a3b",
            gpus=4,
            gpus_per_node=4,
            strategy=Strategy.FSDP,
            method=Method.LORA,
            expert_lora=ExpertLora.SCALED,
            seq_len=16_384,
        )
        app.query_one(PlanPane).set_plan(plan)
        await pilot.pause(1)
        save(app, "plan")


if __name__ == "__main__":
    asyncio.run(draw(find_run(sys.argv[1] if len(sys.argv) > 1 else "last")))
