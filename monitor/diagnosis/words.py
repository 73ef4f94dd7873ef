"""How a verdict speaks of ranks: lists, places, confidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ftdash.monitor import wording
from ftdash.monitor.diagnosis.frames import Wait
from ftdash.monitor.diagnosis.views import View


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks for people: "0-3,7"."""
    ordered, parts = sorted(set(ranks)), []
    start = previous = None
    for rank in [*ordered, None]:
        if previous is not None and rank != previous + 1:
            parts.append(f"{start}-{previous}" if start != previous else f"{start}")
            start = None
        start = rank if start is None else start
        previous = rank
    return ",".join(parts)


def ranks_of(views: Iterable[View]) -> str:
    return rank_list(view.rank for view in views)


def they(views: Sequence[View], verb: str) -> str:
    """The ranks of views as the subject of a sentence, with its verb."""
    return wording.they([view.rank for view in views], verb)


def it(views: Sequence[View]) -> str:
    """The same ranks, named again."""
    return "it" if len(views) == 1 else "them"


def place_of(view: View) -> str:
    frame = view.shown_frame
    return f" at {frame}" if frame else ""


def confidence(base: float, views: Sequence[View], *, two: bool) -> float:
    """Less with one sample, a little more when many ranks agree."""
    return min(0.97, base - (0.0 if two else 0.15) + (0.03 if len(views) > 4 else 0.0))


def describe(view: View) -> str:
    reading = view.reading
    frame = view.shown_frame
    inside = reading.telling if reading.telling is not frame else None
    parts = [f"rank {view.rank}"]
    if reading.phase:
        parts.append(f"in {reading.phase}")
    if view.op:
        parts.append(f"waits in {view.op}")
    elif view.wait is not Wait.OWN:
        parts.append(f"in {view.wait}")
    if frame:
        parts.append(f"at {frame}")
    if inside:
        parts.append(f"(inside {inside.name})")
    if view.text:
        parts.append(f"`{view.text[:80]}`")
    return " ".join(parts)
