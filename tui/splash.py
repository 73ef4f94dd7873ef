"""The plain first frame: the cockpit's frame in bare ANSI, written before Textual is imported.

Nothing here may import more than `os` and `sys`: importing Textual takes 150 ms, this takes two.
"""

from __future__ import annotations

import os
import sys

PANES = ("Plan", "Launch", "Monitor", "Diagnose")


def wants_ascii(environ: dict[str, str] | None = None) -> bool:
    """True for terminals that draw no box or block characters; FTDASH_ASCII=1 (or 0) decides by hand."""
    env = os.environ if environ is None else environ
    if (explicit := env.get("FTDASH_ASCII")) is not None:
        return explicit not in ("", "0", "no")
    if env.get("TERM", "") in ("dumb", "linux", "vt100", "vt102", "vt220", "ansi", "cons25"):
        return True
    charset = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG")
    if charset:
        return "utf" not in charset.lower() and charset not in ("C", "POSIX")
    import locale

    return "utf" not in locale.getpreferredencoding(False).lower()


def tab_line(line: str = "│") -> str:
    """The top line as the tab bar draws it."""
    tabs = f" {line} ".join(f"{number} {name}" for number, name in enumerate(PANES, 1))
    return f" ftdash {line} {tabs}"


def first_frame(width: int, height: int, subject: str, *, ascii_only: bool = False) -> str:
    """The frame as one string of ANSI: alternate screen, cursor hidden, tab line, one panel."""
    across, down, *corners = tuple("-|++++" if ascii_only else "─│╭╮╰╯")
    subject = "".join(char for char in subject if char.isprintable())[: max(0, width - 4)]
    top = tab_line(down)[:width]
    lines = [top, corners[0] + across * (width - 2) + corners[1]]
    body = max(0, height - 4)
    for row in range(body):
        text = f" {subject}" if row == 0 else ""
        lines.append(down + text.ljust(width - 2) + down)
    lines.append(corners[2] + across * (width - 2) + corners[3])
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
    frame = first_frame(width, height, subject, ascii_only=wants_ascii())
    try:
        os.write(sys.stdout.fileno(), frame.encode(sys.stdout.encoding or "utf-8", "replace"))
    except OSError:
        return False
    return True


def withdraw() -> None:
    """Give the terminal back as it was, for a start that fails after the first frame."""
    os.write(sys.stdout.fileno(), b"\x1b[?25h\x1b[?1049l")
