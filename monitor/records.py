"""The telemetry records: what ranks and agents write, one JSON object a line.

Every record carries `v` (format version), `t` (UTC seconds) and `kind`. Readers skip kinds and fields
that they do not know, so an old reader reads a new run. NaN and infinities are legal values; they are
written as the JSON strings "nan", "inf", "-inf" so that every line stays plain JSON.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

FORMAT_VERSION = 1
T = TypeVar("T")


class Record(msgspec.Struct, omit_defaults=True, tag_field="kind", kw_only=True, gc=False):
    """What all records share. `t` is UTC seconds. No record can be part of a cycle: none is collected."""

    t: float
    v: int = FORMAT_VERSION


Number = float | str  # "nan", "inf" and "-inf" stand for the values that JSON cannot say
# A file may be damaged, or not ours: beyond these no run goes, and a reader's memory has to have a bound.
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 17)]
LayerNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 12)]
GpuIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << 10)]


class Meta(Record, tag="meta"):
    """Written once by each rank: who it is and what really runs."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    device: str  # "cpu" or "cuda:0"
    device_uuid: str = ""
    strategy: str = ""  # what was asked for, and held
    variant: str = ""  # full, lora, qlora, moe-lora
    distributed_type: str = ""  # what the library says it runs, not what was asked
    backend: str = ""  # gloo, nccl
    collective_timeout_s: float = 0.0  # of the default process group, 0 when not known
    wrapped_class: str = ""
    dtensor_params: int = 0  # parameters that are DTensors on this rank
    total_params: int = 0
    trainable_params: int = 0
    adapter_params: int = 0
    quantized_layers: int = 0
    zero_stage: int = 0
    expert_count: int = 0
    top_k: int = 0
    moe_layers: int = 0
    max_steps: int = 0
    micro_batch: int = 0
    grad_accum: int = 0
    seq_len: int = 0
    output_dir: str = ""  # where the trainer writes its checkpoints, absolute
    versions: dict[str, str] = {}


class Step(Record, tag="step"):
    """One optimizer step of one rank. Bytes are torch's counters; zero on CPU."""

    step: int
    epoch: float = 0.0
    loss: Number | None = None
    aux_loss: Number | None = None
    lr: float | None = None
    grad_norm: Number | None = None
    tokens: int = 0  # non-padding label tokens this rank saw in this step
    step_s: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    peak_reserved: int = 0
    tokens_per_s: float = 0.0


class Experts(Record, tag="experts"):
    """Tokens routed to each expert of one MoE layer since the last record (this rank's tokens)."""

    step: int
    layer: LayerNumber
    counts: list[Annotated[int, msgspec.Meta(ge=0)]]


# Codes of the events that an agent writes when its ranks stop moving, and when they move again.
HANG_CODE, HANG_OVER_CODE = "hang", "hang-over"


class Event(Record, tag="event"):
    """Something a person should know. `severity`: note, warning, error."""

    severity: str
    code: str
    text: str
    rank: int | None = None


class GpuProcess(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """A process that the driver reports on a GPU. `pid` is the driver's view: in a container it may name
    nothing, or somebody else (`visible` is then False), so ranks are never found by it."""

    pid: int
    memory: int | None = None  # bytes
    visible: bool = True  # the pid names a process here that can be the one meant


class GpuSample(Record, tag="gpu"):
    """One GPU, or one MIG instance, as its node's agent saw it. None means that the driver does not say;
    `unavailable` then has the reason by field: not supported, no permission, not in this driver."""

    index: GpuIndex
    uuid: str = ""
    state: str = "ok"  # ok, lost, error
    name: str = ""
    memory_used: int | None = None
    memory_total: int | None = None
    memory_reserved: int | None = None
    util: int | None = None  # percent
    power_w: float | None = None
    power_limit_w: float | None = None
    temp_c: int | None = None
    sm_mhz: int | None = None
    throttle: list[str] = []
    pcie_gen: int | None = None
    pcie_width: int | None = None
    error: str = ""
    bus_id: str = ""
    parent_uuid: str = ""  # of a MIG instance: the GPU that it is a slice of
    mig_index: int | None = None  # of a MIG instance: its place on that GPU
    gpu_instance: int | None = None  # of a MIG instance: the driver's GPU instance id
    mig: bool = False  # of a GPU: MIG mode is on, its instances follow as devices of their own
    unified: bool = False  # memory shared with the CPU: memory_total is not a capacity of this GPU
    memory_available: int | None = None  # unified only: bytes that the system could still give
    util_memory: int | None = None  # percent
    memory_temp_c: int | None = None
    sm_max_mhz: int | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    pcie_tx_bytes_s: int | None = None
    pcie_rx_bytes_s: int | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_tx_bytes_s: int | None = None
    nvlink_rx_bytes_s: int | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    numa_node: int | None = None
    xids: list[int] = []  # Xid errors since the sampler began, the newest last
    processes: list[GpuProcess] = []
    unavailable: dict[str, str] = {}


class RankSample(Record, tag="proc"):
    """One rank's process as its node's agent saw it, with the rank's own last sign of progress."""

    rank: RankNumber
    pid: int
    rss: int = 0  # bytes
    cpu: float = 0.0  # percent of one core since the last sample
    threads: int = 0
    state: str = ""  # R, S, D, T, Z as in /proc/PID/stat
    read_bytes: int = 0  # through read(2) since its start, page cache included
    write_bytes: int = 0  # through write(2)
    ctx_switches: int = 0  # of the main thread
    descendants: list[int] = []
    beat_t: float = 0.0  # UTC seconds of the rank's last phase change
    beat_step: int = 0
    beat_phase: str = ""
    gpu_uuid: str = ""
    gpu_unsure: str = ""  # why the mapping to this GPU is not certain
    cpus_allowed: int = 0  # processors that the process may run on, 0 when not known
    loader_workers: int = 0  # data loader processes below it
    omp_threads: int = 0  # OMP_NUM_THREADS, 0 when not set: libraries then take what is allowed


class Node(Record, tag="node"):
    """One machine as its agent saw it; also the agent's own sign of life."""

    host: str
    agent_pid: int
    load: float = 0.0  # one-minute load average
    memory_total: int = 0
    memory_available: int = 0


class Exit(Record, tag="exit"):
    """The end of a rank's process, or of the launcher when `rank` is None. `code` < 0 is a signal."""

    rank: RankNumber | None
    pid: int
    code: int | None  # None: the process is gone and nobody could see how it ended
    host: str = ""
    text: str = ""  # the error's first line, where one was found


AnyRecord = Meta | Step | Experts | Event | GpuSample | RankSample | Node | Exit

_encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(AnyRecord)


def number(value: float | None) -> Number | None:
    """A float as it is stored: non-finite values become "nan", "inf" or "-inf"."""
    if value is None:
        return None
    if value != value:
        return "nan"
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return float(value)


def to_float(value: Number | None) -> float | None:
    """A stored number as a float again; None for a string that is no number."""
    if value is None or isinstance(value, int | float):
        return value
    return _NON_FINITE.get(value)


_NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def encode_line(record: Record) -> bytes:
    """The record as one line, newline included."""
    return _encoder.encode(record) + b"\n"


class _Kind(msgspec.Struct):
    kind: str


_kind_decoder = msgspec.json.Decoder(_Kind)
_KINDS = frozenset(("meta", "step", "experts", "event", "gpu", "proc", "node", "exit"))


def decode_lines(from_decoder: msgspec.json.Decoder[T], data: bytes) -> tuple[list[T], int]:
    """The records in these complete lines, and how many lines were no record at all.

    Unknown kinds are passed over without being counted; so are known kinds that the decoder leaves out.
    """
    try:
        return from_decoder.decode_lines(data), 0
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    records: list[T] = []
    garbage = 0
    for line in data.split(b"\n"):
        if not line or line.isspace():
            continue
        try:
            records.append(from_decoder.decode(line))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            garbage += _is_garbage(line, from_decoder)
    return records, garbage


def _is_garbage(line: bytes, tried: msgspec.json.Decoder) -> bool:
    try:
        kind = _kind_decoder.decode(line).kind
        if kind not in _KINDS:
            return False
        if tried is decoder:
            return True
        decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return True
    return False
