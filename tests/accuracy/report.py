"""Errors of the planner against published runs: median, 90th percentile, shares, misses, by source and by
half."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ftdash.engine.plan import PlanError
from ftdash.engine.planner import Verdict, evaluate
from ftdash.engine.planner.result import Prediction
from tests.accuracy.misses import MENDED_SINCE, WHY
from tests.accuracy.rows import Inexpressible, Row, is_fitted, plan_of

GIB = 2**30
OPTIMISTIC = -0.10  # a plan this far under the measurement says "fits" where it may not


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row beside its plan. Errors are signed shares of the measured value."""

    row: Row
    prediction: Prediction | None
    reason: str = ""

    @property
    def planned_gib(self) -> float | None:
        if self.prediction is None:
            return None
        memory = self.prediction.memory
        return {"reserved": memory.reserved, "allocated": memory.allocated, "device": memory.device}[
            self.row.mem_kind
        ] / GIB

    @property
    def memory_error(self) -> float | None:
        planned, measured = self.planned_gib, self.row.peak_gib
        return None if planned is None or measured is None else planned / measured - 1

    @property
    def in_range(self) -> bool:
        """Whether the measurement lies in the range that the plan reports."""
        planned, measured = self.planned_gib, self.row.peak_gib
        if self.prediction is None or planned is None or measured is None:
            return False
        low, high = self.prediction.device_range
        return low <= measured / planned * self.prediction.memory.device <= high

    @property
    def speed_error(self) -> float | None:
        if self.prediction is None or self.row.tokens_per_s is None:
            return None
        return self.prediction.time.tokens_per_s_per_gpu / self.row.tokens_per_s - 1

    @property
    def false_alarm(self) -> bool:
        """The run fitted, the plan says that it does not."""
        return self.prediction is not None and self.prediction.verdict is Verdict.DOES_NOT_FIT


def compare(rows: Iterable[Row]) -> list[Comparison]:
    found = []
    for row in rows:
        try:
            found.append(Comparison(row, evaluate(plan_of(row))))
        except (Inexpressible, PlanError) as error:
            found.append(Comparison(row, None, str(error)))
    return found


@dataclass(frozen=True, slots=True)
class Summary:
    count: int
    median: float
    p90: float
    within_10: float
    within_20: float
    optimistic: float


def summarise(errors: list[float]) -> Summary:
    """Of signed errors. Raises StatisticsError for none."""
    sizes = sorted(abs(e) for e in errors)
    n = len(sizes)
    return Summary(
        count=n,
        median=statistics.median(sizes),
        p90=sizes[min(n - 1, int(0.9 * n))],
        within_10=sum(e <= 0.10 for e in sizes) / n,
        within_20=sum(e <= 0.20 for e in sizes) / n,
        optimistic=sum(e < OPTIMISTIC for e in errors) / n,
    )


def errors_of(found: Iterable[Comparison], which: Callable[[Comparison], float | None]) -> list[float]:
    return [error for c in found if (error := which(c)) is not None]


def _line(title: str, errors: list[float], *, speed: bool) -> str:
    if not errors:
        return f"  {title:<58} no rows\n"
    s = summarise(errors)
    tail = "" if speed else f"  optimistic {s.optimistic:5.1%}"
    return (
        f"  {title:<58} n {s.count:3d}  median {s.median:6.1%}  p90 {s.p90:6.1%}"
        f"  in 10% {s.within_10:6.1%}  in 20% {s.within_20:6.1%}{tail}\n"
    )


def misses(found: Iterable[Comparison]) -> list[Comparison]:
    """The rows whose memory is more than 10 % off either way, the most optimistic first."""
    off = [c for c in found if c.memory_error is not None and abs(c.memory_error) > -OPTIMISTIC]
    return sorted(off, key=lambda c: c.memory_error or 0.0)


def render_apart(title: str, found: list[Comparison], why: Mapping[str, str], first_sight: str = "") -> str:
    """Runs that nobody had looked at while the planner was built, as a part of the report of their own.
    `first_sight` is what the planner said of them before any of them had taught it something."""
    trusted = [c for c in found if c.row.trusted]
    inexpressible = [c for c in trusted if c.prediction is None]
    alarms = [c.row.id for c in trusted if c.false_alarm]
    text = [
        f"\n{title}: {len(found)} runs, {len(trusted)} of high or medium confidence; "
        f"not expressible {len(inexpressible)}; false alarms {len(alarms)} {' '.join(alarms)}".rstrip()
        + "\n"
    ]
    text += [f"  {c.row.id}: {c.reason}\n" for c in inexpressible]
    if first_sight:
        text.append(f"  at first sight: {first_sight}\n")
    text.append(_line("peak memory", errors_of(trusted, lambda c: c.memory_error), speed=False))
    text.append(_line("tokens/s", errors_of(trusted, lambda c: c.speed_error), speed=True))
    for source in sorted({c.row.source for c in trusted}):
        part = [c for c in trusted if c.row.source == source]
        text.append(_line(f"  {source[-52:]}", errors_of(part, lambda c: c.memory_error), speed=False))
        if speeds := errors_of(part, lambda c: c.speed_error):
            text.append(_line("    tokens/s", speeds, speed=True))
    text += [
        f"  {c.row.id}: measured {c.row.peak_gib:.1f} GiB {c.row.mem_kind}, planned {c.planned_gib:.1f}"
        f" ({c.memory_error:+.0%}): {why.get(c.row.id, 'not understood')}\n"
        for c in misses(trusted)
    ]
    return "".join(text)


def render(rows: list[Row], found: list[Comparison], *, each_row: bool = False) -> str:
    """The whole report as text."""
    trusted = [c for c in found if c.row.trusted]
    halves = (
        ("all rows of high and medium confidence", trusted),
        ("sources that constants were fitted to", [c for c in trusted if is_fitted(c.row.source)]),
        ("sources kept out of fitting", [c for c in trusted if not is_fitted(c.row.source)]),
    )
    text = []
    inexpressible = [c for c in trusted if c.prediction is None]
    text.append(
        f"{len(rows)} published runs, {len(trusted)} of high or medium confidence; "
        f"not expressible {len(inexpressible)} ({len(inexpressible) / len(trusted):.1%})\n"
    )
    text += [f"  {c.row.id}: {c.reason}\n" for c in inexpressible]
    for what, which in (
        ("peak memory", lambda c: c.memory_error),
        ("tokens/s", lambda c: c.speed_error),
    ):
        speed = what == "tokens/s"
        text.append(f"\n{what}\n")
        text += [_line(title, errors_of(part, which), speed=speed) for title, part in halves]
        if not speed:
            sound = [c for c in trusted if c.row.id not in MENDED_SINCE]
            title = f"without {len(trusted) - len(sound)} of versions with a fault mended since"
            text.append(_line(title, errors_of(sound, which), speed=speed))
            inside = [c.in_range for c in trusted if c.memory_error is not None]
            text.append(f"  in the range that each plan reports {sum(inside)} of {len(inside)}\n")
        text.append("  by source\n")
        for source in sorted({c.row.source for c in trusted}):
            errors = errors_of([c for c in trusted if c.row.source == source], which)
            if errors:
                mark = "*" if is_fitted(source) else " "
                text.append(_line(f"{mark} {source[-54:]}", errors, speed=speed))
    text.append("  * fitted\n")
    alarms = [c.row.id for c in trusted if c.false_alarm]
    text.append(f"\nfalse alarms (planned not to fit, but ran): {len(alarms)} {' '.join(alarms)}\n")
    off = misses(trusted)
    text.append(f"memory off by more than 10 %: {len(off)}\n")
    text += [
        f"  {c.row.id}: measured {c.row.peak_gib:.1f} GiB {c.row.mem_kind}, planned {c.planned_gib:.1f}"
        f" ({c.memory_error:+.0%}){', in its range' if c.in_range else ''}: "
        f"{WHY.get(c.row.id, 'not understood')}\n"
        for c in off
    ]
    if each_row:
        text.append("\nevery row\n")
        text += [_row_line(c) for c in found]
    return "".join(text)


def _row_line(c: Comparison) -> str:
    f = c.row.fields
    if c.prediction is None:
        return f"  {c.row.id} {c.reason}\n"
    p = c.prediction
    memory = (
        ""
        if c.memory_error is None
        else (
            f"{c.row.mem_kind[:5]} {c.row.peak_gib:6.1f} planned {c.planned_gib:6.1f} {c.memory_error:+6.1%} "
            f"{p.memory.peak_phase}"
        )
    )
    speed = (
        ""
        if c.speed_error is None
        else (
            f"tok/s {c.row.tokens_per_s:7.0f} planned {p.time.tokens_per_s_per_gpu:7.0f} "
            f"{c.speed_error:+6.1%} {p.time.bound_by}"
        )
    )
    settings = (
        f"{f['model'][:18]} {f['parallelism'][:22]} b{f['micro_batch'][:3]} s{f['seq_len'][:6]} "
        f"{f['act_ckpt'][:9]} {f['compile'][:6]}"
    )
    mark = "*" if is_fitted(c.row.source) else " "
    return f" {mark}{c.row.id} {c.row.confidence[:3]} {settings:<72} {memory:<58} {speed}\n"
