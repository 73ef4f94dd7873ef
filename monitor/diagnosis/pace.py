"""A rank's last sign of progress, and how long its steps take, from the run's telemetry."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from ftdash.monitor.beat import read_beat
from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.model import Beat, RankEvidence
from ftdash.monitor.records import Step, decode_lines, decoder

_RECENT_BYTES = 64 << 10  # some 200 steps
_LAST_BYTES = 4 << 10
_FEWEST_STEPS = 3  # the first ones warm up: fewer have no pace yet


def last_beat(telemetry: Path, rank: int) -> Beat | None:
    """None if it was never heard. Its last step where its beat is out of reach (on another machine)."""
    found = read_beat(telemetry / f"rank-{rank}.beat")
    if found is not None:
        return Beat(found.t, found.step, found.phase)
    steps = _recent_steps(telemetry, rank, _LAST_BYTES)
    return Beat(steps[-1].t, steps[-1].step) if steps else None


def add_pace(telemetry: Path, ranks: Iterable[RankEvidence]) -> None:
    """Write into the beats of ranks outside of any collective what their steps took: only theirs is asked."""
    for evidence in ranks:
        if evidence.beat is None or frames.read_threads(evidence.threads).in_collective:
            continue
        taken = [s.step_s for s in _recent_steps(telemetry, evidence.rank, _RECENT_BYTES) if s.step_s > 0]
        if len(taken) >= _FEWEST_STEPS:
            evidence.beat.usual_s, evidence.beat.longest_s = median(taken), max(taken)


def _recent_steps(telemetry: Path, rank: int, most_bytes: int) -> list[Step]:
    try:
        with (telemetry / f"rank-{rank}.jsonl").open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - most_bytes))
            data = handle.read(most_bytes)
    except OSError:
        return []
    complete = data[: data.rfind(b"\n") + 1]
    if size > most_bytes:
        complete = complete[complete.find(b"\n") + 1 :]
    records, _ = decode_lines(decoder, complete)
    return [record for record in records if isinstance(record, Step)]
