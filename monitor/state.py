"""What a screen or a script sees of a run: one frozen value, made by the reader, drawn by everybody.

`RunReader.poll()` (ftdash.monitor.reader) builds a `RunState` from the run directory; widgets, `status`
and `watch` only show it. Bytes are bytes, ages and times are seconds, `None` means not known.

Ranks, GPUs and points are msgspec structs: a poll makes thousands of them, and a frozen dataclass of thirty
fields costs seven times as much to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from ftdash.monitor.rundir import Manifest


class RunPhase(StrEnum):
    """The state of a run as readers report it; `stalled` is derived, the others are stored."""

    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class RankPhase(StrEnum):
    """What one rank is doing."""

    STARTING = "starting"
    ALIVE = "alive"  # a process without a hook: no more is known
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    DATA = "data wait"
    SAVING = "checkpointing"
    EVALUATING = "evaluating"
    STALLED = "stalled"
    DEAD = "dead"
    FINISHED = "finished"


class GpuState(msgspec.Struct, frozen=True, gc=False):
    index: int
    uuid: str = ""
    name: str = ""
    state: str = "ok"  # ok, lost, error
    memory_used: int | None = None
    memory_total: int | None = None
    util: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temp_c: int | None = None
    sm_mhz: int | None = None
    error: str = ""
    memory_reserved: int | None = None
    unified: bool = False  # memory shared with the CPU: no capacity of its own
    mig_index: int | None = None  # a MIG instance; `index` is that of its GPU
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    host: str = ""
    throttle: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    unavailable: tuple[str, ...] = ()  # "power: not supported", "processes: no permission"


class RankState(msgspec.Struct, frozen=True, gc=False):
    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    step: int = 0
    epoch: float = 0.0
    lr: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    loss: float | None = None
    aux_loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0  # loss tokens since the start
    tokens_per_s: float | None = None
    memory_used: int | None = None  # NVML on a GPU, RSS on CPU
    memory_total: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    cpu: float | None = None  # percent of a core
    process_state: str = ""  # R, S, D, T, Z
    heartbeat_age_s: float | None = None
    phase: str = ""  # data, forward, backward, optimizer, save, eval, ... as the hook says
    state: RankPhase = RankPhase.STARTING
    descendants: tuple[int, ...] = ()
    cpus_allowed: int = 0  # processors that the process may run on, 0 when not known
    loader_workers: int = 0
    omp_threads: int = 0  # OMP_NUM_THREADS, 0 when not set
    gpu: GpuState | None = None
    gpu_unsure: str = ""  # "mapping unsure: ...", when CUDA's order of the GPUs is not known


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Tokens per expert of one MoE layer, summed over ranks, since the last record of each."""

    layer: int
    counts: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Largest load over the ideal (mean) load; 1.0 is even. 0.0 without tokens."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Alert:
    code: str
    severity: str  # note, warning, error
    text: str
    ranks: tuple[int, ...] = ()
    t: float = 0.0


class RoutingPoint(msgspec.Struct, frozen=True, gc=False):
    """How evenly one rank's tokens were routed up to a step, as means over the layers."""

    step: int
    variation: float  # coefficient of variation of the load: 0 is even
    entropy: float  # over its maximum: 1 is even, 0 is one expert for all


class Point(msgspec.Struct, frozen=True, gc=False):
    """One step of the whole run: mean loss over ranks, summed tokens/s, largest memory."""

    step: int
    t: float
    loss: float | None
    tokens_per_s: float | None
    memory_used: int | None = None
    grad_norm: float | None = None
    tokens: int = 0  # loss tokens of all ranks since the start


@dataclass(frozen=True, slots=True)
class RunState:
    run: str
    path: str
    manifest: Manifest
    state: RunPhase
    now: float
    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    ranks: tuple[RankState, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    experts: tuple[ExpertLayer, ...] = ()
    points: tuple[Point, ...] = ()  # bounded; the newest last
    routing: tuple[RoutingPoint, ...] = ()  # bounded; the newest last; of the first rank with experts
    alerts: tuple[Alert, ...] = ()
    notices: tuple[str, ...] = ()  # what was skipped or could not be read
    batch: int | None = None  # sequences in one optimizer step over all ranks
    tokens_per_step: float | None = None  # measured mean of loss tokens over all ranks
    measured: dict[str, float] = field(default_factory=dict)
