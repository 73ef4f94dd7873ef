"""What a plan costs, as frozen values: memory by phase and term, traffic, time, verdict, advice.

All sizes are bytes (integers) on the rank that needs most, all times seconds.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from ftdash.engine.plan import Plan


class Verdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does-not-fit"


class PhaseName(StrEnum):
    LOAD = "load"
    FORWARD_END = "forward-end"
    BACKWARD_START = "backward-start"
    BACKWARD_END = "backward-end"
    OPTIMIZER_STEP = "optimizer-step"
    SAVE = "save"


class Term(StrEnum):
    """What a byte is held for; every term of a phase has one of these names."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "gathered"
    BUFFERS = "buffers"


class ModelCounts(msgspec.Struct, frozen=True):
    name: str
    total_params: int
    active_params: int
    trainable_params: int


class ModelStates(msgspec.Struct, frozen=True):
    """ZeRO's accounting: 2 + 2 + 12 bytes a trainable parameter, sharded by stage (Rajbhandari et al.
    2020)."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


class Phase(msgspec.Struct, frozen=True):
    """What is allocated at one moment of a step, by term."""

    name: PhaseName
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    buffers: int = 0
    cached: int = 0  # held by the allocator for other phases and streams, on top of `total`

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.gathered
            + self.buffers
        )

    def terms(self) -> tuple[tuple[Term, int], ...]:
        return tuple((term, getattr(self, term.value)) for term in Term)


class HostRam(msgspec.Struct, frozen=True):
    """Bytes of host memory on one node, by phase, with what the processes themselves take."""

    loading: int
    loading_everywhere: int  # when every rank of the node loads the whole model for itself
    training: int
    saving_full: int  # while rank 0 holds a full state dict; sharded checkpoints stay at `training`

    def at(self, phase: PhaseName) -> int:
        """In one phase of the plan; a save is taken as one of a full state dict."""
        return {PhaseName.LOAD: self.loading, PhaseName.SAVE: self.saving_full}.get(phase, self.training)

    @property
    def peak(self) -> int:
        """Without a full state dict, which is a choice."""
        return max(self.loading, self.training)


class Memory(msgspec.Struct, frozen=True):
    """`allocated` and `reserved` are torch's two peaks, without the context; `device` is what NVML would
    say."""

    model_states: ModelStates
    phases: tuple[Phase, ...]
    peak_phase: PhaseName
    allocated: int
    reserved: int
    context: int  # CUDA context, libraries and NCCL buffers
    capacity: int
    host: HostRam
    imbalance: int = 0  # what the hottest rank of an MoE may need beyond `reserved`
    squeezed: bool = False  # it fits only because the allocator gives back what it would rather keep

    @property
    def host_ram_per_node(self) -> int:
        return self.host.peak

    @property
    def device(self) -> int:
        return self.reserved + self.context

    @property
    def headroom(self) -> int:
        return self.capacity - self.device

    @property
    def fits(self) -> bool:
        """Whether there is room without the allocator giving anything back."""
        return self.headroom >= 0 and not self.squeezed

    @property
    def peak(self) -> Phase:
        return next(phase for phase in self.phases if phase.name is self.peak_phase)


class Collective(msgspec.Struct, frozen=True):
    """One kind of collective: bytes that a rank sends in a whole step, over which link, for how long."""

    name: str
    link: str  # "nvlink", "pcie" or "network"
    step_bytes: int
    micro_step_bytes: int
    time_s: float
    exposed_s: float


class Traffic(msgspec.Struct, frozen=True):
    collectives: tuple[Collective, ...]

    @property
    def step_bytes(self) -> int:
        return sum(c.step_bytes for c in self.collectives)

    @property
    def micro_step_bytes(self) -> int:
        return sum(c.micro_step_bytes for c in self.collectives)

    def link_bytes(self, link: str) -> int:
        return sum(c.step_bytes for c in self.collectives if c.link == link)


class StepTime(msgspec.Struct, frozen=True):
    compute_s: float
    communication_s: float
    exposed_s: float
    step_s: float
    tokens_per_step: int
    tokens_per_s_per_gpu: float
    mfu: float
    bubble: float
    bound_by: str  # "compute", "nvlink", "pcie", "network" or "memory"
    useful_share: float = 1.0  # of the tokens above, those that are no padding

    @property
    def useful_tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s_per_gpu * self.useful_share

    def gpu_hours(self, tokens: float) -> float:
        """GPU-hours to train on so many tokens of data, on any number of GPUs of this plan's efficiency."""
        return tokens / self.useful_tokens_per_s_per_gpu / 3600


class Advice(msgspec.Struct, frozen=True):
    """One remedy or warning. `saves_bytes` is found by planning again with the remedy; 0 for a warning."""

    code: str
    text: str
    saves_bytes: int = 0
    speed: float = 1.0  # tokens/s with the remedy over tokens/s without
    plan: Plan | None = None  # the plan with the remedy applied


class Prediction(msgspec.Struct, frozen=True, dict=True):
    plan: Plan
    model: ModelCounts
    memory: Memory
    traffic: Traffic
    time: StepTime
    verdict: Verdict
    reduce_dtype: str
    device_range: tuple[int, int] = (0, 0)  # bytes: where `memory.device` lies in most runs of this class
    notes: tuple[str, ...] = ()

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would help, best first: found when it is first asked for, since every remedy is a plan."""
        from ftdash.engine.planner.advice import advise
        from ftdash.engine.planner.setting import setting_of

        return advise(setting_of(self.plan), self)

    def _useful(self) -> dict[str, Any]:
        """What of the tokens is data, where the plan says how long samples are."""
        time = self.time
        if self.plan.mean_len is None:
            return {}
        return {
            "tokens": {
                "processed_per_step": time.tokens_per_step,
                "useful_per_step": round(time.tokens_per_step * time.useful_share),
                "useful_share": time.useful_share,
                "useful_tokens_per_s_per_gpu": time.useful_tokens_per_s_per_gpu,
            }
        }

    def to_json(self) -> dict[str, Any]:
        """The fixed shape of `ftdash plan --json`, as plain values."""
        memory, time, peak = self.memory, self.time, self.memory.peak
        return {
            "model": {
                "name": self.model.name,
                "total_params": self.model.total_params,
                "active_params": self.model.active_params,
                "trainable_params": self.model.trainable_params,
            },
            "memory": {
                "model_states": {
                    "weights": memory.model_states.weights,
                    "gradients": memory.model_states.gradients,
                    "optimizer": memory.model_states.optimizer,
                },
                "activations": peak.activations,
                "logits": peak.logits,
                "gathered": peak.gathered,
                "buffers": peak.buffers,
                "allocated": memory.allocated,
                "reserved": memory.reserved,
                "context": memory.context,
                "device": memory.device,
                "capacity": memory.capacity,
                "peak_phase": memory.peak_phase.value,
                "phases": {
                    phase.name.value: {
                        **{term.value: size for term, size in phase.terms()},
                        "allocated": phase.total,
                        "host_ram_per_node": memory.host.at(phase.name),
                    }
                    for phase in memory.phases
                },
                "host_ram_per_node": memory.host_ram_per_node,
            },
            "traffic": {
                "per_step_bytes_per_rank": self.traffic.step_bytes,
                "per_micro_step_bytes_per_rank": self.traffic.micro_step_bytes,
                "by_collective": {c.name: c.step_bytes for c in self.traffic.collectives},
            },
            "time": {
                "compute_s": time.compute_s,
                "communication_s": time.communication_s,
                "exposed_s": time.exposed_s,
                "step_s": time.step_s,
                "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
                "mfu": time.mfu,
                "bubble": time.bubble,
                "bound_by": time.bound_by,
            },
            **self._useful(),
            "verdict": self.verdict.value,
            "advice": [{"code": a.code, "text": a.text, "saves_bytes": a.saves_bytes} for a in self.advice],
        }
