"""What diagnosis stores and says: frames, threads, processes, ranks, flight entries, and the verdict.

`RankEvidence` is the format of `stacks/<time>/rank-<R>.json`. Times are UTC seconds, sizes are bytes.
Frames are innermost first, as py-spy prints them. Every field may be missing: evidence is what could
be had from a process that is in trouble.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ftdash.monitor.diagnosis.ras import RasReport

FORMAT_VERSION = 1


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One Python (or, on demand, native) function call. `line` is 0 when it is not known."""

    name: str
    file: str = ""
    line: int = 0

    @property
    def short(self) -> str:
        """The bare function name: py-spy 0.4.3 prints `Queue.get`, older versions `get`."""
        return self.name.rsplit(".", 1)[-1]

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})" if self.file else self.name


class Thread(msgspec.Struct, omit_defaults=True):
    """One thread; `frames` innermost first."""

    name: str = ""
    os_tid: int = 0
    active: bool = False
    owns_gil: bool = False
    frames: list[Frame] = []
    sleeps: int = 0  # voluntary context switches
    wanted_s: float = 0.0  # time on a core and in the queue for one


class ProcState(msgspec.Struct, omit_defaults=True):
    """A process as /proc shows it. `state` is the letter of /proc/PID/stat, "" when the process is gone."""

    state: str = ""
    wchan: str = ""  # kernel function in which the main thread sleeps
    syscall: int | None = None  # number of the system call that blocks the main thread
    main_sleeps: int = 0  # voluntary context switches of the main thread: how often it went to sleep
    sleeps: int = 0  # the same, of all threads
    cpu_s: float = 0.0
    main_wanted_s: float = 0.0  # main thread: time on a core and in the queue for one
    transport_wanted_s: float = 0.0  # the same, of the threads that move gloo's bytes
    unsent: int = 0  # bytes before the other side of the TCP connection that the main thread sends to
    rss: int = 0
    read_chars: int = 0  # all reads and writes, page cache included
    write_chars: int = 0
    read_bytes: int = 0  # what reached the storage
    write_bytes: int = 0
    threads: int = 0
    tracer_pid: int = 0
    catches_sigusr2: bool = False


class DumpFailure(StrEnum):
    """Why a process has no stack."""

    GONE = "gone"
    ZOMBIE = "zombie"
    NOT_PYTHON = "not-python"
    OTHER_USER = "other-user"
    YAMA = "yama"
    NO_PTRACE = "no-ptrace-capability"
    OTHER_NAMESPACE = "other-namespace"
    UNSUPPORTED_PYTHON = "unsupported-python"
    D_STATE = "d-state"
    TIMEOUT = "timeout"
    MOVING = "moving"  # alive, and at another place in every try
    NO_ANSWER = "no-answer"  # the agent of its node did not answer
    NO_PYSPY = "no-py-spy"
    UNREADABLE = "unreadable"


# Nobody looked in time: evidence is missing, and that says nothing of the rank.
NOT_SEEN = frozenset({DumpFailure.TIMEOUT, DumpFailure.MOVING, DumpFailure.NO_ANSWER})


class ProcessEvidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One process at one moment: stacks of all threads, state, counters, and why something is missing."""

    pid: int
    host: str = ""
    t: float = 0.0
    started: float = 0.0  # when the process began: source files changed later say nothing of it
    ppid: int = 0
    uid: int = -1
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    master: str = ""  # MASTER_ADDR:MASTER_PORT that it was started with
    command: list[str] = []
    proc: ProcState = msgspec.field(default_factory=ProcState)
    threads: list[Thread] = []
    source: str = ""  # py-spy, py-spy native, faulthandler, file
    failure: DumpFailure | None = None
    failure_text: str = ""
    remedy: str = ""
    moved: str = ""  # how the dump itself changed the process, "" when it did not
    children: list[ProcessEvidence] = []


class Beat(msgspec.Struct, omit_defaults=True):
    """The hook's last sign of progress of a rank."""

    t: float = 0.0
    step: int = 0
    phase: str = ""
    usual_s: float = 0.0  # median of the rank's earlier steps, 0 when not known
    longest_s: float = 0.0  # the longest of them

    @property
    def sign(self) -> tuple[float, int, str]:
        """What changes when the rank gets on."""
        return self.t, self.step, self.phase


class RankEvidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Everything known of one rank at one moment; the content of stacks/<time>/rank-<R>.json."""

    rank: int
    v: int = FORMAT_VERSION
    host: str = ""
    t: float = 0.0
    process: ProcessEvidence | None = None
    beat: Beat | None = None
    gpu_util: int | None = None  # percent
    gpu_power_w: float | None = None
    gpu_power_limit_w: float | None = None
    call: dict[str, int] = {}  # source, destination or root of the call it is in
    notes: list[str] = []

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def threads(self) -> Sequence[Thread]:
        return self.process.threads if self.process else ()

    @property
    def children(self) -> Sequence[ProcessEvidence]:
        return self.process.children if self.process else ()

    @property
    def proc(self) -> ProcState:
        return self.process.proc if self.process else ProcState()


class FlightEntry(msgspec.Struct, omit_defaults=True, frozen=True):
    """One collective or point-to-point call in a flight recorder dump."""

    group: str
    seq: int  # collective or point-to-point sequence number within the group
    op: str  # all_reduce, all_gather, send, recv, …
    record_id: int = 0
    group_desc: str = ""
    p2p: bool = False
    src: int = -1  # group ranks, point-to-point only
    dst: int = -1
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: str = ""  # scheduled, started, completed
    retired: bool = False
    timeout_ms: int = 0
    created_ns: int = 0
    thread: str = ""  # of the process, that made the call: its number, or "autograd"
    frames: tuple[Frame, ...] = ()


class GroupStatus(msgspec.Struct, omit_defaults=True, frozen=True):
    """What one rank says of one process group. -1 means not said."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()  # global ranks
    last_enqueued: int = -1
    last_started: int = -1
    last_completed: int = -1


class FlightDump(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One rank's flight recorder."""

    rank: int
    host: str = ""
    version: str = ""
    entries: list[FlightEntry] = []
    groups: dict[str, GroupStatus] = {}
    path: str = ""


class LogKind(StrEnum):
    """What a notable log line says."""

    EXCEPTION = "exception"
    OOM = "oom"
    HOST_OOM = "host-oom"
    WATCHDOG = "watchdog"
    ADDRESS_IN_USE = "address-in-use"
    STORE = "store"
    RENDEZVOUS = "rendezvous"
    PEER_CLOSED = "peer-closed"
    SIGNAL = "signal"
    ELASTIC = "elastic"  # the launcher's word on the process that ended first
    EXITED = "exited"  # its word on the others
    MISMATCH = "mismatch"  # ranks made different calls, or with other sizes
    MISSED_BARRIER = "missed-barrier"
    TRANSPORT = "transport"  # NCCL's network layer
    FROM_OUTSIDE = "from-outside"  # a signal to the launcher, or Slurm's end of the job
    ON_REQUEST = "on-request"  # the run directory says that somebody stopped the run


class LogFinding(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One notable thing in the logs. `rank` is None when the line does not say."""

    kind: LogKind
    text: str
    rank: int | None = None
    host: str = ""
    t: float = 0.0  # UTC seconds, 0 when the line has no time
    order: int = 0  # position in what was read
    path: str = ""
    line: int = 0
    frames: list[Frame] = []  # innermost first, of an exception
    seq: int | None = None  # watchdog: sequence number
    op: str = ""  # watchdog: operation
    group: str = ""  # watchdog: process group
    numel: int | None = None  # watchdog: elements in
    timeout_ms: int | None = None
    wanted_bytes: int | None = None  # out of memory: the failed allocation
    exit_code: int | None = None
    copies: int = 1  # tracebacks of several ranks that ran into one another and end in this line
    trained: int = 0  # lines that tell of progress before it in its file


class LogEvidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the logs of a run say. `world_size` is None when they do not."""

    findings: list[LogFinding] = []
    world_size: int | None = None
    hosts: dict[int, str] = {}
    seq_len: int | None = None
    vocab_size: int | None = None
    waiting_for: str = ""  # the last line about workers that have not joined
    last_lines: dict[int, str] = {}
    loading: bool = False  # the last that was said of progress: weights are loaded
    trained: dict[str, int] = {}  # lines that tell of progress, by file
    notices: list[str] = []


@dataclass(frozen=True, slots=True)
class Sample:
    """All evidence of one moment; a second sample some seconds later shows what moves."""

    t: float = 0.0
    ranks: tuple[RankEvidence, ...] = ()
    flight: tuple[FlightDump, ...] = ()
    logs: LogEvidence | None = None
    world_size: int | None = None
    expected: frozenset[int] = frozenset()  # ranks that ought to be seen here
    launchers: tuple[ProcessEvidence, ...] = ()
    timeout_s: float = 0.0  # of collectives, 0 when not known
    timeout_source: str = ""
    ras: RasReport | None = None
    kernel: tuple[str, ...] = ()  # lines of the kernel's log on GPUs and killed processes
    notices: tuple[str, ...] = ()
    over: bool = False  # the run has ended since: these processes are gone

    def __iter__(self) -> Iterator[RankEvidence]:
        return iter(self.ranks)


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that holds the others up. `frame` is the user's own innermost line where there is one."""

    rank: int
    host: str = ""
    pid: int = 0
    frame: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kind` is one of `ftdash.monitor.diagnosis.verdict.Kind`; `confidence` is 0 to 1."""

    kind: str
    culprits: tuple[Culprit, ...] = ()
    confidence: float = 0.0
    reason: str = ""
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that do the same thing. `frames` innermost first."""

    ranks: tuple[int, ...]
    phase: str = ""
    collective: str = ""
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    verdict: Verdict
    groups: tuple[Group, ...] = ()
    notices: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The fixed JSON of `ftdash diagnose --json`."""
        verdict = self.verdict
        evidence = [verdict.reason] if verdict.reason else []
        evidence += [*verdict.evidence, *(f"against: {text}" for text in verdict.against)]
        evidence += [f"notice: {text}" for text in self.notices]
        return {
            "verdict": {
                "kind": str(verdict.kind),
                "culprits": [
                    {"rank": c.rank, "host": c.host, "pid": c.pid, "frame": c.frame, "why": c.why}
                    for c in verdict.culprits
                ],
                "confidence": round(verdict.confidence, 2),
                "evidence": evidence,
                "next": [*verdict.next, *([f"fix: {verdict.fix}"] if verdict.fix else [])],
            },
            "groups": [
                {
                    "ranks": list(group.ranks),
                    "phase": group.phase,
                    "collective": group.collective,
                    "frames": list(group.frames),
                }
                for group in self.groups
            ],
        }


def encode_rank(evidence: RankEvidence) -> bytes:
    return msgspec.json.encode(evidence)


_rank_decoder = msgspec.json.Decoder(RankEvidence)


def decode_rank(data: bytes) -> RankEvidence:
    """Raises msgspec.DecodeError when `data` is not a rank's evidence."""
    return _rank_decoder.decode(data)
