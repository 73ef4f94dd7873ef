"""Python tracebacks in a log of many ranks: collected by writer, alike ones grouped, the first one named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ftdash.monitor.logs.demux import Origin

MAX_FRAMES = 200
MAX_OPEN = 4096  # tracebacks that are being collected at once, one a writer
MAX_GROUPS = 256

_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_EXCEPTION = re.compile(
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Fault|[A-Z]\w*))(?:: (?P<text>.*))?$"
)
_VARYING = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
_ELASTIC = re.compile(
    r"^\s*(?:\[\d+\]:)?\s*(?P<key>time|host|rank|exitcode|error_file|traceback)\s*: (?P<value>.*)$"
)

# Exceptions that tell of another rank's end: never the first failure while there is another one.
CONSEQUENCES = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "communicator was aborted",
    "remote process exited",
    "sigterm",
    "signalexception",
    "childfailederror",
    "watchdog caught collective operation timeout",
    "socket timeout",
    "keyboardinterrupt",
)


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One line of a traceback; the innermost frame of a Traceback is its last."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Traceback:
    """One traceback of one writer. `t` is UTC seconds by the newest time stamp before it, 0 without."""

    origin: Origin
    frames: tuple[LogFrame, ...]
    exception: str
    text: str
    order: int
    t: float = 0.0

    @property
    def consequence(self) -> bool:
        """True when it tells of somebody else's end."""
        words = f"{self.exception} {self.text}".lower()
        return any(mark in words for mark in CONSEQUENCES)

    def signature(self) -> tuple[tuple[tuple[str, int], ...], str, str]:
        """What makes tracebacks alike: frames, exception type, message without its numbers."""
        places = tuple((frame.file, frame.line) for frame in self.frames)
        return places, self.exception, _VARYING.sub("#", self.text)


@dataclass(slots=True)
class TracebackGroup:
    """Alike tracebacks; `first` is the earliest of them."""

    first: Traceback
    origins: list[Origin] = field(default_factory=list)
    count: int = 0

    @property
    def ranks(self) -> list[int]:
        return sorted({origin.rank for origin in self.origins if origin.rank is not None})


@dataclass(slots=True)
class _Open:
    order: int
    t: float
    frames: list[LogFrame] = field(default_factory=list)


class TracebackCollector:
    """Feed it lines with their origins; tracebacks of different writers may be interleaved."""

    def __init__(self) -> None:
        self.groups: dict[object, TracebackGroup] = {}
        self.skipped = 0  # tracebacks beyond the number of groups that are kept
        self._open: dict[Origin, _Open] = {}
        self._order = 0
        self._t = 0.0

    def feed(self, origin: Origin, text: str) -> Traceback | None:
        """Take one line; returns a traceback when this line completed one."""
        self._order += 1
        if (t := time_of(text, self._t)) is not None:
            self._t = t
        stripped = text.strip()
        if stripped.endswith(_START):
            if len(self._open) < MAX_OPEN:
                self._open[origin] = _Open(self._order, self._t)
            return None
        current = self._open.get(origin)
        if current is None:
            return None
        if match := _FRAME.match(text):
            if len(current.frames) < MAX_FRAMES:
                frame = LogFrame(match["file"], int(match["line"]), match["function"] or "<module>")
                current.frames.append(frame)
            return None
        if (
            not stripped
            or text[:1] in " \t"
            or set(stripped) <= set("^~")
            or stripped.startswith("[Previous")
        ):
            return None
        match = _EXCEPTION.match(stripped)
        del self._open[origin]
        if match is None:
            return None
        done = Traceback(
            origin, tuple(current.frames), match["type"], match["text"] or "", current.order, current.t
        )
        self._group(done)
        return done

    def _group(self, traceback: Traceback) -> None:
        key = traceback.signature()
        group = self.groups.get(key)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                self.skipped += 1
                return
            group = self.groups[key] = TracebackGroup(traceback)
        group.count += 1
        if traceback.origin not in group.origins:
            group.origins.append(traceback.origin)

    def first_failure(self) -> Traceback | None:
        """The earliest traceback that is not the consequence of another rank's end; by time, then order."""
        return first_failure(group.first for group in self.groups.values())


def first_failure(tracebacks: Iterable[Traceback]) -> Traceback | None:
    """By time where all have one, else by the order of their lines; consequences only when alone."""
    known = list(tracebacks)
    causes = [item for item in known if not item.consequence] or known
    if not causes:
        return None
    if all(item.t for item in causes):
        return min(causes, key=lambda item: (item.t, item.order))
    return min(causes, key=lambda item: item.order)


@dataclass(frozen=True, slots=True)
class ElasticFailure:
    """One entry of torchrun's failure report, which names the first observed failure as its root cause."""

    rank: int | None
    local_rank: int | None
    host: str
    exit_code: int | None
    pid: int | None
    t: float
    root_cause: bool


class ElasticReport:
    """Reads torchrun's report at the end of a log ("Root Cause (first observed failure):")."""

    def __init__(self) -> None:
        self.failures: list[ElasticFailure] = []
        self._root = False
        self._parts: dict[str, str] = {}

    def feed(self, text: str) -> None:
        """Take one line without its prefix."""
        if text.startswith(("Root Cause", "Failures:")):
            self._finish()
            self._root = text.startswith("Root Cause")
            return
        if match := _ELASTIC.match(text):
            if match["key"] == "time":
                self._finish()
            self._parts[match["key"]] = match["value"].strip()
        elif text.startswith(("====", "----")):
            self._finish()

    def root_cause(self) -> ElasticFailure | None:
        self._finish()
        return next((failure for failure in self.failures if failure.root_cause), None)

    def _finish(self) -> None:
        parts, self._parts = self._parts, {}
        if "rank" not in parts:
            return
        rank = re.match(r"(\d+)(?: \(local_rank: (\d+)\))?", parts["rank"])
        code = re.match(r"(-?\d+)(?: \(pid: (\d+)\))?", parts.get("exitcode", ""))
        self.failures.append(
            ElasticFailure(
                rank=int(rank[1]) if rank else None,
                local_rank=int(rank[2]) if rank and rank[2] else None,
                host=parts.get("host", ""),
                exit_code=int(code[1]) if code else None,
                pid=int(code[2]) if code and code[2] else None,
                t=time_of(parts.get("time", ""), 0.0) or 0.0,
                root_cause=self._root,
            )
        )


def time_of(text: str, newest: float) -> float | None:
    """The time stamp in a line as UTC seconds, taking it for UTC; None without one.

    The year that glog leaves out ("E0602 10:11:12.5") is that of `newest`, the last time seen.
    """
    try:
        if match := _ISO.search(text, 0, 80):
            year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
            micro = int((match[7] or "0").ljust(6, "0"))
            return datetime(year, month, day, hour, minute, second, micro, UTC).timestamp()
        if match := _GLOG.search(text, 0, 40):
            month, day, hour, minute, second = (int(match[i]) for i in range(1, 6))
            year = datetime.fromtimestamp(newest, UTC).year if newest else datetime.now(UTC).year
            return datetime(
                year, month, day, hour, minute, second, int(match[6].ljust(6, "0")), UTC
            ).timestamp()
    except ValueError:
        return None
    return None
