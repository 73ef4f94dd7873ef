"""Stacks as a run's agents write them, and an agent that answers requests with the same ones each time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ftdash.monitor import control
from ftdash.monitor.control import Request
from ftdash.monitor.diagnosis.model import (
    Frame,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Thread,
    encode_rank,
)
from ftdash.monitor.records import Meta, encode_line
from ftdash.monitor.rundir import Manifest, RunDir

SITE = "/env/lib/python3.11/site-packages"
IN_GATHER = [
    Frame("all_gather", f"{SITE}/torch/distributed/distributed_c10d.py", 3100),
    Frame("Trainer.training_step", f"{SITE}/transformers/trainer.py", 2100),
    Frame("main", "/home/me/train.py", 12),
]
IN_REWARD = [
    Frame("recv", "/usr/lib/python3.11/socket.py", 706),
    Frame("score_completions", "/home/me/rewards.py", 88),
    Frame("Trainer.training_step", f"{SITE}/transformers/trainer.py", 2100),
    Frame("main", "/home/me/train.py", 12),
]


def stack_of(rank: int, frames: list[Frame]) -> RankEvidence:
    process = ProcessEvidence(
        pid=4000 + rank,
        host=f"host-{rank}",
        t=time.time(),
        rank=rank,
        proc=ProcState(state="S"),
        threads=[Thread("MainThread", 4000 + rank, frames=frames)],
        source="py-spy",
    )
    return RankEvidence(rank=rank, host=f"host-{rank}", t=time.time(), process=process)


@contextlib.contextmanager
def agent(run: RunDir, stacks: dict[int, list[Frame]]) -> Iterator[list[Request]]:
    """Answers dump requests as a node's agent does, from `stacks` as they are then; gives the requests."""
    served: list[Request] = []
    ended = threading.Event()
    host, uid = socket.gethostname(), run.path.stat().st_uid

    def serve() -> None:
        while not ended.wait(0.02):
            for path, request in control.pending(run, host, uid):
                served.append(request)
                folder = run.stacks / request.stamp
                folder.mkdir(exist_ok=True)
                for rank in request.ranks or sorted(stacks):
                    temporary = folder / f".rank-{rank}"
                    temporary.write_bytes(encode_rank(stack_of(rank, stacks[rank])))
                    temporary.rename(folder / f"rank-{rank}.json")
                control.mark_served(path, host)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield served
    finally:
        ended.set()
        thread.join()


def run_elsewhere(root: Path, ranks: int = 4) -> RunDir:
    """A run whose ranks live on other hosts, so that only agents can look at them."""
    manifest = Manifest(run="r1", name="r1", world_size=ranks, state="running")
    made = RunDir.create(manifest, root / "runs")
    for rank in range(ranks):
        meta = Meta(
            t=time.time(),
            rank=rank,
            local_rank=0,
            world_size=ranks,
            host=f"host-{rank}",
            pid=4000 + rank,
            device="cpu",
        )
        made.rank_file(rank).write_bytes(encode_line(meta))
    return made
