"""A rank's last sign of progress, and how long its steps take, from the run's telemetry."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from ftdash.monitor.beat import read_beat
from ftdash.monitor.diagnosis.model import Beat
from ftdash.monitor.records import Step, decode_lines, decoder

_RECENT_BYTES = 64 << 10  # some 200 steps
_FEWEST_STEPS = 3  # the first ones warm up: fewer have no pace yet


def last_beat(telemetry: Path, rank: int) -> Beat | None:
    """None if it was never heard. Its last step where its beat is out of reach (on another machine)."""
    steps = _recent_steps(telemetry / f"rank-{rank}.jsonl")
    found = read_beat(telemetry / f"rank-{rank}.beat")
    if found is not None:
        beat = Beat(found.t, found.step, found.phase)
    elif steps:
        beat = Beat(steps[-1].t, steps[-1].step)
    else:
        return None
    taken = [step.step_s for step in steps if step.step_s > 0]
    if len(taken) >= _FEWEST_STEPS:
        beat.usual_s, beat.longest_s = median(taken), max(taken)
    return beat


def _recent_steps(path: Path) -> list[Step]:
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - _RECENT_BYTES))
            data = handle.read(_RECENT_BYTES)
    except OSError:
        return []
    complete = data[: data.rfind(b"\n") + 1]
    if size > _RECENT_BYTES:
        complete = complete[complete.find(b"\n") + 1 :]
    records, _ = decode_lines(decoder, complete)
    return [record for record in records if isinstance(record, Step)]
