"""The last step before a poor terminal: every character that it cannot draw becomes one that it can."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_PAIRS = (
    ("─━╌┄╴╶═▔▁⎺⎽", "-"),
    ("│┃┆┊║▏▎▍▌▋▊▉▕▐‖", "|"),
    ("╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝", "+"),
    ("·∙•", "."),
    ("…", "~"),
    ("←‹", "<"),
    ("→›▸▶", ">"),
    ("↑⇧", "^"),
    ("↓▾▼", "v"),
    ("×✗", "x"),
    ("−", "-"),
    ("°", "'"),
    ("▂▃", "="),
    ("█▓▒░▄▅▆▇▀■", "#"),
    ("●◐○", "o"),
)
_TABLE = {ord(char): plain for chars, plain in _PAIRS for char in chars}


def to_ascii(text: str) -> str:
    """The text in ASCII, of the same width in cells."""
    if text.isascii():
        return text
    text = text.translate(_TABLE)
    return "".join(char if char < "\x80" else "?" * cell_len(char) for char in text)


class AsciiFilter(LineFilter):
    """Applied to every line that Textual draws, borders and titles included."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]
