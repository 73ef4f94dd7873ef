"""How to read flight recorder dumps of torch.distributed, pickled or JSON, as the input of strangers.

A pickle may hold only plain values: any reference to a class or function is refused, so nothing in it
can run. Sizes are limited, and what cannot be read becomes a notice.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ftdash.monitor.diagnosis import names
from ftdash.monitor.diagnosis.model import FlightDump, FlightEntry, Frame, GroupStatus

MAX_FILE_BYTES = 64 << 20
MAX_ENTRIES = 200_000
MAX_FILES = 20_000
MAX_RANK = 1_000_000
_MAX_FRAMES = 64
AUTOGRAD = "autograd"  # torch's threads that run backward for whoever called it
_P2P_NAME = re.compile(r"^(?P<op>send|recv)\s+(?P<a>\d+)\s*(?P<arrow>->|<-)\s*(?P<b>\d+)$")
_CANONICAL = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}


class FlightError(ValueError):
    """A file is no flight recorder dump; the text says why, in one line."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise FlightError(f"refused: the pickle refers to {module}.{name}, a dump holds plain values only")

    def persistent_load(self, pid: Any) -> Any:
        raise FlightError("refused: the pickle refers to an object outside of it")


def load_plain_pickle(data: bytes) -> Any:
    """The value of a pickle of plain values. Raises FlightError; never imports or calls anything."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except FlightError:
        raise
    except Exception as error:
        raise FlightError(f"broken pickle: {type(error).__name__}: {error}") from None


def _integer(value: Any, default: int = -1) -> int:
    if isinstance(value, bool) or value is None:
        return default
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        tuple(_integer(number, 0) for number in shape[:16])
        for shape in value[:4096]
        if isinstance(shape, list | tuple)
    )


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(str(item)[:40] for item in value[:4096]) if isinstance(value, list | tuple) else ()


def _frames(value: Any) -> tuple[Frame, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(
        Frame(str(item.get("name", "")), str(item.get("filename", "")), _integer(item.get("line"), 0))
        for item in value[:_MAX_FRAMES]
        if isinstance(item, Mapping)
    )


def _ranks(value: Any) -> tuple[int, ...]:
    """Ranks of a group: a list, or its text "[0, 1]", or "" and "[]" where the backend does not say."""
    if isinstance(value, str):
        found = [int(n) for n in re.findall(r"\d+", value[:1_000_000]) if len(n) <= len(str(MAX_RANK))]
    else:
        found = [_integer(item) for item in value] if isinstance(value, list | tuple) else []
    return tuple(rank for rank in found if 0 <= rank <= MAX_RANK)


def canonical_op(profiling_name: str) -> tuple[str, int, int]:
    """("all_reduce", -1, -1) of "nccl:all_reduce"; ("send", 0, 1) of "nccl:send 0->1"."""
    name = profiling_name.split(":", 1)[-1].strip()
    if match := _P2P_NAME.match(name):
        first, second = int(match["a"]), int(match["b"])
        source, target = (first, second) if match["arrow"] == "->" else (second, first)
        return match["op"], source, target
    lowered = name.lower()
    return _CANONICAL.get(lowered, lowered), -1, -1


def _thread(raw: Mapping[str, Any]) -> str:
    if str(raw.get("thread_name", "")).startswith("pt_autograd"):
        return AUTOGRAD
    return str(raw.get("thread_id", ""))[:40]


def _entry(raw: Any) -> FlightEntry | None:
    """A call; None where it has no name or no number, which the recorder always writes."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("profiling_name"), str):
        return None
    group = raw.get("process_group")
    name, desc = "", ""
    if isinstance(group, list | tuple) and group:
        name, desc = str(group[0]), str(group[1]) if len(group) > 1 else ""
    elif isinstance(group, str):
        name = group
    op, source, target = canonical_op(raw["profiling_name"])
    p2p = bool(raw.get("is_p2p", op in ("send", "recv")))
    seq = _integer(raw.get("p2p_seq_id" if p2p else "collective_seq_id", raw.get("seq_id")))
    if not op or seq < 0:
        return None
    return FlightEntry(
        group=name,
        seq=seq,
        op=op,
        record_id=_integer(raw.get("record_id", raw.get("id")), 0),
        group_desc="" if desc == "undefined" else desc,
        p2p=p2p,
        src=source,
        dst=target,
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        input_dtypes=_strings(raw.get("input_dtypes")),
        output_dtypes=_strings(raw.get("output_dtypes")),
        state=str(raw.get("state", "")),
        retired=bool(raw.get("retired", False)),
        timeout_ms=_integer(raw.get("timeout_ms"), 0),
        created_ns=_integer(raw.get("time_created_ns"), 0),
        thread=_thread(raw),
        frames=_frames(raw.get("frames")),
    )


def _groups(config: Any, status: Any) -> dict[str, GroupStatus]:
    config = config if isinstance(config, Mapping) else {}
    status = status if isinstance(status, Mapping) else {}
    found = {}
    for key in [*config, *(key for key in status if key not in config)]:
        described = config.get(key)
        described = described if isinstance(described, Mapping) else {}
        counters = status.get(key)
        counters = counters if isinstance(counters, Mapping) else {}
        name = str(described.get("name") or key)
        found[name] = GroupStatus(
            name=name,
            desc=str(described.get("desc", "")),
            ranks=_ranks(described.get("ranks", ())),
            last_enqueued=_integer(counters.get("last_enqueued_collective")),
            last_started=_integer(counters.get("last_started_collective")),
            last_completed=_integer(counters.get("last_completed_collective")),
        )
    return found


def read_dump(value: Any, rank: int, host: str = "", path: str = "") -> FlightDump:
    """A dump from its plain value. Raises FlightError when it has no entries of the recorder."""
    if isinstance(value, list):
        value = {"entries": value}
    if isinstance(value, Mapping) and "pg_status" in value:
        value = {"entries": [], **value}  # the JSON of a rank that has made no call leaves them out
    if not isinstance(value, Mapping) or not isinstance(value.get("entries"), list):
        raise FlightError("no flight recorder dump: no list of entries")
    raw = value["entries"]
    if len(raw) > MAX_ENTRIES:
        raise FlightError(f"{len(raw)} entries are no flight recorder dump")
    entries = [entry for item in raw if (entry := _entry(item)) is not None]
    if raw and not entries:
        raise FlightError(f"none of its {len(raw)} entries is one of the flight recorder")
    said = _integer(value.get("rank"))
    if said > MAX_RANK:
        raise FlightError(f"no flight recorder dump: rank {str(value['rank'])[:20]}")
    return FlightDump(
        rank=said if said >= 0 else rank,
        host=str(value.get("host_name") or value.get("hostname") or host),
        version=str(value.get("version", "")),
        entries=entries,
        groups=_groups(value.get("pg_config"), value.get("pg_status")),
        path=path,
    )


def load_file(path: Path) -> Any:
    """The plain value in a file, pickle or JSON by its first bytes. Raises FlightError or OSError."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise FlightError(f"{size >> 20} MiB is more than a flight recorder writes, left out")
    if not size:
        raise FlightError("empty file")  # also what the kernel makes up as it is read, and may never end
    data = path.read_bytes()
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FlightError(f"broken JSON: {error}") from None
    return load_plain_pickle(data)


def _count(value: Any) -> int:
    """Entries in the plain value of a dump that was read."""
    return len(value if isinstance(value, list) else value.get("entries", ()))


def read_flight(root: Path) -> tuple[list[FlightDump], list[str]]:
    """All dumps in a folder, by rank, and notices about what was left out.

    A file that bears a rank and cannot be read counts as no dump of that rank: its absence is evidence.
    """
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    notices: list[str] = []
    loaded: list[tuple[str, names.FileName, Any]] = []
    for path in files[:MAX_FILES]:
        relative = path.name if path == root else str(path.relative_to(root))
        if path.name.startswith(".") or path.suffix.lower() in (".txt", ".log", ".py", ".md", ".out", ".err"):
            continue
        try:
            loaded.append((relative, names.read_name(relative), load_file(path)))
        except (FlightError, OSError) as error:
            notices.append(f"{relative}: {error}")
    ranks = names.assign_ranks([name for _, name, _ in loaded])
    dumps: dict[int, FlightDump] = {}
    for (relative, name, value), rank in zip(loaded, ranks, strict=True):
        try:
            dump = read_dump(value, rank, name.host, relative)
        except (FlightError, RecursionError) as error:
            notices.append(f"{relative}: {error}")
            continue
        if broken := _count(value) - len(dump.entries):
            notices.append(f"{relative}: {broken} of {_count(value)} entries are broken and left out")
        if dump.rank in dumps:
            notices.append(f"{relative}: rank {dump.rank} is already given by {dumps[dump.rank].path}")
            if len(dump.entries) < len(dumps[dump.rank].entries):
                continue
        dumps[dump.rank] = dump
    return [dumps[rank] for rank in sorted(dumps)], notices


def user_frame(entries: Iterable[FlightEntry]) -> Frame | None:
    """The user's own line of the last call that has one, else its innermost frame."""
    from ftdash.monitor.diagnosis.frames import Origin, origin

    last = None
    for entry in reversed(list(entries)):
        own = next((frame for frame in entry.frames if origin(frame) is Origin.OWN), None)
        if own is not None:
            return own
        last = last or (entry.frames[0] if entry.frames else None)
    return last
