"""Two runs side by side: speed, memory of each rank, checkpoints, and loss at the same number of tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftdash.engine.checkpoint.recognise import Checkpoint, CheckpointKind, find
from ftdash.monitor.records import Meta, RankSample, Step, decoder, to_float
from ftdash.monitor.rundir import RunDir

# Losses of two runs that differ by no more than this fraction are taken for the same training.
SAME_LOSS = 0.02
POINTS = 20


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. Token counts are label tokens over all ranks; rates leave out each rank's first step."""

    run: str
    strategy: str
    variant: str
    world_size: int
    steps: int
    tokens: int
    tokens_per_s: float
    step_s: float
    peak_bytes: tuple[int, ...]  # by rank: torch's peak on a GPU, the largest resident set seen on a CPU
    peak_kind: str  # allocated, resident or empty
    checkpoints: tuple[str, ...]  # kinds, as they lie on disk
    conversion: str
    loads: str
    curve: tuple[tuple[int, float], ...]  # (tokens so far over all ranks, mean loss of the step)


@dataclass(frozen=True, slots=True)
class LossPoint:
    tokens: int
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    left: RunFigures
    right: RunFigures
    loss: tuple[LossPoint, ...]
    largest_loss_gap: float  # relative, over the common tokens
    changed: tuple[str, ...]  # choices that differ, as "field: left, right"
    verdict: str


def compare_runs(left: RunDir, right: RunDir) -> RunComparison:
    """Read both runs whole. Raises RunError when one cannot be read."""
    first, second = figures(left), figures(right)
    points = _aligned(first.curve, second.curve)
    gap = max((_gap(point) for point in points), default=math.nan)
    return RunComparison(first, second, tuple(points), gap, _changed(left, right), _verdict(points, gap))


def figures(run: RunDir) -> RunFigures:
    """One run's figures. Raises RunError."""
    manifest = run.read_manifest()
    ranks = [_read_rank(path) for path in sorted(run.telemetry.glob("rank-*.jsonl"), key=_rank_of)]
    metas = [meta for meta, _ in ranks if meta is not None]
    steps = [found for _, found in ranks if found]
    checkpoints = (
        find(Path(manifest.output_dir)) if manifest.output_dir and Path(manifest.output_dir).is_dir() else []
    )
    meta = metas[0] if metas else None
    timed = [step for found in steps for step in found[1:]]
    seconds = max((sum(step.step_s for step in found[1:]) for found in steps), default=0.0)
    peaks, kind = tuple(max((step.peak for step in found), default=0) for found in steps), "allocated"
    if not any(peaks):
        peaks, kind = _resident(run, len(steps)), "resident"
    return RunFigures(
        run=run.run_id,
        strategy=meta.strategy if meta else str((manifest.plan or {}).get("strategy", "")),
        variant=meta.variant if meta else str((manifest.plan or {}).get("method", "")),
        world_size=meta.world_size if meta else manifest.world_size,
        steps=max((found[-1].step for found in steps), default=0),
        tokens=sum(step.tokens for found in steps for step in found),
        tokens_per_s=sum(step.tokens for step in timed) / seconds if seconds else 0.0,
        step_s=sum(step.step_s for step in timed) / len(timed) if timed else 0.0,
        peak_bytes=peaks,
        peak_kind=kind if any(peaks) else "",
        checkpoints=tuple(dict.fromkeys(str(checkpoint.kind) for checkpoint in checkpoints)),
        conversion=_conversion(checkpoints),
        loads=_loads(checkpoints),
        curve=_curve(steps),
    )


def _rank_of(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.stem)) or 0)


def _read_rank(path: Path) -> tuple[Meta | None, list[Step]]:
    """A rank's last meta record and its steps, the last record of a step winning after a resume."""
    meta, steps = None, {}
    if not path.is_file():  # a named pipe would wait for a writer
        return None, []
    for line in path.read_bytes().splitlines():
        try:
            record: Any = decoder.decode(line)
        except ValueError:
            continue
        if isinstance(record, Meta) and (record.wrapped_class or meta is None):
            meta = record
        elif isinstance(record, Step):
            steps[record.step] = record
    return meta, [steps[number] for number in sorted(steps)]


def _resident(run: RunDir, ranks: int) -> tuple[int, ...]:
    """The largest resident set of each rank that the nodes' agents sampled."""
    largest = dict.fromkeys(range(ranks), 0)
    for path in run.telemetry.glob("node-*.jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                record: Any = decoder.decode(line)
            except ValueError:
                continue
            if isinstance(record, RankSample):
                largest[record.rank] = max(largest.get(record.rank, 0), record.rss)
    return tuple(largest[rank] for rank in sorted(largest))


def _curve(ranks: list[list[Step]]) -> tuple[tuple[int, float], ...]:
    """Loss of each step, averaged over the ranks that told one, against tokens of all ranks so far."""
    by_step: dict[int, list[Step]] = {}
    for steps in ranks:
        for step in steps:
            by_step.setdefault(step.step, []).append(step)
    total, points = 0, []
    for number in sorted(by_step):
        total += sum(step.tokens for step in by_step[number])
        losses = [loss for step in by_step[number] if (loss := to_float(step.loss)) is not None]
        if losses and all(map(math.isfinite, losses)):
            points.append((total, sum(losses) / len(losses)))
    return tuple(points)


def _aligned(left: tuple[tuple[int, float], ...], right: tuple[tuple[int, float], ...]) -> list[LossPoint]:
    """Both losses at the same tokens, between the later start and the earlier end, by interpolation."""
    if not left or not right:
        return []
    start, end = max(left[0][0], right[0][0]), min(left[-1][0], right[-1][0])
    if end < start:
        return []
    count = min(POINTS, len(left), len(right))
    places = [start + (end - start) * index // max(1, count - 1) for index in range(count)]
    return [LossPoint(tokens, _at(left, tokens), _at(right, tokens)) for tokens in dict.fromkeys(places)]


def _at(curve: tuple[tuple[int, float], ...], tokens: int) -> float:
    after = bisect_right(curve, tokens, key=lambda point: point[0])
    if after == 0:
        return curve[0][1]
    if after == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[after - 1], curve[after]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0) if x1 > x0 else y1


def _gap(point: LossPoint) -> float:
    return abs(point.left - point.right) / max(abs(point.left), abs(point.right), 1e-12)


def _verdict(points: list[LossPoint], gap: float) -> str:
    if not points:
        return "no common tokens: the losses cannot be compared"
    if gap <= SAME_LOSS:
        return f"the same training: losses differ by at most {gap:.1%} at equal tokens"
    return f"training changed: losses differ by up to {gap:.1%} at equal tokens"


def _conversion(checkpoints: list[Checkpoint]) -> str:
    kinds = {checkpoint.kind for checkpoint in checkpoints}
    if CheckpointKind.DCP in kinds:
        return "merge DCP shards (one step)"
    if CheckpointKind.DEEPSPEED in kinds:
        return "zero_to_fp32, universal for another rank count"
    return "none needed" if kinds else "no checkpoint"


def _loads(checkpoints: list[Checkpoint]) -> str:
    """Which of them from_pretrained reads as they are."""
    ready = [c for c in checkpoints if c.kind in (CheckpointKind.FULL, CheckpointKind.ADAPTER) and c.whole]
    return ready[-1].path.name if ready else "none before a conversion"


def _changed(left: RunDir, right: RunDir) -> tuple[str, ...]:
    first, second = left.read_manifest().plan or {}, right.read_manifest().plan or {}
    names = [name for name in first if name in second and first[name] != second[name]]
    return tuple(f"{name}: {first[name]}, {second[name]}" for name in names)
