"""How to read the logs a run left: exceptions, watchdogs, lack of memory, launchers' words, and of whom.

Logs come one file a rank, or all ranks in one stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftdash.monitor.diagnosis import endings, loglines, names
from ftdash.monitor.diagnosis.endings import Ending
from ftdash.monitor.diagnosis.frames import Origin, origin
from ftdash.monitor.diagnosis.loglines import Line, kind_of, time_of, wanted_bytes
from ftdash.monitor.diagnosis.model import Frame, LogEvidence, LogFinding, LogKind

MAX_FILE_BYTES = 16 << 20
MAX_ALL_BYTES = 128 << 20
MAX_FILES = 5000
MAX_FINDINGS = 5000

_RANK_INSIDE = re.compile(r"\[(?:PG[^\]]*? )?Rank (\d+)\]|\brank[ :=]+(\d+)\b", re.I)
_TRACEBACK = re.compile(
    r"(?P<worker>Original )?Traceback \(most recent call last\)(?:: \(RANK (?P<rank>\d+)\))?"
)
_FILE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure)?)(?::\s?(?P<text>.*))?$"
)
_TAIL = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))(?:: (?P<text>.*))?$")
_FATAL = re.compile(r"^Fatal Python error: .+")
_FATAL_THREAD = re.compile(r"(?P<current>Current )?thread 0x\w+ .*\(most recent call first\)", re.I)
_NATIVE = re.compile(r"^\s*what\(\):\s+(?P<text>\S.*)")
_SPAWNED = re.compile(r"^-- Process (?P<rank>\d+) terminated with the following error:")
_NETWORK_WORDS = re.compile(
    r"nccl|gloo|c10d|processgroup|torch\.distributed|signal|interrupt|root cause|Process\w+Exception",
    re.I,
)
_LAUNCHER_FILE = re.compile(
    r"torch/(?:distributed|multiprocessing/spawn|autograd|utils/data)|deepspeed/(?:comm|launcher)|accelerate/commands"
)
_BLOCK = re.compile(r"^\s*(?P<first>Root Cause \(first observed failure\)|Failures):\s*$|Root Cause \(first")
_BLOCK_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
_BLOCK_ITEM = re.compile(r"^\s*\[\d+\]:")
_BLOCK_INDENT = "  "
_WORLD = re.compile(r"world[_ ]size\W{1,3}(\d+)", re.I)
_VOCAB = re.compile(r"vocab_size\W{1,4}(\d{4,7})")
_SEQ = re.compile(
    r"(?:max_length|max_seq_len(?:gth)?|seq_len(?:gth)?|cutoff_len|model_max_length|max_model_len)\W{1,4}(\d{2,8})"
)
# In lines in lower case.
_LOADING = re.compile(r"loading checkpoint shards|loading weights")
_TRAINS = re.compile(r"['\"]loss['\"]\s*:|\bstep[ :=]+\d+.*\bloss\b|\biteration +\d+/")
_OF_TORCHRUN = re.compile(r"torch[./]distributed[./]elastic")
_CLOCK = re.compile(r"\d\d:\d\d")
_RUN_ID = re.compile(r"^[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.I)  # torchrun's log folder, no host


@dataclass(slots=True)
class _Traceback:
    frames: list[Frame] = field(default_factory=list)
    line: int = 0
    order: int = 0
    t: float = 0.0
    copies: int = 1  # tracebacks that began in this stream before one had ended: of several ranks
    prefix: re.Pattern[str] | None = None  # what a logger or a container puts before each of its lines
    of_worker: bool = False  # what a data loader's worker raised, told below the exception of its rank


@dataclass(slots=True)
class _Stream:
    """What is open in the lines of one source: a traceback, a dump of a fatal error, a launcher's block."""

    traceback: _Traceback | None = None
    ended: LogFinding | None = None
    fatal: LogFinding | None = None
    current: bool = False  # the thread that met the fatal error has been told
    collects: bool = False  # the frames that come are of it, or of the first thread
    raised: LogFinding | None = None  # the last exception
    spawned: int | None = None  # rank whose traceback mp.spawn prints
    indent: str = ""

    @property
    def open(self) -> bool:
        return bool(self.traceback or self.ended or self.fatal or self.indent)


class LogReader:
    """Collects findings over files; `evidence` is what they say together."""

    def __init__(self) -> None:
        self.evidence = LogEvidence()
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._order = 0
        self._last_time: dict[str, float] = {}
        self._last_plain: dict[str, str] = {}  # by file, the last line that told nothing but perhaps the time

    def _add(self, finding: LogFinding) -> None:
        finding.trained = self.evidence.trained.get(finding.path, 0)
        if len(self.evidence.findings) < MAX_FINDINGS:
            self.evidence.findings.append(finding)

    def read(self, data: bytes, path: str = "", rank: int | None = None, host: str = "") -> None:
        """Read one file; `rank` and `host` are what its name says."""
        for line in loglines.split(data):
            self._order += 1
            several = bool(line.pid)  # lines of several processes: the file's name is not of one rank
            said = line.rank if line.rank is not None or several else rank
            self._line(line, path, said, line.host or host)

    def _line(self, line: Line, path: str, rank: int | None, host: str) -> None:
        text = line.text
        if rank is not None and text.strip():
            self.evidence.last_lines[rank] = text.strip()[:400]
            if host:
                self.evidence.hosts.setdefault(rank, host)
        self._facts(text, path)
        key = (path, f"{rank}" if rank is not None else f"{line.host}{line.pid}")
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        if not (line.telling or stream.open):
            self._last_plain[path] = text
            return
        if found := time_of(text) or time_of(self._last_plain.pop(path, "")):
            self._last_time[path] = found
        if self._block(stream, text, path, line.number):
            return
        if stream.indent:
            text = text.removeprefix(stream.indent)
        if match := _SPAWNED.match(text):
            stream.spawned = int(match["rank"])
            return
        if match := _TRACEBACK.search(text):
            stream.traceback = _Traceback(
                line=line.number,
                order=self._order,
                t=self._last_time.get(path, 0.0),
                of_worker=match["worker"] is not None,
                prefix=_prefix(text[: match.start()]),
                copies=1 + (stream.traceback.copies if stream.traceback else 0),
            )
            if match["rank"]:
                stream.spawned = int(match["rank"])
            return
        if stream.traceback is not None and self._in_traceback(stream, text, path, rank, host):
            return
        if self._in_fatal(stream, text, path, rank, host, line.number):
            return
        self._notable(text, path, rank, host, line.number)

    def _facts(self, text: str, path: str) -> None:
        evidence = self.evidence
        lowered = text.lower()
        if "loss" in lowered or "iteration" in lowered:
            if _TRAINS.search(lowered):
                evidence.loading = False
                evidence.trained[path] = evidence.trained.get(path, 0) + 1
        elif "loading" in lowered and _LOADING.search(lowered):
            evidence.loading = True
        if evidence.world_size is None and "world" in lowered and (match := _WORLD.search(text)):
            evidence.world_size = int(match[1])
        if evidence.vocab_size is None and "vocab" in lowered and (match := _VOCAB.search(text)):
            evidence.vocab_size = int(match[1])
        if evidence.seq_len is None and "len" in lowered and (match := _SEQ.search(text)):
            evidence.seq_len = int(match[1])

    def _in_traceback(self, stream: _Stream, text: str, path: str, rank: int | None, host: str) -> bool:
        trace = stream.traceback
        assert trace is not None
        if trace.prefix is not None:
            if head := trace.prefix.match(text):
                text = text[head.end() :]
            elif _FILE_LINE.match(text):
                trace.prefix = None  # a progress bar stood before the first line
            else:
                return False
        if match := _FILE_LINE.match(text):
            frame = Frame(match["name"], match["file"], int(match["line"]))
            if trace.copies == 1 or frame not in trace.frames:
                trace.frames.append(frame)
            return True
        if not text.strip() or text[:1].isspace():
            return True
        match = _EXCEPTION.match(text) or (_TAIL.search(text) if trace.frames else None)
        if match is None:
            return False
        stream.traceback, stream.indent = None, ""
        if trace.of_worker and stream.raised is not None:
            _raised_by_worker(stream.raised, text, trace)
            return True
        if stream.spawned is not None:
            rank, stream.spawned = stream.spawned, None
        kind = kind_of(text) or LogKind.EXCEPTION
        if kind is LogKind.WATCHDOG or any(endings.endings(text)):
            self._notable(text, path, rank, host, trace.line)
            return True
        if kind is LogKind.PEER_CLOSED and _of_its_own(text, trace.frames):
            kind = LogKind.EXCEPTION
        stream.raised = LogFinding(
            kind=kind,
            text=text.strip()[:600],
            rank=rank,
            host=host,
            t=trace.t or time_of(text),
            order=trace.order,
            path=path,
            line=trace.line,
            frames=trace.frames[::-1],
            wanted_bytes=wanted_bytes(text),
            copies=trace.copies,
        )
        self._add(stream.raised)
        return True

    def _in_fatal(
        self, stream: _Stream, text: str, path: str, rank: int | None, host: str, number: int
    ) -> bool:
        """A fatal error of the interpreter, and the stack of the thread that met it."""
        if _FATAL.match(text):
            stream.fatal = LogFinding(
                kind=LogKind.EXCEPTION,
                text=text.strip()[:600],
                rank=rank,
                host=host,
                t=self._last_time.get(path, 0.0),
                order=self._order,
                path=path,
                line=number,
            )
            stream.current = stream.collects = False
            self._add(stream.fatal)
            return True
        if stream.fatal is None:
            return False
        if head := _FATAL_THREAD.search(text):
            if stream.current:
                stream.fatal = None  # it is told in full: another thread begins
                return True
            stream.current = head["current"] is not None
            stream.collects = stream.current or not stream.fatal.frames
            if stream.current:
                stream.fatal.frames.clear()
            return True
        if match := _FILE_LINE.match(text):
            if stream.collects:
                stream.fatal.frames.append(Frame(match["name"], match["file"], int(match["line"])))
            return True
        if text.strip():
            stream.fatal = None
        return not text.strip()

    def _block(self, stream: _Stream, text: str, path: str, number: int) -> bool:
        """The blocks that torch's elastic agent prints about the failures it saw."""
        if match := _BLOCK.search(text):
            kind = LogKind.EXITED if match["first"] == "Failures" else LogKind.ELASTIC
            stream.ended = self._ended(kind, path, number)
            stream.traceback = None
            return True
        ended = stream.ended
        if ended is None:
            return False
        if _BLOCK_ITEM.match(text):
            stream.ended = self._ended(ended.kind, path, number)
            return True
        match = _BLOCK_FIELD.match(text)
        if match is None:
            if text.startswith("=====") or text.strip():
                stream.ended = None
            return bool(text.strip())
        name, value = match.groups()
        if name == "time":
            ended.t = time_of(value)
        elif name == "host":
            ended.host = value.strip()
        elif name == "rank" and (digits := re.match(r"\d+", value)):
            ended.rank = int(digits[0])
            if ended.host:
                self.evidence.hosts[ended.rank] = ended.host
        elif name == "exitcode" and (digits := re.match(r"-?\d+", value)):
            ended.exit_code = int(digits[0])
            self._add(ended)
        elif name == "traceback":
            ended.text = value.strip()[:600]
            if _TRACEBACK.search(value):
                stream.ended, stream.spawned, stream.indent = None, ended.rank, _BLOCK_INDENT
                stream.traceback = _Traceback(line=number, order=self._order, t=ended.t)
        return True

    def _ended(self, kind: LogKind, path: str, number: int) -> LogFinding:
        return LogFinding(kind=kind, text="", order=self._order, path=path, line=number)

    def _notable(self, text: str, path: str, rank: int | None, host: str, number: int) -> None:
        if match := _NATIVE.match(text):
            text = match["text"]
            kind = kind_of(text) or LogKind.EXCEPTION
        else:
            kind = kind_of(text) or LogKind.SIGNAL
        finding = LogFinding(
            kind=kind,
            text=text.strip()[:600],
            rank=rank,
            host=host,
            t=time_of(text) or self._last_time.get(path, 0.0),
            order=self._order,
            path=path,
            line=number,
            wanted_bytes=wanted_bytes(text),
        )
        ended = list(endings.endings(text))
        status = loglines.LAST_ENQUEUED.search(text)
        signal = endings.signalled(text)
        if kind is LogKind.SIGNAL and not (ended or status) and signal is None:
            return
        inside = _RANK_INSIDE.search(text)
        if rank is None and inside:
            finding.rank = int(inside[1] or inside[2])
        if group := loglines.PROCESS_GROUP.search(text):
            finding.group = group["guid"] or group["id"]
        if match := loglines.WATCHDOG.search(text):
            _read_watchdog(finding, match)
        elif status:
            finding.kind, finding.seq, finding.op = LogKind.WATCHDOG, int(status[1]), "last enqueued"
        elif ended:
            self._add_endings(finding, ended)
            return
        elif kind is LogKind.SIGNAL:
            finding.exit_code = signal
        elif kind is LogKind.STORE and (match := loglines.STORE_WAIT.search(text)):
            self.evidence.world_size = int(match["world"])
            self.evidence.waiting_for = f"{match['count']} of {match['world']} ranks have joined"
            finding.rank = int(match["rank"])
        self._add(finding)

    def _add_endings(self, finding: LogFinding, ended: list[Ending]) -> None:
        """A launcher's word on how processes ended: the first one that it tells of ended first."""
        first = not any(f.kind is LogKind.ELASTIC and f.path == finding.path for f in self.evidence.findings)
        kind = LogKind.ELASTIC if first and len(ended) == 1 else LogKind.EXITED
        if finding.kind is LogKind.HOST_OOM:
            kind = LogKind.HOST_OOM
        for one in ended:
            if one.host and one.rank is not None:
                self.evidence.hosts.setdefault(one.rank, one.host)
            self._add(
                LogFinding(
                    kind=kind,
                    text=finding.text,
                    rank=one.rank if one.rank is not None else finding.rank,
                    host=one.host or finding.host,
                    t=finding.t,
                    order=finding.order,
                    path=finding.path,
                    line=finding.line,
                    exit_code=one.code,
                )
            )

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


def _prefix(text: str) -> re.Pattern[str] | None:
    """What stands before a traceback's first line, as it stands before the others: times in it may differ."""
    if not text.strip():
        return None
    quoted = re.escape(text.rstrip())
    if _CLOCK.search(text):
        quoted = re.sub(r"\d+", r"\\d+", quoted)
    return re.compile(quoted + r" ?")


def _read_watchdog(finding: LogFinding, match: re.Match[str]) -> None:
    finding.seq = int(match["seq"]) if match["seq"] else None
    finding.op = match["op"].lower()
    finding.numel = int(match["numel"]) if match["numel"] else None
    if match["shape"]:
        finding.numel = 1
        for size in match["shape"].split(","):
            finding.numel *= int(size) if size.strip() else 1
    finding.timeout_ms = int(match["timeout"]) if match["timeout"] else None


def _raised_by_worker(finding: LogFinding, text: str, trace: _Traceback) -> None:
    """What the worker raised, and where, replaces the words with which its rank raised it again."""
    finding.kind = kind_of(text) or LogKind.EXCEPTION
    finding.text = f"{text.strip()[:560]} (in a worker of its data loader)"
    finding.wanted_bytes = wanted_bytes(text)
    finding.frames = trace.frames[::-1]


def _of_its_own(text: str, frames: list[Frame]) -> bool:
    """Whether a lost connection is one of the user's own (a hub, a server), not the process group's."""
    if _NETWORK_WORDS.search(text) or any(_LAUNCHER_FILE.search(frame.file) for frame in frames):
        return False
    return any(origin(frame) is Origin.OWN for frame in frames)


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
    if not chosen:
        reader.evidence.notices.append(
            f"{root}: no logs in it (names that end in .log, .out, .err, .txt or in nothing; error.json)"
        )
    most = max(1 << 20, min(MAX_FILE_BYTES, MAX_ALL_BYTES // max(1, len(chosen))))
    for path, relative, name in list(zip(chosen, relatives, parsed, strict=True))[:MAX_FILES]:
        rank = name.rank if name.rank is not None else name.local_rank
        if len(chosen) == 1:
            rank = name.rank if "rank" in relative.lower() else name.local_rank
        host = "" if len(chosen) == 1 or _RUN_ID.match(name.host) else name.host
        try:
            size = path.stat().st_size if up_to is None else up_to.get(relative, 0)
            with path.open("rb") as handle:
                if size > most:
                    reader.evidence.notices.append(f"{relative}: {size >> 20} MiB, only its end was read")
                    handle.seek(size - most)
                data = handle.read(min(size, most))
        except OSError as error:
            reader.evidence.notices.append(f"{relative}: cannot be read: {error.strerror}")
            continue
        if path.suffix == ".json":
            reader.read_error_file(data, relative, rank, host)
            continue
        reader.read(data, relative, rank, host)
    _tasks_are_nodes(reader.evidence)
    return reader.evidence


def _tasks_are_nodes(evidence: LogEvidence) -> None:
    """Where torchrun ran below srun, srun's tasks are nodes: what it says of them is of no rank."""
    if not any(_OF_TORCHRUN.search(finding.text) for finding in evidence.findings):
        return
    for finding in evidence.findings:
        if finding.text.startswith("srun: error: "):
            finding.rank = None
