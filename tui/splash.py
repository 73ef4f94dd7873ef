"""The plain first frame: the cockpit's frame in bare ANSI, written before Textual is imported.

Nothing here may import more than `os` and `sys`: importing Textual takes 150 ms, this takes two.
"""

from __future__ import annotations

import os
import sys

PANES = ("Plan", "Launch", "Monitor", "Diagnose")


def tab_line() -> str:
    """The top line as the tab bar draws it."""
    tabs = " │ ".join(f"{number} {name}" for number, name in enumerate(PANES, 1))
    return f" ftdash │ {tabs}"


def first_frame(width: int, height: int, subject: str) -> str:
    """The frame as one string of ANSI: alternate screen, cursor hidden, tab line, one panel."""
    subject = "".join(char for char in subject if char.isprintable())[: max(0, width - 4)]
    top = tab_line()[:width]
    lines = [top, "╭" + "─" * (width - 2) + "╮"]
    body = max(0, height - 4)
    for row in range(body):
        text = f" {subject}" if row == 0 else ""
        lines.append("│" + text.ljust(width - 2) + "│")
    lines.append("╰" + "─" * (width - 2) + "╯")
    return "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J" + "\r\n".join(lines)


def paint(subject: str) -> bool:
    """Write the first frame to a terminal; False when stdout is none, or the terminal is too poor."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return False
    if width < 20 or height < 6:
        return False
    frame = first_frame(width, height, subject)
    try:
        os.write(sys.stdout.fileno(), frame.encode(sys.stdout.encoding or "utf-8", "replace"))
    except OSError:
        return False
    return True


def withdraw() -> None:
    """Give the terminal back as it was, for a start that fails after the first frame."""
    os.write(sys.stdout.fileno(), b"\x1b[?25h\x1b[?1049l")
