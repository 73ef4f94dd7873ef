"""The one place for colours and glyphs: rich styles for drawn lines, the Textual theme, and an ASCII set.

Every state has a symbol and a word besides its colour, so that 16 colours, or none, lose nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from rich.style import Style

from ftdash.tui.splash import wants_ascii

if TYPE_CHECKING:
    from textual.theme import Theme


def has_few_colours(environ: Mapping[str, str]) -> bool:
    """True for terminals of 16 colours, told from the names that Rich reads, too."""
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return False
    return environ.get("TERM", "").rpartition("-")[2] not in ("256color", "kitty")


FEW_COLOURS = has_few_colours(os.environ)


def _colour(soft: str, plain: str) -> str:
    """`plain` is one of the 16: the nearest one to a soft colour is mostly grey, and would say nothing."""
    return plain if FEW_COLOURS else soft


BACKGROUND = "#0e1318"
SURFACE = "#141b22"
# Nearly grey on purpose: with 256 colours (tmux, ssh) a bluer one turns into loud teal.
LINE = "#363d44"
CURSOR_COLOUR = _colour("#2a3036", "#0000aa")
FOREGROUND = "#c8d1da"
DIM_COLOUR = _colour("#748290", "#aaaaaa")
ACCENT_COLOUR = _colour("#5fb7d4", "#00aaaa")
OK_COLOUR = _colour("#74c08c", "#00aa00")
WARN_COLOUR = _colour("#e0a94a", "#aa5500")
BAD_COLOUR = _colour("#ea6a66", "#ff5555")
VIOLET_COLOUR = _colour("#a99be6", "#aa00aa")

TEXT = Style(color=FOREGROUND)
BOLD = Style(color="#eef2f6", bold=True)
DIM = Style(color=DIM_COLOUR)
FAINT = Style(color=LINE)
ACCENT = Style(color=ACCENT_COLOUR)
ACCENT_BOLD = Style(color=ACCENT_COLOUR, bold=True)
OK = Style(color=OK_COLOUR)
WARN = Style(color=WARN_COLOUR)
BAD = Style(color=BAD_COLOUR, bold=True)
VIOLET = Style(color=VIOLET_COLOUR)
PINK = Style(color=_colour("#d98ab8", "#ff55ff"))
SLATE = Style(color=_colour("#8fa3b5", "#aaaaaa"))
CURSOR = Style(bgcolor=CURSOR_COLOUR, bold=True)
CURSOR_BLURRED = Style(bgcolor=_colour("#1f2429", "#000000"))
MATCH = Style(color="#0e1318", bgcolor=WARN_COLOUR)

# Memory terms, in the order of a stacked bar: each has a shade of its own as well as a colour.
TERM_STYLES = (ACCENT, OK, VIOLET, WARN, PINK, SLATE, DIM)
HEAT_STYLES = (
    Style(color="#3d5a73"),
    Style(color="#4f86a6"),
    Style(color=ACCENT_COLOUR),
    Style(color=OK_COLOUR),
    Style(color=_colour("#c9c46a", "#ffff55")),
    Style(color=WARN_COLOUR),
    BAD,
)


def fullness(share: float) -> Style:
    """The colour of a memory bar: amber from where an alert warns, not of every well-filled GPU."""
    return BAD if share >= 0.98 else WARN if share >= 0.95 else ACCENT


class Glyphs(msgspec.Struct, frozen=True):
    """Every symbol that a widget draws, so that a poor terminal gets another set."""

    ascii: bool = False
    fits: str = "✓"
    tight: str = "▲"
    no: str = "✗"
    live: str = "●"
    waiting: str = "◐"
    idle: str = "○"
    stalled: str = "‖"
    done: str = "✓"
    slow: str = "▼"
    gpu: str = "■"
    knob: str = "●"
    track: str = "─"
    track_done: str = "━"
    separator: str = "│"
    limit: str = "┃"
    dot: str = "·"
    open: str = "▾"
    closed: str = "▸"
    pointer: str = "›"
    minus: str = "−"
    times: str = "×"
    arrow: str = "→"
    dash: str = "╌"
    ellipsis: str = "…"
    cursor: str = "▏"
    blocks: str = " ▏▎▍▌▋▊▉█"
    levels: str = " ▁▂▃▄▅▆▇█"
    shades: tuple[str, ...] = ("█", "▓", "▒", "░", "▚", "▞", "·")


UNICODE = Glyphs()
ASCII = Glyphs(
    ascii=True,
    fits="+",
    tight="!",
    no="x",
    live="*",
    waiting="~",
    idle="o",
    stalled="=",
    done="+",
    slow="v",
    gpu="#",
    knob="O",
    track="-",
    track_done="=",
    separator="|",
    limit="|",
    dot=".",
    open="v",
    closed=">",
    pointer=">",
    minus="-",
    times="x",
    arrow="->",
    dash="-",
    ellipsis="~",
    cursor="_",
    blocks=" ########",
    levels=" .:-=+*%#",
    shades=("#", "%", "+", ":", "@", "=", "."),
)


GLYPHS = ASCII if wants_ascii() else UNICODE


def textual_theme() -> Theme:
    """The same colours as a Textual theme, for the stylesheet."""
    from textual.theme import Theme

    return Theme(
        name="ftdash",
        primary=ACCENT_COLOUR,
        secondary=VIOLET_COLOUR,
        accent=ACCENT_COLOUR,
        warning=WARN_COLOUR,
        error=BAD_COLOUR,
        success=OK_COLOUR,
        foreground=FOREGROUND,
        background=BACKGROUND,
        surface=SURFACE,
        panel=SURFACE,
        dark=True,
        variables={
            "line": LINE,
            "dim": DIM_COLOUR,
            "block-cursor-background": CURSOR_COLOUR,
            "block-cursor-foreground": "#eef2f6",
            "scrollbar": CURSOR_COLOUR,
            "scrollbar-background": BACKGROUND,
            "scrollbar-corner-color": BACKGROUND,
            "scrollbar-hover": "#464d54",
            "scrollbar-active": ACCENT_COLOUR,
            "input-cursor-background": ACCENT_COLOUR,
        },
    )
