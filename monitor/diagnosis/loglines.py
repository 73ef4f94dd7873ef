"""What one line of a log says: whose it is, when it was written, and what notable thing it tells.

All ranks may be in one stream, with prefixes of many kinds, also glued together without a line break. Lines
are split at carriage returns too, and long ones are cut.
"""

from __future__ import annotations

import datetime
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ftdash.monitor.diagnosis.errorlines import known_error
from ftdash.monitor.diagnosis.model import LogKind

MAX_LINE = 4000

_PREFIXES = (
    re.compile(r"^\[(?:rank|default|Rank )(?:: )?\s?(?P<rank>\d+)\]:? ?"),
    re.compile(r"^\((?:\w+ )?(?:rank=(?P<rank>\d+),? ?)?pid=(?P<pid>\d+)(?:, ip=(?P<host>[\w.\-]+))?\)\s?"),
    re.compile(r"^\[(?P<pid>\d{2,7})\] (?=\[)"),
    re.compile(r"^(?P<host>\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}): ?"),
    re.compile(r"^(?P<host>[A-Za-z][\w\-]*\d[\w.\-]*): (?=\S)"),
    re.compile(r"^(?P<rank>\d{1,5}): (?=\S| )"),
    re.compile(r"^Rank (?P<rank>\d+): "),
)
NODE_FAILED = re.compile(
    r"Node failure on (?P<host>[\w.\-]+)|ON (?P<node>\S+) CANCELLED .*DUE TO NODE FAIL", re.I
)
_LONGEST_PREFIX = 100
_BLOCK_LINES = 256
_GLUED = re.compile(r"\[rank\d+\]:")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG_TIME = re.compile(r"\[[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")

_OOM = re.compile(
    r"CUDA out of memory|HIP out of memory|OutOfMemoryError|XPU out of memory|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:2 )?'out of memory'|cudaErrorMemoryAllocation",
    re.I,
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+) ?([KMGT]i?B)", re.I)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^(?:\w+\.)*(?:_Array)?MemoryError\b"
    r"|std::bad_alloc|\[Errno 12\] Cannot allocate memory",
    re.I,
)
_KILLED_FOR_MEMORY = re.compile(
    r"oom[-_ ]kill|Out of memory: Killed process|Memory cgroup out of memory|: tasks? [\d,\-]+: Out Of Memory"
    r"|DataLoader worker \(pid[^)]*\) is killed by signal: Killed|Exceeded (?:job|step) memory limit",
    re.I,
)
WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+)|, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, NumelOut=(?P<out>\d+))?"
    r"(?:, Timeout\(ms\)=(?P<timeout>\d+))?"
)
PROCESS_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\]]*?))? Rank \d+\]")
LAST_ENQUEUED = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)", re.I
)
_ADDRESS = re.compile(r"Address already in use|EADDRINUSE|errno: 98\b|\[Errno 98\]", re.I)
STORE_WAIT = re.compile(
    r"store[- ]based barrier.*?rank:? (?P<rank>\d+).*?world_size=(?P<world>\d+), worker_count=(?P<count>\d+)",
    re.I,
)
_RENDEZVOUS = re.compile(
    r"Rendezvous(?:Timeout|Closed|Connection|State)?Error|RendezvousClosed|rendezvous.*timed? ?out"
    r"|waiting for clients\. \d+/\d+ clients joined"
    r"|client socket has (?:failed to connect|timed out after).{0,80}trying to connect"
    r"|client socket has failed to connect to any network address",
    re.I,
)
MISMATCH = re.compile(
    r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks"
    r"|Message truncated ?: received \d+ bytes instead of \d+",
    re.I,
)
MISSED_BARRIER = re.compile(r"(?:Ranks? (?P<ranks>\d[\d, ]*)) failed to pass monitoredBarrier")
_FROM_OUTSIDE = re.compile(
    r"Received (?:Signals\.)?(?:SIG(?:TERM|INT|HUP)|15|2|1) death signal|SignalException: .*got signal"
    r"|slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ ON .* CANCELLED AT"
    r"|DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL)|srun: error: Node failure on|srun: Force Terminated"
    r"|^KeyboardInterrupt\b",
    re.I,
)
_TRANSPORT = re.compile(
    r"NCCL WARN .*(?:Connection (?:refused|timed out)|No route to host|ibv_\w+ failed|IBV_WC_\w+"
    r"|Got (?:completion|async event)|vendor err|Timeout waiting for|socketStartConnect)|ncclSystemError: ",
)
_CASCADE = re.compile(
    r"Connection closed by (?:remote )?peer|Connection reset by peer|socket has? (?:been )?closed|Broken pipe"
    r"|communicator was aborted|NCCL communicator encountered error|recvValue failed|DistNetworkError"
    r"|DistBackendError|DistStoreError|remote process exited|Software caused connection abort|ncclRemoteError"
    r"|Timed out waiting|wait timeout after|ChildFailedError|SignalException|Application timeout caused"
    r"|To avoid data inconsistency|Socket Timeout|KeyboardInterrupt|TearDown"
    r"|process group watchdog thread terminated|successfully reached monitoredBarrier"
    r"|Received Signals\.SIGTERM|DataLoader worker .* killed by signal: Terminated"
    r"|CheckpointException ranks|See root cause above"
    r"|Process(?:Raised|Exited)Exception|CalledProcessError|RendezvousGracefulExit",
    re.I,
)
# Of millions of lines only those with one of these are looked at closely: a search of strings is fast.
_HINT_WORDS = (
    "error|exception|traceback|memory|oom|kill|alloc|watchdog|preamble|mismatch|truncated|signal|"
    "cancelled|terminat|interrupt|nccl|connection|socket|remote|teardown|failed|failure|exit|srun|"
    "rendezvous|monitoredbarrier|eaddrinuse|errno|fatal|dtype|dtensor|unscale|selectdim|indexselect|"
    "n_classes|ordinal|illegal|uncorrectable|forked|ancdata|gated|restricted|aborted|quantized|timeout|"
    "inconsistency|train_batch_size|thread|shm_open|fallocate|death|caught|what():|torch.size([0])|"
    "utils.checkpoint:|store based|store-based|last enqueued|address already|client socket|due to|"
    "broken pipe|timed out|root cause|ready only once|dp world|duplicate gpu|finished reduction|"
    "require grad|meta tensor|loss scale already|precision on|target modules|layer class|support bf16|"
    "cuda version|padding token|out of range|kernel image|open files|401 client|-- process|bus error|"
    "failures:"
)
_HINTS = tuple(_HINT_WORDS.split("|"))


@dataclass(slots=True)
class Line:
    text: str
    rank: int | None
    host: str
    pid: str
    number: int
    telling: bool  # worth a closer look


def _strip(text: str) -> tuple[str, int | None, str, str]:
    """The line without its prefixes, and the rank, host and pid they told."""
    rank: int | None = None
    host = pid = ""
    for _ in range(4):
        if text[:1] not in ("[", "(") and ":" not in text[:_LONGEST_PREFIX]:
            break
        for prefix in _PREFIXES:
            match = prefix.match(text)
            if match is None:
                continue
            said = match.groupdict()
            if said.get("rank") is not None:
                rank = int(said["rank"])
            host = said.get("host") or host
            pid = said.get("pid") or pid
            text = text[match.end() :]
            break
        else:
            return text, rank, host, pid
    return text, rank, host, pid


def _unglued(text: str) -> Iterator[str]:
    """A line apart from those of other ranks glued to it: a progress bar ends without a line break."""
    start = 0
    for match in _GLUED.finditer(text, 1):
        if _strip(text[start : match.start()])[0].strip():
            yield text[start : match.start()]
            start = match.start()
    yield text[start:]


def split(data: bytes) -> Iterator[Line]:
    """The lines of a file; carriage returns end one too."""
    lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace", newline=None)
    number = 0
    while block := list(itertools.islice(lines, _BLOCK_LINES)):
        together = "".join(block).lower()
        hints = [hint for hint in _HINTS if hint in together]
        for raw in block:
            number += 1
            cut = raw[:MAX_LINE].rstrip("\n")
            for part in _unglued(cut) if "[rank" in cut[1:] else (cut,):
                telling = bool(hints) and any(map(part.lower().__contains__, hints))
                yield Line(*_strip(part), number, telling)


def time_of(text: str) -> float:
    """UTC seconds that a line tells, 0 when none."""
    if match := _TIME.search(text):
        year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
        try:
            when = datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
        except ValueError:
            return 0.0
        return when.timestamp() + float(f"0.{match[7] or 0}")
    if match := _GLOG_TIME.search(text):
        month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
        try:
            year = datetime.datetime.now(datetime.UTC).year
            when = datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
        except ValueError:
            return 0.0
        return when.timestamp() + float(f"0.{match[6]}")
    return 0.0


def wanted_bytes(text: str) -> int | None:
    """The failed allocation of an out-of-memory line ("Tried to allocate 49.02 GiB"), in bytes."""
    match = _WANTED.search(text)
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2][0].lower()])


_ORDER: tuple[tuple[re.Pattern[str], LogKind], ...] = (
    (_KILLED_FOR_MEMORY, LogKind.HOST_OOM),
    (NO_HOST_MEMORY, LogKind.HOST_OOM),
    (_OOM, LogKind.OOM),
    (WATCHDOG, LogKind.WATCHDOG),
    (_ADDRESS, LogKind.ADDRESS_IN_USE),
    (STORE_WAIT, LogKind.STORE),
    (_RENDEZVOUS, LogKind.RENDEZVOUS),
    (MISMATCH, LogKind.MISMATCH),
    (MISSED_BARRIER, LogKind.MISSED_BARRIER),
    (_FROM_OUTSIDE, LogKind.FROM_OUTSIDE),
)


def kind_of(text: str) -> LogKind | None:
    """What a line says, None when it is nothing notable."""
    for pattern, kind in _ORDER:
        if pattern.search(text):
            return kind
    if known_error(text) is not None:
        return LogKind.EXCEPTION
    if _TRANSPORT.search(text):
        return LogKind.TRANSPORT
    if _CASCADE.search(text):
        return LogKind.PEER_CLOSED
    return None
