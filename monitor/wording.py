"""How figures and ranks read in the sentences of alerts and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def gib(count: int) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def duration(seconds: float) -> str:
    """Seconds as "42 s", "4 m 12 s", "3 h 5 m", "2 d 4 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} m"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def plural(amount: int, noun: str) -> str:
    """1 rank, 8 ranks."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def they(ranks: Collection[int], verb: str) -> str:
    """Ranks as the subject of a sentence, with its verb: "rank 3 waits", "ranks 0-2 wait"."""
    if len(ranks) > 1:
        verb = {"is": "are", "has": "have"}.get(verb, verb.removesuffix("s"))
    return f"{rank_list(ranks)} {verb}"


def rank_list(ranks: Iterable[int], limit: int = 6) -> str:
    """Ranks as "rank 3" or "ranks 0-3, 7"; long lists are cut and counted."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    if len(texts) > limit:
        return f"{len(ordered)} ranks ({', '.join(texts[:limit])}, …)"
    return f"ranks {', '.join(texts)}"
