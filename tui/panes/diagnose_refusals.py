"""Ranks that gave no stack, folded by cause: why, the one remedy, and what is known of them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ftdash.monitor.diagnosis.model import DumpFailure, RankEvidence

# `source` of stacks that were had in another way because py-spy could not look.
CHANNELS = {"faulthandler": "their own hook (faulthandler)", "worker server": "torch's worker server"}

# A process that has ended is a finding of the verdict, not a look that was refused.
_FINDINGS = frozenset({DumpFailure.GONE, DumpFailure.ZOMBIE, DumpFailure.D_STATE})


@dataclass(frozen=True, slots=True)
class Refusal:
    """`ranks` could not be looked at, all for the same reason."""

    ranks: tuple[int, ...]
    kind: DumpFailure
    text: str
    remedy: str
    meanwhile: str


def refusals(evidence: Iterable[RankEvidence]) -> list[Refusal]:
    """One for each cause and remedy, most ranks first."""
    folded: dict[tuple[DumpFailure, str], list[RankEvidence]] = {}
    for one in evidence:
        process = one.process
        if process is None or process.failure is None or process.failure in _FINDINGS:
            continue
        folded.setdefault((process.failure, process.remedy), []).append(one)
    found = [
        Refusal(
            tuple(one.rank for one in ranks),
            kind,
            _text(ranks) or str(kind),
            remedy.replace("PID", str(ranks[0].pid)),
            _meanwhile(ranks),
        )
        for (kind, remedy), ranks in folded.items()
    ]
    return sorted(found, key=lambda refusal: (-len(refusal.ranks), refusal.ranks))


def _text(ranks: list[RankEvidence]) -> str:
    """What was said, of the first rank where it differs: a thousand hosts are not named one by one."""
    texts = dict.fromkeys(one.process.failure_text for one in ranks if one.process is not None)
    first = next(iter(texts), "")
    return first if len(texts) < 2 else f"{first} (and {len(texts) - 1:,} more alike)"


def _meanwhile(ranks: list[RankEvidence]) -> str:
    """What the other channels say of ranks without a stack."""
    known = []
    beats = [one.beat for one in ranks if one.beat is not None]
    if beats:
        last = max(beats, key=lambda beat: beat.t)
        known.append(f"last heartbeat at step {last.step:,}" + (f" in {last.phase}" if last.phase else ""))
    states = sorted({one.proc.state for one in ranks if one.proc.state})
    if states:
        known.append(f"process state {', '.join(states)}")
    return ", ".join(known)


def other_channels(evidence: Iterable[RankEvidence]) -> dict[str, tuple[int, ...]]:
    """The ranks whose stacks were had without py-spy, by who wrote them."""
    found: dict[str, list[int]] = {}
    for one in evidence:
        if one.process is not None and one.process.source in CHANNELS:
            found.setdefault(CHANNELS[one.process.source], []).append(one.rank)
    return {channel: tuple(ranks) for channel, ranks in found.items()}
