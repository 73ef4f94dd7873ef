"""What a rehearsal proved on the CPU, and what only the real machine can show."""

from __future__ import annotations

from dataclasses import dataclass

from ftdash.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`proved` and `not_proved` are sentences. A rehearsal that failed raises instead of returning one."""

    plan: Plan  # the small plan that ran
    run_dir: str
    proved: tuple[str, ...]
    not_proved: tuple[str, ...]
    seconds: float
