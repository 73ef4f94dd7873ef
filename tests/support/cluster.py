"""A synthetic run of many ranks: run directories as hook and agents would write them, of any size.

Rank 3 of every such run is slow in forward from `slow_from` on, and GPU 1 of the second node gets lost
half way, so that what watches the run has something to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from ftdash.monitor.records import Experts, GpuSample, Meta, Node, RankSample, Record, Step, encode_line
from ftdash.monitor.rundir import Manifest, RunDir

START_T = 1_795_900_000.0
GIB = 1 << 30
EXPERT_EVERY = 10  # steps, as the hook does unless it is told otherwise


class Cluster:
    """The records of a run of `ranks` ranks, `per_node` on a node, one step every `step_s` seconds."""

    def __init__(
        self,
        ranks: int,
        per_node: int = 8,
        step_s: float = 1.0,
        slow_from: int = 10,
        experts: int = 0,
        start_t: float = START_T,
    ) -> None:
        self.start_t = start_t
        self.ranks = ranks
        self.per_node = per_node
        self.step_s = step_s
        self.slow_from = slow_from
        self.experts = experts
        self._random = random.Random(1)

    @property
    def hosts(self) -> list[str]:
        return [f"node{i:04d}" for i in range((self.ranks + self.per_node - 1) // self.per_node)]

    def host(self, rank: int) -> str:
        return f"node{rank // self.per_node:04d}"

    def uuid(self, rank: int) -> str:
        return f"GPU-{rank:08x}"

    def create(self, root: Path, name: str, state: str = "running", steps: int = 0) -> RunDir:
        """The run directory with meta records; `steps` of telemetry are appended at once."""
        manifest = Manifest(
            run=name,
            state=state,
            backend="ssh",
            world_size=self.ranks,
            hosts=self.hosts,
            max_steps=100_000,
            created=self.start_t,
        )
        run = RunDir.create(manifest, root)
        for rank in range(self.ranks):
            meta = Meta(
                t=self.start_t,
                rank=rank,
                local_rank=rank % self.per_node,
                world_size=self.ranks,
                host=self.host(rank),
                pid=1000 + rank,
                device=f"cuda:{rank % self.per_node}",
                device_uuid=self.uuid(rank),
                micro_batch=1,
            )
            run.rank_file(rank).write_bytes(encode_line(meta))
        for first in range(1, steps + 1, 200):
            self.append(run, first, min(200, steps + 1 - first))
        return run

    def append(self, run: RunDir, first: int, count: int = 1) -> None:
        """Append the records of `count` steps, beginning with step `first`, to all files."""
        lines: dict[Path, list[bytes]] = {}
        for step in range(first, first + count):
            for rank in range(self.ranks):
                out = lines.setdefault(run.rank_file(rank), [])
                out.extend(encode_line(record) for record in self.rank_records(rank, step))
            for node, host in enumerate(self.hosts):
                out = lines.setdefault(run.node_file(host), [])
                out.extend(encode_line(record) for record in self.node_records(node, step))
        for path, encoded in lines.items():
            with path.open("ab") as handle:
                handle.write(b"".join(encoded))

    def rank_records(self, rank: int, step: int) -> Iterator[Record]:
        """What one rank's hook writes after one step."""
        noise = self._random.gauss
        slow = 1.3 if rank == 3 and step >= self.slow_from else 1.0
        forward = 0.3 * self.step_s * slow * (1 + noise(0, 0.02))
        backward = max(0.05, 0.95 * self.step_s - forward)
        yield Step(
            t=self.start_t + step * self.step_s,
            step=step,
            loss=2.0 / (1 + step / 500) + noise(0, 0.01),
            lr=1e-5,
            grad_norm=1.0 + noise(0, 0.05),
            tokens=4096,
            step_s=self.step_s,
            data_s=0.01 * self.step_s,
            forward_s=forward,
            backward_s=backward,
            optimizer_s=0.04 * self.step_s,
            allocated=60 * GIB,
            reserved=66 * GIB,
            peak=64 * GIB,
            peak_reserved=66 * GIB,
            tokens_per_s=4096 / self.step_s,
        )
        if self.experts and step % EXPERT_EVERY == 0:
            counts = [self._random.randrange(200, 400) for _ in range(self.experts)]
            yield Experts(t=self.start_t + step * self.step_s, step=step, layer=0, counts=counts)

    def node_records(self, node: int, step: int) -> Iterator[Record]:
        """What one node's agent writes in one second: itself, its GPUs and its ranks' processes."""
        t = self.start_t + step * self.step_s
        yield Node(
            t=t, host=f"node{node:04d}", agent_pid=500, memory_total=2048 * GIB, memory_available=1024 * GIB
        )
        for local in range(min(self.per_node, self.ranks - node * self.per_node)):
            rank = node * self.per_node + local
            lost = node == 1 and local == 1 and step >= 5 * self.slow_from
            if lost:
                yield GpuSample(
                    t=t, index=local, uuid=self.uuid(rank), name="H100", state="lost", error="GPU is lost"
                )
            else:
                yield GpuSample(
                    t=t,
                    index=local,
                    uuid=self.uuid(rank),
                    name="H100",
                    memory_used=67 * GIB,
                    memory_total=80 * GIB,
                    util=self._random.randrange(90, 100),
                    power_w=600.0 + self._random.randrange(60),
                    power_limit_w=700.0,
                    temp_c=62,
                    sm_mhz=1755,
                    throttle=["power cap"],
                )
            yield RankSample(
                t=t,
                rank=rank,
                pid=1000 + rank,
                rss=8 * GIB,
                cpu=100.0,
                threads=40,
                state="R",
                beat_t=t,
                beat_step=step,
                beat_phase="forward",
                gpu_uuid=self.uuid(rank),
            )
