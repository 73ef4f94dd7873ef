"""The one place for colours and glyphs: rich styles for drawn lines, the Textual theme, and an ASCII set.

Every state has a symbol and a word besides its colour, so that 16 colours, or none, lose nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.style import Style

from ftdash.tui.splash import wants_ascii

if TYPE_CHECKING:
    from textual.theme import Theme

BACKGROUND = "#0e1318"
SURFACE = "#141b22"
# Nearly grey on purpose: with 256 colours (tmux, ssh) a bluer one turns into loud teal.
LINE = "#363d44"
CURSOR_COLOUR = "#2a3036"
FOREGROUND = "#c8d1da"
DIM_COLOUR = "#748290"
ACCENT_COLOUR = "#5fb7d4"
OK_COLOUR = "#74c08c"
WARN_COLOUR = "#e0a94a"
BAD_COLOUR = "#ea6a66"
VIOLET_COLOUR = "#a99be6"

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
PINK = Style(color="#d98ab8")
SLATE = Style(color="#8fa3b5")
CURSOR = Style(bgcolor=CURSOR_COLOUR, bold=True)
CURSOR_BLURRED = Style(bgcolor="#1f2429")
MATCH = Style(color="#0e1318", bgcolor=WARN_COLOUR)

# Memory terms, in the order of a stacked bar: each has a shade of its own as well as a colour.
TERM_STYLES = (ACCENT, OK, VIOLET, WARN, PINK, SLATE, DIM)
HEAT_STYLES = (
    Style(color="#3d5a73"),
    Style(color="#4f86a6"),
    Style(color=ACCENT_COLOUR),
    Style(color=OK_COLOUR),
    Style(color="#c9c46a"),
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
