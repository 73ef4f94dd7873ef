"""What finished runs taught: context, allocator overhead, speed and link rates by GPU and model family.

The planner's constants are assumptions until a run was measured. `learn` compares what runs measured with
what was predicted for them, `save` stores it below $FTDASH_HOME, and `learned` gives it to the planner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ftdash.engine.planner.result import Prediction
from ftdash.monitor.home import home
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir, RunError, decode_json, write_atomic
from ftdash.monitor.state import RunPhase, RunState

FILE_VERSION = 1
MIN_STEPS = 10  # of a run; before that warm-up and compilation are most of what is measured
COMMUNICATION_SHARE = 0.3  # a link's rate shows only in runs that wait for it this much of a step


class Learned(msgspec.Struct, frozen=True, omit_defaults=True):
    """Medians over runs of one GPU and model family; None where no run could tell.

    Ratios are measured over predicted. Bytes are bytes, rates bytes a second and rank.
    """

    gpu: str  # as in `--gpu`, or "cpu"
    family: str  # qwen3, llama-3.1; "" is all families of this GPU
    runs: int
    context_bytes: int | None = None  # NVML's figure minus reserved: CUDA context, NCCL and other libraries
    reserved_over_allocated: float | None = None
    allocated_ratio: float | None = None
    reserved_ratio: float | None = None
    step_ratio: float | None = None
    mfu: float | None = None
    link_bytes_per_s: float | None = None
    run_ids: tuple[str, ...] = ()


class CalibrationFile(msgspec.Struct):
    """calibration.json."""

    v: int
    learned: list[Learned]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that was learned. `notice` says why nothing could be read, when that is so."""

    entries: tuple[Learned, ...] = ()
    notice: str = ""

    def get(self, gpu: str, family: str = "") -> Learned | None:
        """What is known of this GPU and family, else of this GPU with any family."""
        known = {(entry.gpu, entry.family): entry for entry in self.entries}
        return known.get((gpu, family)) or known.get((gpu, ""))


@dataclass(slots=True)
class _Measured:
    """One run's figures."""

    run_id: str
    gpu: str
    family: str
    values: dict[str, float] = field(default_factory=dict)


def calibration_path() -> Path:
    return home() / "calibration.json"


def learned(path: Path | None = None) -> Calibration:
    """What `save` stored; empty when nothing was. A broken file is a notice, never an error."""
    source = path or calibration_path()
    try:
        data = decode_json(source.read_bytes(), CalibrationFile)
    except FileNotFoundError:
        return Calibration()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return Calibration(notice=f"{source} cannot be used: {' '.join(str(error).split())}")
    if data.v != FILE_VERSION:
        return Calibration(notice=f"{source} has format {data.v}, this ftdash reads {FILE_VERSION}")
    return Calibration(tuple(data.learned))


def save(calibration: Calibration, path: Path | None = None) -> Path:
    """Store it, replacing what was there; returns where."""
    target = path or calibration_path()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = msgspec.json.encode(CalibrationFile(FILE_VERSION, list(calibration.entries)))
    write_atomic(target, msgspec.json.format(data, indent=2))
    return target


def learn(runs: Iterable[RunDir]) -> tuple[Calibration, list[str]]:
    """What these runs teach, and why some of them teach nothing (one line each)."""
    measured: list[_Measured] = []
    skipped: list[str] = []
    for run in runs:
        try:
            found = measure(RunReader(run).read_whole())
        except RunError as error:
            skipped.append(str(error))
            continue
        if isinstance(found, str):
            skipped.append(f"{run.run_id}: {found}")
        else:
            measured.append(found)
    groups: dict[tuple[str, str], list[_Measured]] = {}
    for entry in measured:
        groups.setdefault((entry.gpu, entry.family), []).append(entry)
        if entry.family:
            groups.setdefault((entry.gpu, ""), []).append(entry)
    return Calibration(tuple(_entry(*key, groups[key]) for key in sorted(groups))), skipped


@dataclass(frozen=True, slots=True)
class Corrected:
    """A prediction as earlier runs of its kind would have it; `because` says which, for a person."""

    allocated: int
    reserved: int
    context: int
    step_s: float
    tokens_per_s_per_gpu: float
    because: str

    @property
    def device(self) -> int:
        return self.reserved + self.context

    def to_json(self) -> dict[str, Any]:
        """Bytes and seconds, and which runs they come from."""
        return {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "context": self.context,
            "device": self.device,
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "because": self.because,
        }


def correct(prediction: Prediction, calibration: Calibration) -> Corrected | None:
    """The prediction times what was learned for its GPU and family; None when nothing was.

    Only what was measured is corrected; the rest stays as predicted.
    """
    family = model_family(prediction.plan.model or prediction.model.name)
    entry = calibration.get(prediction.plan.gpu, family)
    if entry is None:
        return None
    memory, step = prediction.memory, prediction.time
    slower = entry.step_ratio or 1.0
    runs = "1 run" if entry.runs == 1 else f"{entry.runs} runs"
    return Corrected(
        allocated=round(memory.allocated * (entry.allocated_ratio or 1.0)),
        reserved=round(memory.reserved * (entry.reserved_ratio or 1.0)),
        context=entry.context_bytes if entry.context_bytes is not None else memory.context,
        step_s=step.step_s * slower,
        tokens_per_s_per_gpu=step.tokens_per_s_per_gpu / slower,
        because=f"by {runs} of {entry.family or 'any model'} on {entry.gpu}",
    )


def model_family(name: str) -> str:
    """The family in a model's name: qwen3-30b-a3b is qwen3, llama-3.1-8b llama-3.1, tiny-moe tiny-moe."""
    lowered = name.rpartition("/")[2].lower()
    match = re.match(r"(.+?)-(?:\d+x)?\d+(?:\.\d+)?[bm]\b", lowered)
    return match[1] if match else lowered


def measure(state: RunState) -> _Measured | str:
    """One finished run against its own prediction, or why it cannot teach anything."""
    if state.state not in (RunPhase.FINISHED, RunPhase.STOPPED):
        return f"it is {state.state}: only runs that ended well teach"
    if state.step < MIN_STEPS:
        return f"{state.step} steps are too few ({MIN_STEPS} needed)"
    plan = state.manifest.plan
    if not plan:
        return "it has no plan: somebody else's command"
    on_cpu = not state.ranks or all(rank.device.startswith("cpu") for rank in state.ranks)
    entry = _Measured(
        run_id=state.run,
        gpu="cpu" if on_cpu else str(plan.get("gpu", "")),
        family=model_family(str(plan.get("model") or plan.get("config") or "")),
    )
    _put_memory(entry.values, state, on_cpu)
    _put_speed(entry.values, state, on_cpu)
    if not entry.values:
        return "nothing in it was both measured and predicted"
    return entry


def _put_memory(values: dict[str, float], state: RunState, on_cpu: bool) -> None:
    """Torch's counters and NVML's, which exist on GPUs only."""
    got = state.measured
    allocated, reserved, device = (got.get(name, 0.0) for name in ("allocated", "reserved", "device"))
    if on_cpu:
        return
    if allocated and reserved:
        values["reserved_over_allocated"] = reserved / allocated
    if device and reserved and device > reserved:
        values["context_bytes"] = device - reserved
    for name, value in (("allocated", allocated), ("reserved", reserved)):
        planned = _number(state.manifest.predicted, "memory", name)
        if value and planned:
            values[f"{name}_ratio"] = value / planned


def _put_speed(values: dict[str, float], state: RunState, on_cpu: bool) -> None:
    """Step time against the prediction, which is for the planned GPU: a CPU run has nothing to compare."""
    if on_cpu:
        return
    predicted = state.manifest.predicted
    step_s, planned_s = state.measured.get("step_s", 0.0), _number(predicted, "time", "step_s")
    if not step_s or not planned_s:
        return
    values["step_ratio"] = step_s / planned_s
    if mfu := _number(predicted, "time", "mfu"):
        values["mfu"] = mfu * planned_s / step_s
    compute_s, sent = (
        _number(predicted, "time", "compute_s"),
        _number(predicted, "traffic", "per_step_bytes_per_rank"),
    )
    waited_s = step_s - (compute_s or 0.0)
    if compute_s and sent and waited_s > COMMUNICATION_SHARE * step_s:
        values["link_bytes_per_s"] = sent / waited_s


def _number(predicted: Mapping[str, Any] | None, group: str, name: str) -> float | None:
    value = ((predicted or {}).get(group) or {}).get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _entry(gpu: str, family: str, members: list[_Measured]) -> Learned:
    def middle(name: str) -> float | None:
        found = [entry.values[name] for entry in members if name in entry.values]
        return median(found) if found else None

    context = middle("context_bytes")
    return Learned(
        gpu=gpu,
        family=family,
        runs=len(members),
        context_bytes=round(context) if context is not None else None,
        reserved_over_allocated=middle("reserved_over_allocated"),
        allocated_ratio=middle("allocated_ratio"),
        reserved_ratio=middle("reserved_ratio"),
        step_ratio=middle("step_ratio"),
        mfu=middle("mfu"),
        link_bytes_per_s=middle("link_bytes_per_s"),
        run_ids=tuple(entry.run_id for entry in members[-20:]),
    )
