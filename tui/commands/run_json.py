"""A run as the JSON that scripts get, and as the lines that people get without a screen."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from ftdash.engine.launch.again import offered
from ftdash.engine.launch.reading import reader_for
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RankState, RunState
from ftdash.tui import format as fmt


def print_json(value: Any) -> None:
    """One JSON document on stdout; non-finite numbers as the strings "nan", "inf" and "-inf"."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """The value with non-finite floats turned into strings, which JSON can carry."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def read_once(run: RunDir) -> RunState:
    """The run as it is now, its whole history read. Raises RunError."""
    run.check_owner()
    return offered(reader_for(run).read_whole())


def run_summary(run: RunDir) -> dict[str, Any]:
    """What `launch --json` prints."""
    return {"run": run.run_id, "dir": str(run.path), "state": str(read_once(run).state)}


def status_json(state: RunState) -> dict[str, Any]:
    """What `status --json` prints."""
    return {
        "run": state.run,
        "dir": state.path,
        "state": str(state.state),
        "step": state.step,
        "max_steps": state.max_steps,
        "loss": state.loss,
        "tokens_per_s": state.tokens_per_s,
        "eta_s": state.eta_s,
        "ranks": [_rank_json(rank) for rank in state.ranks],
        "experts": [
            {"layer": layer.layer, "counts": list(layer.counts), "imbalance": layer.imbalance}
            for layer in state.experts
        ],
        "alerts": [
            {"code": alert.code, "severity": alert.severity, "ranks": list(alert.ranks), "text": alert.text}
            for alert in state.alerts
        ],
        "predicted": state.manifest.predicted or {},
        "measured": state.measured,
        "first_failing_rank": state.manifest.first_failing_rank,
        "exit_codes": exit_codes(state),
        "reason": state.manifest.reason,
        "notices": list(state.notices),
    }


def exit_codes(state: RunState) -> dict[str, int | None]:
    """Exit code per rank, and of the launcher; negative for a signal, as subprocess has it."""
    found: dict[str, int | None] = {
        str(end.rank): end.code for end in state.manifest.exits if end.rank is not None
    }
    found["launcher"] = state.manifest.exit_code
    return found


def _rank_json(rank: RankState) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "device": rank.device,
        "step": rank.step,
        "loss": rank.loss,
        "tokens_per_s": rank.tokens_per_s,
        "memory_used": rank.memory_used,
        "memory_total": rank.memory_total,
        "heartbeat_age_s": rank.heartbeat_age_s,
        "state": str(rank.state),
        "descendants": list(rank.descendants),
    }


def progress_line(state: RunState) -> str:
    """The run in one line: step, loss, throughput, the largest rank's memory."""
    steps = f"{state.step:,}/{state.max_steps:,}" if state.max_steps else f"{state.step:,}"
    loss = f"{state.loss:.4f}" if state.loss is not None else "-"
    rate = f"{state.tokens_per_s:,.0f}" if state.tokens_per_s is not None else "-"
    largest = max((rank.memory_used or 0 for rank in state.ranks), default=0)
    line = f"{state.state:<8} step {steps}  loss {loss}  {rate} tokens/s"
    return line + (f"  largest rank {fmt.size(largest)}" if largest else "")
