"""What file names tell: rank, host and sample of a dump or a log, in any of the common conventions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

_RANK = re.compile(r"(?<!local)(?<!local[_-])(?:global[_-]?)?rank[_\-=.:]?(\d+)", re.I)
_SHORT_RANK = re.compile(r"(?:^|[_\-./])r(\d+)(?=$|[_\-./])", re.I)
_LOCAL = re.compile(r"(?:local[_-]?rank|gpu|device|worker|proc|local)[_\-=.:]?(\d+)(?=$|[_\-./])", re.I)
_PID = re.compile(r"pid[_\-=.:]?(\d+)", re.I)
_TRAILING = re.compile(r"(?:^|[_\-.])(\d{1,6})$")
_SAMPLE = re.compile(
    r"(?:^|[_\-./])((?:sample|snapshot|snap|round|pass|dump|try)[_\-]?\d+)(?=$|[_\-./])", re.I
)
_HOSTLIKE = re.compile(r"^(?=.*[a-z])[a-z0-9][a-z0-9\-]*$", re.I)
_HOST_WORD = re.compile(
    r"node|host|gpu|worker|dgx|compute|ip-|container|vm|pod|nid|srv|server|machine|cn\d", re.I
)
_NOISE = re.compile(
    r"^(?:py-?spy|stacks?|dumps?|traces?|nccl|gloo|fr|flight|recorder|txt|json|pkl|pickle|out|err|log|logs|stderr"
    r"|stdout|rank|ranks|local|pid|faulthandler|traceback|attempt|none|torchelastic|error|train|job|run|file"
    r"|comm|lib|samples?|snapshot|snap|round|pass|try|new|old|process|proc|threads?|collective|py|spy)$",
    re.I,
)
_SUFFIXES = {
    ".txt",
    ".json",
    ".log",
    ".out",
    ".err",
    ".pkl",
    ".pickle",
    ".dump",
    ".jsonl",
    ".stack",
    ".stacks",
}


@dataclass(frozen=True, slots=True)
class FileName:
    """`rank` is global; `local_rank` counts within a host. `sample` orders dumps of the same rank."""

    rank: int | None = None
    local_rank: int | None = None
    host: str = ""
    sample: str = ""


def _host_in(text: str) -> str:
    """The first part of a name, freed of known words, that could be a host."""
    for token in re.split(r"[_/.]", text):
        parts = [part for part in token.split("-") if part]
        while parts and _NOISE.match(parts[0]):
            parts.pop(0)
        while parts and _NOISE.match(parts[-1]):
            parts.pop()
        candidate = "-".join(parts)
        if (
            candidate
            and _HOSTLIKE.match(candidate)
            and (_HOST_WORD.search(candidate) or re.search(r"\d", candidate))
        ):
            return candidate
    return ""


def read_name(path: str) -> FileName:
    """Read a path relative to the folder that was given."""
    pure = PurePath(path)
    stem = pure.name
    while PurePath(stem).suffix.lower() in _SUFFIXES:
        stem = PurePath(stem).stem
    folder = "" if str(pure.parent) == "." else str(pure.parent)
    sample = match[1] if (match := _SAMPLE.search(f"{folder}/{stem}")) else ""
    rest = _PID.sub("", stem)
    rank = local = None
    if match := _RANK.search(rest) or _SHORT_RANK.search(rest):
        rank = int(match[1])
    elif match := _LOCAL.search(rest):
        local = int(match[1])
        if (trailing := _TRAILING.search(rest)) and trailing.end(1) > match.end(1):
            # A number behind it is the rank: the first one belongs to the host's name.
            local, rank, match = None, int(trailing[1]), trailing
    elif match := _TRAILING.search(_SAMPLE.sub("", rest)):
        rank = int(match[1])
    elif folder and (match := _RANK.search(folder)):
        rank = int(match[1])
        folder = folder[: match.start()] + folder[match.end() :]
        match = None
    elif folder and PurePath(folder).name.isdigit():
        local = int(PurePath(folder).name)
    if match:
        rest = rest[: match.start()] + "_" + rest[match.end() :]
    host = _host_in(_SAMPLE.sub("_", rest)) or _host_in(folder)
    return FileName(rank=rank, local_rank=local, host=host, sample=sample)


def assign_ranks(names: Sequence[FileName]) -> list[int]:
    """Global ranks for files of one sample: said ones stay; local ones count on over hosts by name."""
    said = [name.rank for name in names]
    if all(rank is not None for rank in said) and len(set(said)) == len(said):
        return [rank for rank in said if rank is not None]
    locals_known = [name.local_rank if name.local_rank is not None else name.rank for name in names]
    hosts = sorted({name.host for name in names}, key=natural_key)
    if all(number is not None for number in locals_known):
        pairs = {(name.host, number) for name, number in zip(names, locals_known, strict=True)}
        if len(pairs) == len(names):
            width = max(number for number in locals_known if number is not None) + 1
            return [
                hosts.index(name.host) * width + (number or 0)
                for name, number in zip(names, locals_known, strict=True)
            ]
    free = iter(number for number in range(len(names) * 2) if number not in set(said))
    taken: set[int] = set()
    result = []
    for rank in said:
        number = rank if rank is not None and rank not in taken else next(free)
        taken.add(number)
        result.append(number)
    return result


def natural_key(text: str) -> list[tuple[int, str]]:
    """Sorts node2 before node10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
