"""Writes what is seen of somebody else's job into a run directory, as the job's own agent would.

Screens, alerts and `diagnose` then work on it like on any run. Nothing is asked of the job itself.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ftdash.monitor import control, procs
from ftdash.monitor.agent.sample import NodeFile, RankSampler, node_sample
from ftdash.monitor.agent.watch import Watched
from ftdash.monitor.attach.watch import Attached, JobView, RankView
from ftdash.monitor.control import Action, Request
from ftdash.monitor.hostname import node_name
from ftdash.monitor.logs.memory import LoggedMemory
from ftdash.monitor.procs import RankProcess
from ftdash.monitor.records import Event, Exit, Meta, Record, Step, number
from ftdash.monitor.rundir import RunDir

ONLY_WATCHED = "this job is only watched: nothing in it is signalled or ended from here"


class Recorder:
    """One node's share of one job. The files of its ranks and of the node are written by nobody else."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.host = node_name()
        self._node = NodeFile(run.node_file(self.host))
        self._sampler = RankSampler(run)
        self._files: dict[int, NodeFile] = {}
        self._ranks: dict[int, Watched] = {}
        self._steps: dict[int, Step] = {}

    def write(self, seen: Attached) -> None:
        """Record the job with the most ranks of this look, and answer what screens have asked for."""
        self._sampler.devices = list(seen.gpus)
        records: list[Record] = [node_sample(self.host), *seen.gpus]
        job = max(seen.jobs, key=lambda view: len(view.ranks), default=None)
        if job is not None:
            for view in job.ranks:
                self._meet(job, view)
                self._write_step(job, view)
        records += self._sampler.sample(watched for watched in self._ranks.values() if not watched.ended)
        self._node.write([*records, *self._ends()])
        self._serve()

    def close(self) -> None:
        """The end of the watch, when no rank of this node is left."""
        self._node.write([*self._ends(), Exit(t=time.time(), rank=None, pid=0, code=None, host=self.host)])
        for file in (self._node, *self._files.values()):
            file.close()

    def _meet(self, job: JobView, view: RankView) -> None:
        """Introduce a process that was not there before, a restarted rank's too."""
        start = next(rank.start for rank in job.job.ranks if rank.rank == view.rank)
        known = self._ranks.get(view.rank)
        if known is not None and (known.process.pid, known.process.start) == (view.pid, start):
            return
        process = RankProcess(view.rank, view.local_rank, job.job.world_size, view.pid, start)
        self._ranks[view.rank] = Watched(process, -1)
        self._steps.pop(view.rank, None)
        meta = Meta(
            t=time.time(),
            rank=view.rank,
            local_rank=view.local_rank,
            world_size=job.job.world_size,
            host=self.host,
            pid=view.pid,
            device=f"cuda:{view.local_rank}" if view.gpu is not None else "cpu",
            device_uuid=view.gpu.uuid if view.gpu is not None else "",
        )
        self._file(view.rank).write([meta])

    def _write_step(self, job: JobView, view: RankView) -> None:
        """A step that the log has told: of the rank that printed it, or of rank 0 for the whole job."""
        own = view.rank == 0 or view.progress is not job.progress
        latest = view.progress.latest if view.progress is not None and own else None
        if latest is None or latest.step is None:
            return
        before, now = self._steps.get(view.rank), time.time()
        if before is not None and latest.step == before.step:
            return
        step_s = latest.step_s or 0.0
        if not step_s and before is not None and latest.step > before.step:
            step_s = max(0.0, now - before.t) / (latest.step - before.step)  # a clock set back says nothing
        rate = view.progress.tokens_per_s() if view.progress is not None else None
        memory = (view.progress.memory if view.progress is not None else None) or LoggedMemory()
        step = Step(
            t=now,
            step=latest.step,
            epoch=latest.epoch or 0.0,
            loss=number(latest.loss),
            lr=latest.lr,
            grad_norm=number(latest.grad_norm),
            tokens=round((rate or 0.0) * step_s),
            step_s=step_s,
            tokens_per_s=rate or 0.0,
            allocated=memory.allocated or 0,
            reserved=memory.reserved or memory.max_reserved or 0,
            peak=memory.max_allocated or 0,
            peak_reserved=memory.max_reserved or 0,
        )
        self._steps[view.rank] = step
        self._file(view.rank).write([step])

    def _file(self, rank: int) -> NodeFile:
        if rank not in self._files:
            self._files[rank] = NodeFile(self.run.rank_file(rank))
        return self._files[rank]

    def _ends(self) -> list[Record]:
        """Ranks that are gone. How one ended only its parent is told."""
        found: list[Record] = []
        for rank, watched in self._ranks.items():
            process = watched.process
            if watched.ended or procs.alive(process.pid, process.start):
                continue
            watched.ended = time.time()
            found.append(Exit(t=watched.ended, rank=rank, pid=process.pid, code=None, host=self.host))
        return found

    def _serve(self) -> None:
        for path, request in control.pending(self.run, self.host, os.getuid()):
            if request.action is Action.DUMP:
                threading.Thread(target=self._dump, args=(request,), name="dump", daemon=True).start()
            control.mark_served(path, self.host, "" if request.action is Action.DUMP else ONLY_WATCHED)

    def _dump(self, request: Request) -> None:
        from ftdash.monitor.diagnosis.collect import dump_ranks, save_ranks

        ranks = [
            (rank, watched.process.pid)
            for rank, watched in self._ranks.items()
            if not watched.ended and (request.ranks is None or rank in request.ranks)
        ]
        folder: Path = self.run.stacks / request.stamp
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_ranks(folder, dump_ranks(ranks, native=request.native))
        except OSError as error:
            text = f"stack dump {request.stamp}: {error.strerror or error}"
            self._node.write([Event(t=time.time(), severity="error", code="dump-failed", text=text)])
