"""Flight recorder dumps as torch writes them, made by hand: healthy, with a missing rank, with mismatches."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = tuple[str, list[int]]


def entry(
    record: int,
    seq: int,
    call: Call,
    *,
    group: str = "0",
    desc: str = "default_pg",
    done: bool = True,
    line: int = 10,
) -> dict[str, Any]:
    op, shape = call
    return {
        "record_id": record,
        "pg_id": int(group),
        "process_group": (group, desc),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": record,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + record * 1000,
        "duration_ms": 0.0,
        "input_sizes": [shape],
        "input_dtypes": ["Float"],
        "output_sizes": [shape],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/x/site-packages/torch/distributed/distributed_c10d.py",
                "line": 1,
            },
            {"name": "train", "filename": "/home/user/train.py", "line": line},
        ],
    }


def dump(entries: list[dict[str, Any]], groups: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    last = {
        name: max((e["collective_seq_id"] for e in entries if e["process_group"][0] == name), default=-1)
        for name in groups
    }
    done = {
        name: max(
            (e["collective_seq_id"] for e in entries if e["process_group"][0] == name and e["retired"]),
            default=-1,
        )
        for name in groups
    }
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()
        },
        "pg_status": {
            name: {
                "last_enqueued_collective": last[name],
                "last_started_collective": last[name],
                "last_completed_collective": done[name],
            }
            for name in groups
        },
        "entries": entries,
    }


REDUCE: Call = ("all_reduce", [8])
GATHER: Call = ("all_gather", [8])
STOP = 6  # the sequence number at which the others wait


def world(ranks: int, calls: Callable[[int, int], Call | None]) -> dict[int, dict[str, Any]]:
    """Dumps of one group: `calls(rank, seq)` is what a rank calls at 1..STOP, None if it stops before."""
    dumps = {}
    for rank in range(ranks):
        entries = []
        for seq in range(1, STOP + 1):
            call = calls(rank, seq)
            if call is None:
                break
            entries.append(entry(seq - 1, seq, call, done=seq < STOP, line=10 + seq))
        dumps[rank] = dump(entries, {"0": ("default_pg", list(range(ranks)))})
    return dumps


def usual(rank: int, seq: int) -> Call:
    return REDUCE if seq % 2 == 0 else ("broadcast", [8])


def missing(ranks: int, culprit: int) -> dict[int, dict[str, Any]]:
    return world(ranks, lambda rank, seq: None if rank == culprit and seq == STOP else usual(rank, seq))


def other_type(ranks: int, culprit: int) -> dict[int, dict[str, Any]]:
    return world(
        ranks, lambda rank, seq: ("reduce", [8]) if rank == culprit and seq == STOP else usual(rank, seq)
    )


def other_size(ranks: int, culprit: int) -> dict[int, dict[str, Any]]:
    return world(
        ranks, lambda rank, seq: ("all_reduce", [16]) if rank == culprit and seq == STOP else usual(rank, seq)
    )


def equal(ranks: int) -> dict[int, dict[str, Any]]:
    return world(ranks, usual)


NAMINGS: dict[str, Callable[[int], str]] = {
    "nccl_trace_rank_": lambda rank: f"nccl_trace_rank_{rank}",
    "host in the name": lambda rank: f"nccl_trace_rank_container-node{rank // 2:02}_{rank}",
    "trace_host_rank": lambda rank: f"trace_gpu-a{rank // 2}_{rank}",
    "pkl": lambda rank: f"rank{rank}.pkl",
    "folder a host": lambda rank: f"node{rank // 2}/rank_{rank}",
}


def write(
    folder: Path, dumps: dict[int, dict[str, Any]], naming: str = "nccl_trace_rank_", as_json: bool = False
) -> None:
    for rank, value in dumps.items():
        path = folder / NAMINGS[naming](rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.dumps(value).encode() if as_json else pickle.dumps(value))
