"""A run in the formats of others: every step as CSV, the newest figures as an OpenMetrics text."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ftdash.monitor.records import Meta, Step, decode_lines, decoder, to_float
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import GpuState, RankPhase, RankState, RunState

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 4 << 20  # a longer "line" is no record

COLUMNS = (
    "rank",
    "host",
    "step",
    "t",
    "epoch",
    "loss",
    "aux_loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "allocated",
    "reserved",
    "peak",
    "peak_reserved",
)


@dataclass(slots=True)
class Exported:
    """What a CSV export did."""

    rows: int = 0
    skipped: int = 0  # lines that were no records


def write_csv(run: RunDir, out: IO[str]) -> Exported:
    """One row a step and rank, ranks one after another, in constant memory. NaN is "nan", unknown empty."""
    done = Exported()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rank, path in rank_files(run):
        host = ""
        for piece in _pieces(path):
            records, garbage = decode_lines(decoder, piece)
            done.skipped += garbage
            for record in records:
                if isinstance(record, Meta):
                    host = record.host
                elif isinstance(record, Step):
                    writer.writerow(_row(rank, host, record))
                    done.rows += 1
    return done


def rank_files(run: RunDir) -> list[tuple[int, Path]]:
    """The telemetry files of ranks, by rank."""
    found = []
    for path in run.telemetry.glob("rank-*.jsonl"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and path.is_file():
            found.append((int(number), path))
    return sorted(found)


def _pieces(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, about a megabyte at a time; a half-written last line is left out."""
    rest = b""
    try:
        with path.open("rb") as handle:
            while piece := handle.read(CHUNK_BYTES):
                data = rest + piece
                cut = data.rfind(b"\n") + 1
                rest = data[cut:]
                if cut:
                    yield data[:cut]
                if len(rest) > MAX_LINE_BYTES:
                    rest = b""
    except FileNotFoundError:
        return


def _row(rank: int, host: str, step: Step) -> list[object]:
    row: list[object] = [rank, host]
    for name in COLUMNS[2:]:
        value = getattr(step, name)
        row.append("" if value is None else value)
    return row


_LABEL_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def openmetrics(state: RunState) -> str:
    """The newest figures as OpenMetrics text, which Prometheus' node exporter reads from *.prom files.

    https://github.com/prometheus/OpenMetrics: one family at a time, label values escaped, ended by # EOF.
    """
    run = {"run": state.run}
    lines: list[str] = []

    def family(name: str, text: str, samples: Iterable[tuple[dict[str, str], float | int | None]]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# TYPE ftdash_{name} gauge")
            lines.append(f"# HELP ftdash_{name} {text}")
            lines.extend(f"ftdash_{name}{_labels({**run, **labels})} {_value(v)}" for labels, v in known)

    def per_rank(name: str, text: str, attribute: str) -> None:
        family(name, text, ((_who(rank), getattr(rank, attribute)) for rank in state.ranks))

    family("run_info", "1, with the state as a label.", [({"state": str(state.state)}, 1)])
    family("run_step", "Optimizer steps that all ranks have done.", [({}, state.step)])
    family("run_loss", "Mean loss over ranks.", [({}, state.loss)])
    family("run_tokens_per_second", "Label tokens per second of all ranks.", [({}, state.tokens_per_s)])
    per_rank("rank_step", "Optimizer steps of this rank.", "step")
    per_rank("rank_loss", "Loss of this rank's newest step.", "loss")
    per_rank("rank_tokens_per_second", "Label tokens per second of this rank.", "tokens_per_s")
    per_rank("rank_step_seconds", "Duration of the newest step.", "step_s")
    per_rank("rank_data_seconds", "Time that the newest step waited for data.", "data_s")
    per_rank("rank_memory_used_bytes", "GPU memory in use, or resident memory on CPU.", "memory_used")
    per_rank("rank_heartbeat_age_seconds", "Time since this rank's last sign of progress.", "heartbeat_age_s")
    family(
        "rank_up",
        "1 while the rank's process lives.",
        ((_who(rank), int(rank.state is not RankPhase.DEAD)) for rank in state.ranks),
    )
    for name, text, attribute in (
        ("gpu_memory_used_bytes", "Memory in use.", "memory_used"),
        ("gpu_memory_total_bytes", "Memory of the GPU.", "memory_total"),
        ("gpu_utilization_percent", "Utilisation as NVML gives it.", "util"),
        ("gpu_power_watts", "Power draw.", "power_w"),
        ("gpu_temperature_celsius", "Core temperature.", "temp_c"),
    ):
        family(name, text, ((_which(gpu), getattr(gpu, attribute)) for gpu in state.gpus))
    family(
        "gpu_up",
        "0 when the GPU is lost or in error.",
        ((_which(g), int(g.state == "ok")) for g in state.gpus),
    )
    family(
        "expert_imbalance",
        "Largest expert load over the ideal one.",
        (({"layer": str(layer.layer)}, layer.imbalance) for layer in state.experts),
    )
    counts: dict[tuple[str, str], int] = {}
    for alert in state.alerts:
        counts[(alert.code, alert.severity)] = counts.get((alert.code, alert.severity), 0) + 1
    family(
        "alerts",
        "Alerts that hold now.",
        (({"code": code, "severity": severity}, n) for (code, severity), n in sorted(counts.items())),
    )
    return "\n".join([*lines, "# EOF", ""])


def _who(rank: RankState) -> dict[str, str]:
    return {"rank": str(rank.rank), "host": rank.host}


def _which(gpu: GpuState) -> dict[str, str]:
    labels = {"host": gpu.host, "gpu": str(gpu.index), "uuid": gpu.uuid}
    return labels if gpu.mig_index is None else {**labels, "instance": str(gpu.mig_index)}


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _value(value: float | int) -> str:
    number = to_float(value)
    if number is None or math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(value)
