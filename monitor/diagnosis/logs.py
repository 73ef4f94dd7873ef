"""How to read the logs a run left: whose line it is, exceptions, watchdogs, out-of-memory, launchers' words.

Logs come one file a rank, or all ranks in one stream with prefixes of many kinds, also glued together
without a line break. Lines are split at carriage returns too, and long ones are cut.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftdash.monitor.diagnosis import names
from ftdash.monitor.diagnosis.errorlines import known_error
from ftdash.monitor.diagnosis.model import Frame, LogEvidence, LogFinding, LogKind

MAX_FILE_BYTES = 64 << 20
MAX_FILES = 5000
MAX_LINE = 4000
MAX_FINDINGS = 5000

_PREFIXES = (
    re.compile(r"^\[(?:rank|default|Rank )\s?(?P<rank>\d+)\]:? ?"),
    re.compile(r"^\((?:\w+ )?(?:rank=(?P<rank>\d+),? ?)?pid=(?P<pid>\d+)(?:, ip=(?P<host>[\w.\-]+))?\)\s?"),
    re.compile(r"^\[(?P<pid>\d{2,7})\] (?=\[)"),
    re.compile(r"^(?P<host>\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}): ?"),
    re.compile(r"^(?P<host>[A-Za-z][\w\-]*\d[\w.\-]*): (?=\S)"),
    re.compile(r"^(?P<rank>\d{1,5}): (?=\S| )"),
    re.compile(r"^Rank (?P<rank>\d+): "),
)
_GLUED = re.compile(r"(?<=[^\s\[(])(?=\[rank\d+\]:)")
_RANK_INSIDE = re.compile(r"\[(?:PG[^\]]*? )?Rank (\d+)\]|\brank[ :=]+(\d+)\b", re.I)
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG_TIME = re.compile(r"\[[EWIF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FILE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure)?)(?::\s?(?P<text>.*))?$"
)
_TAIL = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))(?:: (?P<text>.*))?$")

_OOM = re.compile(
    r"CUDA out of memory|HIP out of memory|OutOfMemoryError|XPU out of memory|CUDA error: out of memory", re.I
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+) ?([KMGT]i?B)", re.I)
_HOST_OOM = re.compile(
    r"oom[-_ ]kill|Out of memory: Killed process|Memory cgroup out of memory"
    r"|DefaultCPUAllocator: can't allocate|DefaultCPUAllocator: not enough memory|oom_kill event",
    re.I,
)
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+))?(?:, NumelOut=\d+)?(?:, Timeout\(ms\)=(?P<timeout>\d+))?"
)
_PG_STATUS = re.compile(r"last enqueued work: (-?\d+), last completed work: (-?\d+)")
_ADDRESS = re.compile(r"Address already in use|EADDRINUSE|errno: 98\b|\[Errno 98\]", re.I)
_STORE_WAIT = re.compile(
    r"store[- ]based barrier.*?rank:? (?P<rank>\d+).*?world_size=(?P<world>\d+), worker_count=(?P<count>\d+)",
    re.I,
)
_RENDEZVOUS = re.compile(
    r"Rendezvous(?:Timeout|Closed|Connection|State)?Error|RendezvousClosed|rendezvous.*timed? ?out", re.I
)
_CASCADE = re.compile(
    r"Connection closed by (?:remote )?peer|Connection reset by peer|socket has? (?:been )?closed|Broken pipe"
    r"|communicator was aborted|NCCL communicator encountered error|recvValue failed|DistNetworkError"
    r"|DistBackendError|DistStoreError|remote process exited|Software caused connection abort|ncclRemoteError"
    r"|Timed out waiting|wait timeout after|ChildFailedError|SignalException|Application timeout caused"
    r"|To avoid data inconsistency|Socket Timeout|KeyboardInterrupt|TearDown"
    r"|process group watchdog thread terminated"
    r"|Received Signals\.SIGTERM|DataLoader worker .* killed by signal: Terminated",
    re.I,
)
_EXIT = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\)(?: local_rank: (?P<local>\d+))?(?: \(pid: (?P<pid>\d+)\))?"
)
_SIGNAL = re.compile(
    r"Signal (?P<number>\d+) \((?P<name>SIG\w+)\) received by PID (?P<pid>\d+)|(?P<killed>^|\s)Killed\s*$"
    r"|(?P<shell>: line \d+: +\d+ Killed\b)"
)
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_ROOT_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
_WORLD = re.compile(r"world[_ ]size\W{1,3}(\d+)", re.I)
_VOCAB = re.compile(r"vocab_size\W{1,4}(\d{4,7})")
_SEQ = re.compile(
    r"(?:max_length|max_seq_len(?:gth)?|seq_len(?:gth)?|cutoff_len|model_max_length|max_model_len)\W{1,4}(\d{2,8})"
)
_LOADING = re.compile(r"loading checkpoint shards|loading weights", re.I)
_TRAINS = re.compile(r"['\"]loss['\"]\s*:|\bstep[ :=]+\d+.*\bloss\b|\biteration +\d+/", re.I)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(slots=True)
class _Traceback:
    frames: list[Frame] = field(default_factory=list)
    line: int = 0
    order: int = 0
    t: float = 0.0


@dataclass(slots=True)
class _Stream:
    """What is open in the lines of one source: a traceback, or a root-cause block."""

    traceback: _Traceback | None = None
    root: LogFinding | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    rank: int | None
    host: str
    pid: str
    number: int


def _strip(text: str) -> tuple[str, int | None, str, str]:
    """The line without its prefixes, and the rank, host and pid they told."""
    rank: int | None = None
    host = pid = ""
    for _ in range(4):
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


def _lines(data: bytes) -> Iterator[_Line]:
    for number, raw in enumerate(re.split(r"\r\n|\n|\r", data.decode("utf-8", "replace")), 1):
        for part in _GLUED.split(raw[:MAX_LINE]) if "[rank" in raw else (raw[:MAX_LINE],):
            text, rank, host, pid = _strip(part)
            yield _Line(text, rank, host, pid, number)


def _time_of(text: str) -> float:
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


def kind_of(text: str) -> LogKind | None:
    """What a line says, None when it is nothing notable."""
    if _HOST_OOM.search(text):
        return LogKind.HOST_OOM
    if _OOM.search(text):
        return LogKind.OOM
    if _WATCHDOG.search(text):
        return LogKind.WATCHDOG
    if _ADDRESS.search(text):
        return LogKind.ADDRESS_IN_USE
    if _STORE_WAIT.search(text):
        return LogKind.STORE
    if _RENDEZVOUS.search(text):
        return LogKind.RENDEZVOUS
    if known_error(text) is not None:
        return LogKind.EXCEPTION
    if _CASCADE.search(text):
        return LogKind.PEER_CLOSED
    return None


class LogReader:
    """Collects findings over files; `evidence` is what they say together."""

    def __init__(self) -> None:
        self.evidence = LogEvidence()
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._order = 0
        self._last_time: dict[str, float] = {}

    def _add(self, finding: LogFinding) -> None:
        if len(self.evidence.findings) < MAX_FINDINGS:
            self.evidence.findings.append(finding)

    def read(self, data: bytes, path: str = "", rank: int | None = None, host: str = "") -> None:
        """Read one file; `rank` and `host` are what its name says."""
        for line in _lines(data):
            self._order += 1
            said = line.rank if line.rank is not None else rank
            self._line(line, path, said, line.host or host)

    def _line(self, line: _Line, path: str, rank: int | None, host: str) -> None:
        text = line.text
        key = (path, f"{rank}" if rank is not None else f"{line.host}{line.pid}")
        stream = self._streams.setdefault(key, _Stream())
        if found := _time_of(text):
            self._last_time[path] = found
        if rank is not None and text.strip():
            self.evidence.last_lines[rank] = text.strip()[:400]
            if host:
                self.evidence.hosts.setdefault(rank, host)
        self._facts(text)
        if self._root_cause(stream, text, path, line.number):
            return
        if _TRACEBACK.search(text):
            stream.traceback = _Traceback(
                line=line.number, order=self._order, t=self._last_time.get(path, 0.0)
            )
            return
        if stream.traceback is not None and self._in_traceback(stream, text, path, rank, host):
            return
        self._notable(text, path, rank, host, line.number)

    def _facts(self, text: str) -> None:
        evidence = self.evidence
        if evidence.world_size is None and (match := _WORLD.search(text)):
            evidence.world_size = int(match[1])
        if evidence.vocab_size is None and (match := _VOCAB.search(text)):
            evidence.vocab_size = int(match[1])
        if _LOADING.search(text):
            evidence.loading = True
        elif evidence.loading and _TRAINS.search(text):
            evidence.loading = False
        if evidence.seq_len is None and (match := _SEQ.search(text)):
            evidence.seq_len = int(match[1])

    def _in_traceback(self, stream: _Stream, text: str, path: str, rank: int | None, host: str) -> bool:
        trace = stream.traceback
        assert trace is not None
        if match := _FILE_LINE.match(text):
            trace.frames.append(Frame(match["name"], match["file"], int(match["line"])))
            return True
        if not text.strip() or text[:1].isspace():
            return True
        match = _EXCEPTION.match(text) or (_TAIL.search(text) if trace.frames else None)
        if match is None:
            return False
        stream.traceback = None
        kind = kind_of(text) or LogKind.EXCEPTION
        if kind is LogKind.WATCHDOG:
            self._notable(text, path, rank, host, trace.line)
            return True
        self._add(
            LogFinding(
                kind=kind,
                text=text.strip()[:600],
                rank=rank,
                host=host,
                t=trace.t or _time_of(text),
                order=trace.order,
                path=path,
                line=trace.line,
                frames=trace.frames[::-1],
                wanted_bytes=wanted_bytes(text),
            )
        )
        return True

    def _root_cause(self, stream: _Stream, text: str, path: str, number: int) -> bool:
        """The block that torch's elastic agent prints about the first failure it saw."""
        if _ROOT_CAUSE.search(text):
            stream.root = LogFinding(
                kind=LogKind.ELASTIC, text="root cause", order=self._order, path=path, line=number
            )
            return True
        root = stream.root
        if root is None:
            return False
        match = _ROOT_FIELD.match(text)
        if match is None:
            if text.startswith("=====") or (text.strip() and not re.match(r"^\s*\[\d+\]:", text)):
                stream.root = None
            return bool(text.strip())
        name, value = match.groups()
        if name == "time":
            root.t = _time_of(value)
        elif name == "host":
            root.host = value.strip()
        elif name == "rank" and (digits := re.match(r"\d+", value)):
            root.rank = int(digits[0])
        elif name == "exitcode" and (digits := re.match(r"-?\d+", value)):
            root.exit_code = int(digits[0])
            self._add(root)
        elif name == "traceback":
            root.text = value.strip()[:600]
        return True

    def _notable(self, text: str, path: str, rank: int | None, host: str, number: int) -> None:
        kind = kind_of(text)
        status = _PG_STATUS.search(text)
        ended = _EXIT.search(text)
        signal = _SIGNAL.search(text)
        if kind is None and not (status or ended or signal):
            return
        inside = _RANK_INSIDE.search(text)
        if rank is None and inside:
            rank = int(inside[1] or inside[2])
        finding = LogFinding(
            kind=kind or LogKind.SIGNAL,
            text=text.strip()[:600],
            rank=rank,
            host=host,
            t=_time_of(text) or self._last_time.get(path, 0.0),
            order=self._order,
            path=path,
            line=number,
            wanted_bytes=wanted_bytes(text),
        )
        if match := _WATCHDOG.search(text):
            finding.seq, finding.op = int(match["seq"]), match["op"].lower()
            finding.numel = int(match["numel"]) if match["numel"] else None
            finding.timeout_ms = int(match["timeout"]) if match["timeout"] else None
        elif status:
            finding.kind, finding.seq = LogKind.WATCHDOG, int(status[1])
            finding.op = "last enqueued"
        elif ended:
            finding.kind, finding.exit_code = LogKind.ELASTIC, int(ended["code"])
            if ended["local"] is not None and finding.rank is None:
                finding.rank = int(ended["local"])
        elif signal:
            finding.exit_code = -int(signal["number"] or 9)
        elif kind is LogKind.STORE and (match := _STORE_WAIT.search(text)):
            self.evidence.world_size = int(match["world"])
            self.evidence.waiting_for = f"{match['count']} of {match['world']} ranks have joined"
            finding.rank = int(match["rank"])
        self._add(finding)

    def read_error_file(self, data: bytes, path: str, rank: int | None, host: str) -> bool:
        """torch elastic's error.json; False when it is something else."""
        try:
            value: Any = json.loads(data)
        except (ValueError, RecursionError):
            return False
        message = value.get("message") if isinstance(value, dict) else None
        if message is None:
            return False
        extra: Any = {}
        if isinstance(message, dict):
            extra = message.get("extraInfo") or {}
            message = message.get("message") or message.get("error") or ""
        stack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
        stamp = str(extra.get("timestamp", "")) if isinstance(extra, dict) else ""
        frames = [
            Frame(match["name"], match["file"], int(match["line"]))
            for line in stack.splitlines()
            if (match := _FILE_LINE.match(line))
        ]
        self._order += 1
        text = str(message)[:600]
        kind = kind_of(text) or LogKind.EXCEPTION
        self._add(
            LogFinding(
                kind=kind,
                text=text,
                rank=rank,
                host=host,
                t=float(stamp) if re.fullmatch(r"\d+(\.\d+)?", stamp) else 0.0,
                order=self._order,
                path=path,
                frames=frames[::-1],
                wanted_bytes=wanted_bytes(text),
            )
        )
        return True


_LOG_SUFFIXES = {".log", ".txt", ".out", ".err", ".json", ""}


def read_logs(root: Path, up_to: Mapping[str, int] | None = None) -> LogEvidence:
    """All logs in a folder (or one file). Raises FileNotFoundError when there is no such folder.

    `up_to` gives sizes in bytes by path below `root`: only that much of each file is read, nothing of others.
    """
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    reader = LogReader()
    chosen = [
        p
        for p in files
        if p == root or p.suffix.lower() in _LOG_SUFFIXES or ".log" in p.name or ".o" in p.suffix
    ]
    relatives = [path.name if path == root else str(path.relative_to(root)) for path in chosen]
    parsed = [names.read_name(relative) for relative in relatives]
    for path, relative, name in list(zip(chosen, relatives, parsed, strict=True))[:MAX_FILES]:
        rank = name.rank if name.rank is not None else name.local_rank
        if len(chosen) == 1:
            rank = name.rank if "rank" in relative.lower() else name.local_rank
        try:
            size = path.stat().st_size if up_to is None else up_to.get(relative, 0)
            with path.open("rb") as handle:
                if size > MAX_FILE_BYTES:
                    reader.evidence.notices.append(f"{relative}: {size >> 20} MiB, only its end was read")
                    handle.seek(size - MAX_FILE_BYTES)
                data = handle.read(min(size, MAX_FILE_BYTES))
        except OSError as error:
            reader.evidence.notices.append(f"{relative}: cannot be read: {error.strerror}")
            continue
        if path.suffix == ".json":
            reader.read_error_file(data, relative, rank, name.host)
            continue
        reader.read(data, relative, rank, name.host)
    return reader.evidence
