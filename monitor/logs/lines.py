"""Bytes of a log as clean lines, in bounded memory whatever they hold.

Progress bars rewrite one line with carriage returns, so that a redirected log may have megabytes between
two newlines (tqdm/tqdm#506). A frame that was overwritten is dropped when it is a progress bar; other
text between carriage returns is a line like any other.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 16 << 10

# CSI, OSC (ended by BEL or ST) and two-character escape sequences (ECMA-48, 5.4).
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_BREAK = re.compile(rb"\r\n|\n|\r")
_PROGRESS = re.compile(r"\d+%\|.*\||\[\d+:\d\d(?::\d\d)?<|\d+(?:\.\d+)?\s?(?:it/s|s/it|B/s)\b")


def strip_ansi(text: str) -> str:
    """The text without escape sequences and other control characters; tabs stay."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _CONTROL.sub("", text)


def is_progress(text: str) -> bool:
    """True for a frame of a progress bar, such as " 12%|█▏   | 12/100 [00:10<01:20, 1.1it/s]".

    A bar with something printed behind it on the same line is more than a frame.
    """
    return text.rstrip().endswith(("]", "/s", "it", "|", "%")) and bool(_PROGRESS.search(text))


class LineSplitter:
    """Feed it pieces of a log as they come; it gives lines and never holds more than one capped line.

    `dropped` counts bytes that were cut from lines longer than the cap. `tail` is the text after the last
    line end: usually the newest frame of a progress bar.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.max_line_bytes = max_line_bytes
        self.dropped = 0
        self.overwritten = 0  # frames of progress bars that were left out
        self._rest = bytearray()
        self._frame = ""  # the newest progress frame, until the line ends or other text follows
        self._after_cr = False

    @property
    def tail(self) -> str:
        return self._clean(bytes(self._rest)) if self._rest.strip() else self._frame

    def feed(self, data: bytes) -> list[str]:
        """Complete lines, cleaned. A progress bar gives only its last frame, once its line ends."""
        lines: list[str] = []
        at = 0
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":  # "\r\n" cut in two
                at = 1
                self._flush_frame(lines)
        for mark in _BREAK.finditer(data, at):
            self._add(data, at, mark.start())
            at = mark.end()
            if mark.group() == b"\r":
                self._end_frame(lines)
                self._after_cr = at == len(data)
            else:
                self._end_line(lines)
        self._add(data, at, len(data))
        return lines

    def finish(self) -> list[str]:
        """What is left when the log ends without a newline."""
        lines: list[str] = []
        if self._rest or self._frame:
            self._end_line(lines)
        return lines

    def _add(self, data: bytes, start: int, end: int) -> None:
        room = self.max_line_bytes - len(self._rest)
        if end - start > room:
            self.dropped += end - start - room
            end = start + room
        if end > start:
            self._rest += data[start:end]

    def _take(self) -> str:
        text = self._clean(bytes(self._rest))
        self._rest.clear()
        return text

    def _end_frame(self, lines: list[str]) -> None:
        text = self._take()
        if not text.strip():
            return
        if is_progress(text):
            self.overwritten += bool(self._frame)
            self._frame = text
        else:
            self._flush_frame(lines)
            lines.append(text)

    def _end_line(self, lines: list[str]) -> None:
        text = self._take()
        if text.strip():
            if self._frame and is_progress(text):
                self.overwritten += 1
                self._frame = ""
            self._flush_frame(lines)
            lines.append(text)
        elif self._frame:
            self._flush_frame(lines)
        else:
            lines.append("")

    def _flush_frame(self, lines: list[str]) -> None:
        if self._frame:
            lines.append(self._frame)
            self._frame = ""

    def _clean(self, raw: bytes) -> str:
        return strip_ansi(raw.decode("utf-8", "replace"))
