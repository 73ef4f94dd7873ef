"""Runs a plan's simulation in a subprocess; its peak is extrapolated over depth where that is exact."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ftdash.engine.model import load
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Plan
from ftdash.engine.simulate.request import Answer, Peak, Request, Run, SimulationError, request_of


@dataclass(frozen=True, slots=True)
class Simulation:
    """The peak of one rank in bytes, as max_memory_allocated would say, and when it occurs."""

    allocated: int
    breakdown: dict[str, int]
    peak_part: str
    parts: dict[str, int]  # the peak of each part of the step
    trainable_params: int
    simulated_layers: tuple[int, ...]
    seconds: float


def simulate(plan: Plan, on_progress: Callable[[str], None] | None = None) -> Simulation:
    """Simulate one optimizer step of `plan`. Raises SimulationError, ModelError.

    Memory within each part of the step is linear in depth when all blocks are equal; two depths then
    give every other one exactly. Otherwise the whole model is run.
    """
    started = time.monotonic()
    request = request_of(plan)
    shape = load.resolve(plan)
    runs = []
    for answer in _converse(request):
        if answer.error:
            raise SimulationError(f"simulation failed: {answer.error}")
        if answer.run is not None:
            runs.append(answer.run)
        elif on_progress is not None:
            on_progress(answer.progress)
    if len(runs) != len(request.layer_counts):
        raise SimulationError("simulation ended without a result: killed, perhaps for lack of memory")
    _same_model(runs, request, shape)
    return read_runs(runs, shape.layers, time.monotonic() - started)


def _same_model(runs: list[Run], request: Request, shape: ModelShape) -> None:
    """What was simulated must be what is planned: the class's own count against the shape's."""
    built = _linear(runs[0].total_params, runs[-1].total_params, runs, shape.layers)
    if request.lora_rank:
        built -= _linear(runs[0].trainable_params, runs[-1].trainable_params, runs, shape.layers)
    if not shape.unplaced and built != shape.total_params:
        raise SimulationError(
            f"simulation built {built:,} parameters where {shape.name} has {shape.total_params:,}"
        )


def read_runs(runs: list[Run], layers: int, seconds: float) -> Simulation:
    """The peak at a depth of `layers` from one run of that depth or from two others."""
    peaks = runs[0].peaks if len(runs) == 1 else _extrapolate(runs[0], runs[1], layers)
    part = max(peaks, key=lambda name: peaks[name].total)
    return Simulation(
        allocated=peaks[part].total,
        breakdown=peaks[part].breakdown,
        peak_part=part,
        parts={name: peak.total for name, peak in peaks.items()},
        trainable_params=_linear(runs[0].trainable_params, runs[-1].trainable_params, runs, layers),
        simulated_layers=tuple(run.layers for run in runs),
        seconds=seconds,
    )


def _converse(request: Request) -> Iterator[Answer]:
    command = [sys.executable, "-m", "ftdash.engine.simulate.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(request))
            process.stdin.close()
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Answer)
        finally:
            process.kill()


def _linear(low: int, high: int, runs: list[Run], layers: int) -> int:
    if len(runs) == 1:
        return low
    return low + (high - low) * (layers - runs[0].layers) // (runs[1].layers - runs[0].layers)


def _extrapolate(low: Run, high: Run, layers: int) -> dict[str, Peak]:
    """The peaks at `layers` from those at two depths, part by part; inner blocks lie between the edges."""
    runs = [low, high]
    peaks = {}
    for part in low.peaks.keys() & high.peaks.keys():
        a, b = low.peaks[part], high.peaks[part]
        names = a.breakdown.keys() | b.breakdown.keys()
        breakdown = {
            name: _linear(a.breakdown.get(name, 0), b.breakdown.get(name, 0), runs, layers) for name in names
        }
        peaks[part] = Peak(_linear(a.total, b.total, runs, layers), breakdown)
    return peaks
