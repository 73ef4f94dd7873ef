"""States and histories of runs as the reader would make them, from a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.history import RunHistory
from ftdash.monitor.records import Step, number
from ftdash.monitor.rundir import Manifest
from ftdash.monitor.state import Alert, RankPhase, RankState, RunPhase, RunState


def run_state(ranks: int = 2, step: int = 0, **more: Any) -> RunState:
    """A healthy running state with that many ranks on one host."""
    members = tuple(
        RankState(
            rank=i,
            host="gpu-a",
            pid=100 + i,
            device="cpu",
            step=step,
            loss=2.0,
            step_s=1.0,
            heartbeat_age_s=0.5,
            state=RankPhase.COMPUTE,
            process_state="S",
            cpu=95.0,
        )
        for i in range(ranks)
    )
    state = RunState(
        run="r", path="/nonexistent", manifest=Manifest(run="r"), state=RunPhase.RUNNING, now=1e9, step=step
    )
    return replace(state, ranks=members, **more)


def with_rank(state: RunState, rank: int, /, **changes: Any) -> RunState:
    """The state with one rank changed."""
    members = tuple(msgspec.structs.replace(r, **changes) if r.rank == rank else r for r in state.ranks)
    return replace(state, ranks=members)


def step_record(step: int, **more: Any) -> Step:
    """An ordinary step of one second."""
    values: dict[str, Any] = {
        "loss": 2.0 + 0.001 * (step % 7) - 0.01 * step,
        "grad_norm": 1.0 + 0.01 * (step % 5),
        "tokens": 1000,
        "step_s": 1.0,
        "data_s": 0.01,
        "forward_s": 0.3,
        "backward_s": 0.6,
        "optimizer_s": 0.05,
    }
    values.update(more)
    for name in ("loss", "grad_norm"):
        values[name] = number(values[name])
    return Step(t=1e9 + step, step=step, **values)


def play(
    steps: int, ranks: int = 2, change: Callable[[int, int], Mapping[str, Any]] | None = None
) -> tuple[RunHistory, RunState]:
    """A history of that many steps; `change(rank, step)` gives what differs from an ordinary step."""
    history = RunHistory()
    state = run_state(ranks)
    history.observe(state, look=False)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            history.add_step(rank, step_record(step, **(change(rank, step) if change else {})))
    state = run_state(ranks, step=steps)
    return history, state


def codes(state: RunState, history: RunHistory) -> list[str]:
    """The codes of the alerts that hold."""
    return [alert.code for alert in find_alerts(state, history)]


def only(state: RunState, history: RunHistory) -> Alert:
    """The one alert that holds. Fails when there are none or several."""
    found = find_alerts(state, history)
    assert len(found) == 1, [alert.text for alert in found]
    return found[0]
