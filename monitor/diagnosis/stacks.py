"""How to read stack dumps that lie in files: py-spy JSON and text of any version, faulthandler, our own.

A folder may hold one file a rank, many ranks in one file, and several samples of the same ranks. What
cannot be read becomes a notice, and a rank whose dump failed stays as evidence without a stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis import names
from ftdash.monitor.diagnosis.collect import parse_pyspy_json
from ftdash.monitor.diagnosis.model import (
    DumpFailure,
    Frame,
    ProcessEvidence,
    RankEvidence,
    Sample,
    Thread,
    decode_rank,
)

MAX_FILE_BYTES = 48 << 20
MAX_FILES = 20000

_THREAD = re.compile(r'^Thread (?:0x)?([0-9A-Fa-f]+)(?: \(([a-z+]+)\))?(?:: ?"(.*)")?\s*$')
_FAULT_THREAD = re.compile(
    r"^(?:Current t|T)hread (?:0x)?([0-9A-Fa-f]+)(?: \[(.*?)\])? \(most recent call (first|last)\):"
)
_TRACE_HEAD = re.compile(r"^(?:Traceback|Stack) \(most recent call (first|last)\):")
_FRAME = re.compile(r"^\s{1,7}(?P<name>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)\s*$")
_PY_FRAME = re.compile(r'^\s+File "(?P<file>.*?)", line (?P<line>\d+|\?\?\?)(?:,)? in (?P<name>.+?)\s*$')
_PROCESS = re.compile(r"^\s*(?P<parent>Parent )?Process (?P<pid>\d+): ?(?P<command>.*)$")
_RANK_HEADER = re.compile(r"\b(?:global[_ -]?)?rank\s*[#_=: -]?\s*(\d+)\b", re.I)
_LOCAL_ARG = re.compile(r"--local[_-]rank[= ](\d+)")
_HOST_HEADER = re.compile(r"\b(?:host|node|hostname|on)\s*[=: ]\s*([A-Za-z][\w.-]*)", re.I)
_HOST_IN_PARENS = re.compile(r"[(@]\s*([A-Za-z][\w.-]*\d[\w.-]*)\s*[),]?")
_PID_HEADER = re.compile(r"\bpid\s*[=: ]\s*(\d+)", re.I)
_STATE = re.compile(
    r"(?:\bSTAT(?:E)?\b\s*[=:]?\s*|^State:\s*|\bstate\s*[=:]?\s*)([RSDTZtXI])[a-zA-Z<+]*(?=$|[\s(,;)])"
)
_PREFIXES = (
    re.compile(r"^\[(?:rank|default)\s?(?P<rank>\d+)\]:? ?(?P<rest>.*)$"),
    re.compile(r"^\s{0,4}(?P<rank>\d{1,5}): (?P<rest>.*)$"),
    re.compile(r"^\s{0,4}(?P<rank>\d{1,5}):(?P<rest>)$"),
)
_CHILD_MARK = re.compile(r"spawn_main|forkserver|multiprocessing|_worker_loop|compile_worker")
_FAILURES: tuple[tuple[re.Pattern[str], DumpFailure], ...] = (
    (
        re.compile(r"Failed to get process executable|No such process|os error 3\b|ESRCH", re.I),
        DumpFailure.GONE,
    ),
    (re.compile(r"Failed to suspend process|EPERM|Operation not permitted", re.I), DumpFailure.UNREADABLE),
    (re.compile(r"Permission denied|os error 13", re.I), DumpFailure.NO_PTRACE),
    (re.compile(r"Failed to find python version", re.I), DumpFailure.UNSUPPORTED_PYTHON),
    (re.compile(r"timed? ?out|timeout", re.I), DumpFailure.TIMEOUT),
    (re.compile(r"^\s*(?:Error|error)[:\s]"), DumpFailure.UNREADABLE),
)


@dataclass(slots=True)
class Chunk:
    """One rank's part of a file."""

    rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    pid: int = 0
    processes: list[ProcessEvidence] = field(default_factory=list)
    failure: DumpFailure | None = None
    failure_text: str = ""
    state: str = ""
    ready: RankEvidence | None = None
    position: int = 0

    def evidence(self, rank: int, host: str, t: float) -> RankEvidence:
        if self.ready is not None:
            if self.ready.rank < 0:
                self.ready.rank = rank
            return self.ready
        main = self.processes[0] if self.processes else ProcessEvidence(pid=self.pid)
        main.children = [*main.children, *self.processes[1:]]
        main.source, main.rank, main.host, main.t = "file", rank, host, t
        main.proc.state = main.proc.state or self.state
        if not any(thread.frames for thread in main.threads):
            main.failure = self.failure or DumpFailure.UNREADABLE
            if self.state == "D":
                main.failure = DumpFailure.D_STATE
            elif self.state == "Z":
                main.failure = DumpFailure.ZOMBIE
            main.failure_text = self.failure_text or "the dump holds no stack"
        return RankEvidence(rank=rank, host=host, t=t, process=main)


class _TextReader:
    """Turns the lines of a dump into chunks; knows nothing of file names."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._thread: Thread | None = None
        self._last_first = False

    def _chunk(self) -> Chunk:
        if not self.chunks:
            self.chunks.append(Chunk())
        return self.chunks[-1]

    def _process(self) -> ProcessEvidence:
        chunk = self._chunk()
        if not chunk.processes:
            chunk.processes.append(ProcessEvidence(pid=chunk.pid))
        return chunk.processes[-1]

    def _start_process(self, pid: int, command: str) -> None:
        chunk = self._chunk()
        child = bool(_CHILD_MARK.search(command))
        known = _RANK_HEADER.search(command.replace("local_rank", "local"))
        if chunk.processes and not child and chunk.rank is None:
            chunk = Chunk()
            self.chunks.append(chunk)
        if match := _LOCAL_ARG.search(command):
            chunk.local_rank = int(match[1])
        elif known and chunk.rank is None:
            chunk.rank = int(known[1])
        chunk.pid = chunk.pid or pid
        chunk.processes.append(ProcessEvidence(pid=pid, command=command.split()))
        self._thread = None

    def _adopt(self, parent: int) -> None:
        """The process just begun is a child of one that came before: it belongs to that rank."""
        owner = next((c for c in self.chunks[:-1] if any(p.pid == parent for p in c.processes)), None)
        if owner is not None:
            owner.processes.extend(self.chunks.pop().processes)
            self.chunks.remove(owner)
            self.chunks.append(owner)

    def _start_thread(self, tid: str, name: str, status: str) -> None:
        number = int(tid, 16) if re.search(r"[A-Fa-f]", tid) or len(tid) > 12 else int(tid)
        self._thread = Thread(name=name, os_tid=number, active="active" in status, owns_gil="gil" in status)
        self._process().threads.append(self._thread)

    def _finish(self) -> None:
        if self._thread is not None and self._last_first:
            self._thread.frames.reverse()
        self._thread, self._last_first = None, False

    def _frame(self, line: str) -> bool:
        if self._thread is None:
            return False
        frame = _frame_of(line)
        if frame is not None:
            self._thread.frames.append(frame)
        return frame is not None

    def _header(self, line: str) -> bool:
        match = _RANK_HEADER.search(line)
        if match is None or "local" in line[: match.start()].lower()[-6:]:
            return False
        self._finish()
        chunk = Chunk(rank=int(match[1]))
        if host := _HOST_HEADER.search(line) or _HOST_IN_PARENS.search(line):
            chunk.host = host[1]
        if pid := _PID_HEADER.search(line):
            chunk.pid = int(pid[1])
        if state := _STATE.search(line):
            chunk.state = state[1]
        if self.chunks and not self.chunks[-1].processes and self.chunks[-1].rank is None:
            self.chunks.pop()
        self.chunks.append(chunk)
        return True

    def feed(self, line: str) -> None:
        if line[:1] == " " and self._frame(line):
            return
        if match := _FAULT_THREAD.match(line):
            self._finish()
            self._start_thread(match[1], match[2] or "", "")
            self._last_first = match[3] == "last"
        elif match := _THREAD.match(line):
            self._finish()
            self._start_thread(match[1], match[3] or "", match[2] or "")
        elif match := _TRACE_HEAD.match(line):
            self._finish()
            self._start_thread("0", "", "")
            self._last_first = match[1] == "last"
        elif match := _PROCESS.match(line):
            self._finish()
            if match["parent"]:
                self._adopt(int(match["pid"]))
            else:
                self._start_process(int(match["pid"]), match["command"])
        elif not line.strip() or (line[:1].isspace() and self._thread is not None):
            return
        elif not self._header(line):
            self._other(line)

    def _other(self, line: str) -> None:
        if state := _STATE.search(line):
            self._chunk().state = state[1]
        if self._chunk().failure is None:
            for pattern, failure in _FAILURES:
                if pattern.search(line):
                    self._chunk().failure, self._chunk().failure_text = failure, line.strip()
                    return

    def done(self) -> list[Chunk]:
        """All chunks; a forked loader worker joins the rank that was dumped before it."""
        self._finish()
        joined: list[Chunk] = []
        for chunk in self.chunks:
            if joined and chunk.rank is None and chunk.processes and _is_worker(chunk.processes[0]):
                joined[-1].processes.extend(chunk.processes)
            else:
                joined.append(chunk)
        return joined


def _is_worker(process: ProcessEvidence) -> bool:
    return any(frame.short == "_worker_loop" for thread in process.threads for frame in thread.frames)


@lru_cache(maxsize=65536)
def _frame_of(line: str) -> Frame | None:
    match = _PY_FRAME.match(line) or _FRAME.match(line)
    if match is None:
        return None
    number = match["line"]
    return Frame(match["name"], match["file"] or "", int(number) if number and number.isdigit() else 0)


_PREFIX_LINES = 20  # enough to see that a file has no prefixes


def _demultiplex(lines: list[str]) -> dict[int, list[str]] | None:
    """Lines by rank when (nearly) all carry one of the known prefixes, else None."""
    for prefix in _PREFIXES[:2]:
        by_rank: dict[int, list[str]] = {}
        hits = total = 0
        for line in lines:
            if not line.strip():
                continue
            total += 1
            if total == _PREFIX_LINES and hits < total / 2:
                break
            if match := prefix.match(line) or _PREFIXES[2].match(line):
                hits += 1
                by_rank.setdefault(int(match["rank"]), []).append(match["rest"])
        if hits and hits >= 0.9 * total:
            return by_rank
    return None


def read_text(text: str) -> list[Chunk]:
    """Chunks of a text dump, in order."""
    lines = text.splitlines()
    if parts := _demultiplex(lines):
        chunks = []
        for rank, rest in parts.items():
            for chunk in _read_lines(rest):
                chunk.rank = rank
                chunks.append(chunk)
        return chunks
    return _read_lines(lines)


def _read_lines(lines: Iterable[str]) -> list[Chunk]:
    reader = _TextReader()
    for line in lines:
        reader.feed(line)
    return reader.done()


def _threads_of(value: object) -> list[ProcessEvidence]:
    """Processes of a py-spy thread list; threads of children carry another pid."""
    if not isinstance(value, list):
        return []
    by_pid: dict[int, list[object]] = {}
    for item in value:
        pid = item.get("pid", 0) if isinstance(item, dict) else 0
        by_pid.setdefault(pid if isinstance(pid, int) else 0, []).append(item)
    processes = [
        ProcessEvidence(pid=pid, threads=parse_pyspy_json(msgspec.json.encode(items)))
        for pid, items in by_pid.items()
    ]
    return sorted(processes, key=_is_worker)


_THREAD_KEYS = ("threads", "stacks", "dump", "stack", "py_spy", "pyspy", "traces", "traceback")


def _chunk_of_object(value: object) -> Chunk | None:
    if isinstance(value, list):
        processes = _threads_of(value)
        return Chunk(processes=processes) if processes else None
    if not isinstance(value, dict):
        return None
    chunk = Chunk(host=str(value.get("host") or value.get("hostname") or value.get("node") or ""))
    for key, name in (
        ("rank", "rank"),
        ("global_rank", "rank"),
        ("local_rank", "local_rank"),
        ("pid", "pid"),
    ):
        if isinstance(value.get(key), int):
            setattr(chunk, name, value[key])
    state = value.get("state") or value.get("stat") or ""
    chunk.state = state[:1] if isinstance(state, str) else ""
    error = value.get("error") or value.get("failure") or ""
    if isinstance(error, str) and error:
        chunk.failure_text = error
        chunk.failure = next((f for pattern, f in _FAILURES if pattern.search(error)), DumpFailure.UNREADABLE)
    for key in _THREAD_KEYS:
        held = value.get(key)
        if isinstance(held, list):
            chunk.processes = _threads_of(held)
            return chunk
        if isinstance(held, str):
            inner = read_text(held)
            if inner:
                chunk.processes = inner[0].processes
                chunk.failure = chunk.failure or inner[0].failure
            return chunk
    return chunk if chunk.rank is not None or chunk.failure else None


def read_json(data: bytes) -> list[Chunk]:
    """Chunks of a JSON dump: py-spy's thread list, our own format, or ranks in one object or list.

    Raises msgspec.DecodeError (or RecursionError) for what is not JSON of that kind.
    """
    if b'"process"' in data and b'"rank"' in data:
        try:
            return [Chunk(ready=decode_rank(data), rank=None)]
        except msgspec.DecodeError:
            pass
    try:
        threads = parse_pyspy_json(data)
        if b'"pid"' not in data[:4096] or len(set(re.findall(rb'"pid":\s*(\d+)', data))) <= 1:
            pid = re.search(rb'"pid":\s*(\d+)', data[:4096])
            number = int(pid[1]) if pid else 0
            return (
                [Chunk(pid=number, processes=[ProcessEvidence(pid=number, threads=threads)])]
                if threads
                else []
            )
    except msgspec.ValidationError:
        pass
    value = msgspec.json.decode(data)
    if isinstance(value, dict):
        held = value.get("ranks") if isinstance(value.get("ranks"), dict | list) else value
        if isinstance(held, dict) and held and all(str(key).lstrip("rank_-").isdigit() for key in held):
            chunks = []
            for key, item in held.items():
                part = _chunk_of_object(item) or Chunk(failure=DumpFailure.UNREADABLE)
                part.rank = int(str(key).lstrip("rank_-"))
                chunks.append(part)
            return chunks
        value = held
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and "frames" not in item for item in value)
    ):
        return [chunk for item in value if (chunk := _chunk_of_object(item))]
    single = _chunk_of_object(value)
    return [single] if single else []


def read_bytes(data: bytes) -> list[Chunk]:
    """Chunks of one file, whatever its format. Raises ValueError when nothing fits."""
    head = data.lstrip()[:1]
    if head in (b"[", b"{") and not re.match(rb"\s*\[(?:rank|default)?\s?\d", data):
        try:
            return read_json(data)
        except (msgspec.DecodeError, RecursionError):
            lines = [line for line in data.splitlines() if line.strip()]
            chunks = []
            for line in lines:
                try:
                    chunks.extend(read_json(line))
                except (msgspec.DecodeError, RecursionError):
                    raise ValueError("neither JSON nor JSON lines") from None
            return chunks
    return read_text(data.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class _Part:
    path: str
    folder: str
    name: names.FileName
    chunk: Chunk
    t: float


def _parts(root: Path, notices: list[str]) -> list[_Part]:
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    parts = []
    for path in files[:MAX_FILES]:
        relative = path.name if path == root else str(path.relative_to(root))
        if path.name.startswith(".") or path.suffix.lower() in (
            ".pkl",
            ".pickle",
            ".pt",
            ".py",
            ".md",
            ".sh",
        ):
            continue
        try:
            status = path.stat()
            if status.st_size > MAX_FILE_BYTES:
                notices.append(f"{relative}: {status.st_size >> 20} MiB is no stack dump, left out")
                continue
            # A file of no size may be one that the kernel makes up as it is read, and that never ends.
            chunks = read_bytes(path.read_bytes() if status.st_size else b"")
        except (OSError, ValueError) as error:
            notices.append(f"{relative}: cannot be read: {error}")
            continue
        name = names.read_name(relative)
        if not chunks:
            if name.rank is None and name.local_rank is None:
                notices.append(f"{relative}: no stack in it")
                continue
            chunks = [Chunk(failure=DumpFailure.UNREADABLE, failure_text="empty dump")]
        folder = str(Path(relative).parent)
        for position, chunk in enumerate(chunks):
            chunk.position = position
            parts.append(_Part(relative, "" if folder == "." else folder, name, chunk, status.st_mtime))
    if len(files) > MAX_FILES:
        notices.append(f"only the first {MAX_FILES} files were read")
    return parts


def _identity(part: _Part, alone: bool) -> names.FileName:
    chunk, name = part.chunk, part.name
    if chunk.ready is not None and chunk.ready.rank >= 0:
        return names.FileName(rank=chunk.ready.rank, host=chunk.ready.host)
    rank = chunk.rank if chunk.rank is not None else (name.rank if alone else None)
    local = chunk.local_rank if chunk.local_rank is not None else (name.local_rank if alone else None)
    return names.FileName(rank=rank, local_rank=local, host=chunk.host or name.host)


def _split_samples(parts: list[_Part]) -> list[list[_Part]]:
    """Parts by sample: by a word in the name, else by folder when the same rank comes again in each."""
    if len({part.name.sample for part in parts}) > 1:
        keys = sorted({part.name.sample for part in parts}, key=names.natural_key)
        return [[part for part in parts if part.name.sample == key] for key in keys]
    folders = sorted({part.folder for part in parts}, key=names.natural_key)
    if len(folders) > 1:
        seen: dict[str, set[tuple[str, int | None]]] = {}
        for part in parts:
            identity = _identity(part, True)
            number = identity.rank if identity.rank is not None else identity.local_rank
            seen.setdefault(part.folder, set()).add((part.chunk.host or "", number))
        hosts = any(names.read_name(f"{folder}/x").host for folder in folders)
        overlap = set.intersection(*seen.values())
        if overlap and not hosts:
            return [[part for part in parts if part.folder == folder] for folder in folders]
    return [parts]


def read_stacks(root: Path) -> list[Sample]:
    """All samples in a folder (or one file), oldest first. Raises OSError when it cannot be listed."""
    notices: list[str] = []
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder")
    parts = _parts(root, notices)
    samples = []
    for group in _split_samples(parts):
        per_file: dict[str, int] = {}
        for part in group:
            per_file[part.path] = per_file.get(part.path, 0) + 1
        identities = [_identity(part, per_file[part.path] == 1) for part in group]
        ranks = names.assign_ranks(identities)
        evidence = [
            part.chunk.evidence(rank, identity.host, part.t)
            for part, identity, rank in zip(group, identities, ranks, strict=True)
        ]
        evidence.sort(key=lambda item: item.rank)
        t = max((part.t for part in group), default=0.0)
        expected = frozenset(range(max(ranks, default=-1) + 1))
        samples.append(Sample(t=t, ranks=tuple(evidence), expected=expected, notices=tuple(notices)))
    return samples or [Sample(notices=tuple(notices))]
