"""What one check found: the shape that is kept below tests/data/gpu, and the errors that fail it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
DATA = Path(__file__).parents[1] / "data" / "gpu"
# Relative errors past which a configuration fails.
MEMORY_LIMIT = 0.15
SPEED_LIMIT = 0.35


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted or measured. Memory in bytes: torch's two peaks, the device's; None where nothing tells."""

    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    process: int | None = None  # NVML's figure of the process alone, where it names one
    tokens_per_s: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration; `error` says why it did not train, `left_out` why it was not tried."""

    name: str
    plan: dict[str, Any]
    model: dict[str, Any]  # its config.json
    total_params: int
    trainable_params: int
    predicted: Figures
    measured: Figures
    steps: int
    losses: list[float]
    error: str = ""
    left_out: str = ""

    def misses(self) -> dict[str, float]:
        """predicted / measured - 1 by figure, for those past their limit."""
        found = {}
        for name, limit in (
            ("allocated", MEMORY_LIMIT),
            ("reserved", MEMORY_LIMIT),
            ("device", MEMORY_LIMIT),
            ("tokens_per_s", SPEED_LIMIT),
        ):
            error = self.relative_error(name)
            if error is not None and abs(error) > limit:
                found[name] = error
        return found

    def relative_error(self, figure: str) -> float | None:
        measured, predicted = getattr(self.measured, figure), getattr(self.predicted, figure)
        return None if measured is None or predicted is None or not measured else predicted / measured - 1


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the check. `dry`: on the CPU with tiny sizes, where no figure is comparable."""

    v: int
    date: str
    gpu: str  # the product's name as the driver gives it, "cpu" in a dry run
    plan_gpu: str  # the planner's name for it
    memory_bytes: int
    driver: str
    versions: dict[str, str]
    dry: bool
    rows: list[Row]


def load(path: Path) -> Result:
    """A kept result. Raises ValueError naming the file when it is none."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if found.v != FORMAT:
        raise ValueError(f"{path}: format {found.v}, this check reads {FORMAT}")
    return found


def kept() -> list[Path]:
    """The kept results, one file a GPU and date."""
    return sorted(DATA.glob("*.json"))


def failures(result: Result) -> list[str]:
    """Why the check fails, one line each; a dry run fails only where a configuration did not train."""
    lines = []
    for row in result.rows:
        if row.error:
            lines.append(f"{row.name}: {row.error}")
        elif not result.dry:
            lines += [f"{row.name}: {name} is off by {error:+.1%}" for name, error in row.misses().items()]
    return lines
