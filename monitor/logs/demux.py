"""Who wrote a line: rank, host and process by the prefixes that launchers put before it.

Known prefixes: torch "[rank1]:", torchrun's tee "[default0]:" (role and local rank), "[1803] [rank1]",
DeepSpeed's pdsh "192.168.1.51: ", srun --label "3: ", Ray "(RayWorkerWrapper pid=4009, ip=10.0.0.2)",
Open MPI "[1,3]<stdout>:", Megatron and others "[Rank 3]". They may stand one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_PREFIXES = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a line comes from; everything unknown is None or empty. An Origin() is an unassigned line."""

    rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    pid: int | None = None
    actor: str = ""

    @property
    def known(self) -> bool:
        return self != Origin()

    def label(self) -> str:
        """A short name for people: "rank 3", "local rank 0 on 10.0.0.2", "RayWorkerWrapper 4009"."""
        if self.rank is not None:
            return f"rank {self.rank}"
        where = f" on {self.host}" if self.host else ""
        if self.local_rank is not None:
            return f"local rank {self.local_rank}{where}"
        if self.actor:
            return f"{self.actor} {self.pid or ''}".strip() + where
        if self.pid is not None:
            return f"process {self.pid}{where}"
        return self.host or "unassigned"


_IPV4 = r"\d{1,3}(?:\.\d{1,3}){3}"
_PREFIXES = (
    # [rank1]: text, [rank1]:[E602 text, [Rank 3] text, [rank3] text
    re.compile(r"\[[Rr]ank[ _]?(?P<rank>\d+)\]:?[ \t]?"),
    # (RayWorkerWrapper pid=4009) text, (WorkerDict pid=12, ip=10.0.0.2) text, (Actor(name) pid=1) text
    re.compile(rf"\((?P<actor>[\w.()<>]+) pid=(?P<pid>\d+)(?:, ip=(?P<host>{_IPV4}))?\)[ \t]?"),
    # [1,3]<stdout>: text
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>: ?"),
    # 192.168.1.51: text
    re.compile(rf"(?P<host>{_IPV4}): ?"),
    # [1803] before another prefix: a process id
    re.compile(r"\[(?P<pid>\d{2,})\] (?=\[[Rr]ank)"),
    # [default0]: text, [trainer3]: text
    re.compile(r"\[(?P<role>[A-Za-z_]+?)(?P<local_rank>\d+)\]: ?"),
)
_LABEL = re.compile(r"(?P<rank>\d+): ")  # srun --label; only when asked for, as "3: " may be anything
_GLUED = re.compile(
    r"(?<=[^\s\[\]:])(?=\[rank\d+\]:|\[default\d+\]:)|(?<=\S)(?=Traceback \(most recent call last\):)"
)


class Demultiplexer:
    """Finds the origin of each line. `hosts` are host names that pdsh may put first ("node03: text");
    with `labelled`, lines begin with srun's task number, which is the rank."""

    def __init__(self, hosts: Iterable[str] = (), *, labelled: bool = False) -> None:
        names = sorted((re.escape(host) for host in hosts), key=len, reverse=True)
        self._hosts = re.compile(rf"(?P<host>{'|'.join(names)}): ?") if names else None
        self._labelled = labelled

    def lines(self, text: str) -> list[tuple[Origin, str]]:
        """The line as (origin, text without prefixes): several when lines of ranks are glued together.

        Text after a glued boundary without a prefix of its own, such as a traceback behind a progress
        bar, keeps the origin of the line.
        """
        found: list[tuple[Origin, str]] = []
        origin = Origin()
        for piece in _GLUED.split(text):
            own, rest = self.origin(piece)
            if own.known:
                origin = own
            found.append((origin, rest))
        return found

    def origin(self, text: str) -> tuple[Origin, str]:
        """The origin that the prefixes of one line tell, and what follows them."""
        parts: dict[str, str] = {}
        at = 0
        patterns = list(_PREFIXES)
        if self._hosts is not None:
            patterns.append(self._hosts)
        if self._labelled:
            patterns.append(_LABEL)
        for _ in range(MAX_PREFIXES):
            for pattern in patterns:
                if match := pattern.match(text, at):
                    for key, value in match.groupdict().items():
                        if value:
                            parts.setdefault(key, value)
                    at = match.end()
                    break
            else:
                break
        if not at:
            return Origin(), text
        return (
            Origin(
                rank=_number(parts.get("rank")),
                local_rank=_number(parts.get("local_rank")),
                host=parts.get("host", ""),
                pid=_number(parts.get("pid")),
                actor=parts.get("actor", ""),
            ),
            text[at:],
        )


def _number(text: str | None) -> int | None:
    return int(text) if text else None
