"""How numbers and foreign text read on the screen: every figure that a person sees is formatted here.

Sizes are decimal GB as vendors print them; `None` is a middle dot (not known), never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

UNKNOWN = "·"
GB = 1e9
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(text: str, limit: int = 4096) -> str:
    """Foreign text made safe for one screen line: no escapes, no control characters, tabs as blanks."""
    if text.isprintable():
        return text[:limit]
    return _CONTROL.sub("", text[:limit]).replace("\n", " ").expandtabs(4)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Text of exactly `width` cells, cut with an ellipsis or padded, right-aligned if asked."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width > 1 else set_cell_size(text, width)
    return " " * (width - length) + text if right else text + " " * (width - length)


def gb(size: float | None, digits: int | None = None) -> str:
    """Bytes as GB without the unit: three figures, such as 0.62, 7.64, 71.2, 212, 1,900."""
    if size is None:
        return UNKNOWN
    value = size / GB
    if digits is None:
        digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def size(amount: float | None) -> str:
    """Bytes with a fitting decimal unit: 640 kB, 12.1 MB, 7.64 GB."""
    if amount is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(amount) >= scale * 0.9995:
            value = amount / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{amount:.0f} B"


def count(amount: float | None) -> str:
    """A parameter count or the like: 812, 14.2 M, 8.19 B, 671 B."""
    if amount is None:
        return UNKNOWN
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= scale * 0.9995:
            value = amount / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{amount:.0f}"


def number(amount: float | None) -> str:
    """A whole number with separators: 32,768."""
    return UNKNOWN if amount is None else f"{amount:,.0f}"


def rate(per_s: float | None) -> str:
    """Tokens a second: 0.8, 412, 2,140, 17.1k, 1.20M."""
    if per_s is None:
        return UNKNOWN
    if not math.isfinite(per_s):
        return str(per_s)
    if per_s >= 999_500:
        return f"{per_s / 1e6:.2f}M"
    if per_s >= 9_999.5:
        return f"{per_s / 1e3:.1f}k"
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def seconds(duration: float | None) -> str:
    """A step time: 9 ms, 0.47 s, 12.4 s."""
    if duration is None:
        return UNKNOWN
    if duration < 0.0995:
        return f"{duration * 1e3:.0f} ms"
    return f"{duration:.2f} s" if duration < 10 else f"{duration:.1f} s"


def duration(length_s: float | None) -> str:
    """A span of time in its two largest units: 48 s, 4 m 12 s, 5 h 12 m, 3 d 4 h."""
    if length_s is None or not math.isfinite(length_s):
        return UNKNOWN
    whole = max(0, round(length_s))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def loss(value: float | None) -> str:
    """A loss with four figures; NaN and infinities as such."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.0f}%"


def signed_percent(share: float) -> str:
    """A difference from the plan: +4 %, −11 %."""
    sign = "+" if share >= 0 else "−"
    return f"{sign}{abs(share) * 100:.0f} %"


def ranks(numbers: Iterable[int]) -> str:
    """Ranks as ranges: 0-2, 4, 6-7."""
    parts: list[str] = []
    start = last = None
    for rank in sorted(set(numbers)):
        if last is not None and rank == last + 1:
            last = rank
            continue
        if start is not None:
            parts.append(f"{start}" if start == last else f"{start}-{last}")
        start = last = rank
    if start is not None:
        parts.append(f"{start}" if start == last else f"{start}-{last}")
    return ", ".join(parts)


def plural(amount: int, noun: str) -> str:
    """1 rank, 8 ranks."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def bar(share: float, width: int, blocks: str = " ▏▎▍▌▋▊▉█") -> str:
    """A horizontal bar of `width` cells, filled by `share` (0 to 1) in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = blocks[8] * full + (blocks[rest] if rest else "")
    return text.ljust(width)


def spark(
    values: Iterable[float | None],
    width: int,
    levels: str = " ▁▂▃▄▅▆▇█",
    scale: tuple[float, float] | None = None,
) -> str:
    """A one-line curve of the last `width` finite values, from lowest to highest or to `scale`."""
    tail = [value for value in values if value is not None and math.isfinite(value)][-width:]
    if not tail:
        return ""
    low, high = scale or (min(tail), max(tail))
    tail = [max(low, min(high, value)) for value in tail]
    span = high - low
    return "".join(levels[1 + round((value - low) / span * 7)] if span else levels[4] for value in tail)
