"""Whom a rank's call is with: source, destination and root, or rank and world size at the rendezvous, read
from torch's own frames.

py-spy can show local variables. Of its output only small integers of these names, in functions of
torch.distributed, are kept: locals of the user's functions, and everything that could be data, are dropped
where they are read and never stored or shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ftdash.monitor.diagnosis.collect import run_pyspy
from ftdash.monitor.diagnosis.model import RankEvidence

MOST_RANKS = 64
_TIMEOUT_S = 3.0
_NAMES = frozenset({"src", "dst", "group_src", "group_dst", "root"})
_FILE = re.compile(r"(?:^|/)torch/distributed/(?:distributed_c10d|rendezvous)\.py$")
# Where a rank meets the others it is told who it is and how many they are; group_rank and group_size are the
# same in the helper that makes the default group.
_MEETING = re.compile(r"^(?:init_process_group|_\w*rendezvous\w*|_create_c10d_store)$")
_MEETING_NAMES = frozenset({"rank", "world_size"})
_NUMBER = re.compile(r"\d{1,7}")


class _Local(msgspec.Struct):
    name: str = ""
    repr: str | None = None


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    locals: list[_Local] | None = None


class _Thread(msgspec.Struct):
    thread_name: str | None = None
    frames: list[_Frame] = []


_decoder = msgspec.json.Decoder(list[_Thread])


def parse_call(data: bytes) -> dict[str, int]:
    """The call's integers in `py-spy dump --json --locals`, of the outermost torch function that has them.

    Empty when there are none. Raises msgspec.DecodeError when it is something else.
    """
    for thread in _decoder.decode(data):
        if thread.thread_name not in (None, "MainThread"):
            continue
        for frame in reversed(thread.frames):
            if not _FILE.search(frame.filename):
                continue
            wanted = _MEETING_NAMES if _MEETING.search(frame.name) else _NAMES
            found = {
                item.name: int(item.repr)
                for item in frame.locals or ()
                if item.name in wanted and item.repr and _NUMBER.fullmatch(item.repr)
            }
            if found and (wanted is _NAMES or found.keys() == wanted):
                return found
    return {}


def add_calls(ranks: Sequence[RankEvidence]) -> None:
    """Read the calls of these ranks into their evidence, without pausing them; some may stay empty."""

    def ask(evidence: RankEvidence) -> None:
        out, _, timed_out = run_pyspy(evidence.pid, ("--nonblocking", "--locals"), _TIMEOUT_S)
        if timed_out:
            return
        try:
            evidence.call = parse_call(out)
        except msgspec.DecodeError:
            return

    todo = [evidence for evidence in ranks if evidence.pid][:MOST_RANKS]
    if todo:
        with ThreadPoolExecutor(min(8, len(todo))) as pool:
            list(pool.map(ask, todo))


def root_of(call: Mapping[str, int]) -> int | None:
    """The global rank that a rooted call names: its source or destination."""
    for name in ("src", "dst", "group_src", "group_dst", "root"):
        if name in call:
            return call[name]
    return None


def stuck_in_the_ring(waits_for: Mapping[int, int]) -> Collection[int]:
    """Ranks whose point-to-point calls wait for one another in a ring; empty when there is none."""
    for start in waits_for:
        path = [start]
        while (following := waits_for.get(path[-1])) is not None:
            if following in path:
                return frozenset(path[path.index(following) :])
            path.append(following)
    return frozenset()
