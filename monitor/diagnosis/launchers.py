"""What a launcher that has not started its ranks says: it waits at the rendezvous for other nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ftdash.monitor.diagnosis import frames
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, ProcessEvidence, Sample, Verdict

_RENDEZVOUS_NAMES = frozenset({"next_rendezvous", "_rendezvous", "_create_tcp_store", "_initialize_workers"})


def _flag(command: Sequence[str], *names: str) -> int | None:
    text = " ".join(command)
    for name in names:
        pattern = name.replace("-", "[-_]")
        if match := re.search(rf"--{pattern}[= ](?:\d+:)?(\d+)", text):
            return int(match[1])
    return None


def missing_ranks(command: Sequence[str]) -> frozenset[int]:
    """The ranks of the other nodes, from the launcher's own flags; empty when they do not say."""
    nodes = _flag(command, "nnodes", "num-machines")
    per_node = _flag(command, "nproc-per-node", "num-processes", "nproc-per-node")
    if not nodes or nodes < 2 or not per_node:
        return frozenset()
    if _flag(command, "num-machines"):
        per_node = max(1, per_node // nodes)
    node = _flag(command, "node-rank", "machine-rank") or 0
    own = range(node * per_node, (node + 1) * per_node)
    return frozenset(range(nodes * per_node)) - frozenset(own)


def launcher_verdict(sample: Sample) -> Verdict | None:
    """A verdict when launchers are all there is, and one of them stands at the rendezvous."""
    for process in sample.launchers:
        reading = frames.read_threads(process.threads)
        if not reading.names & _RENDEZVOUS_NAMES:
            continue
        return _waiting(process, str(reading.telling) if reading.telling else "")
    return None


def _waiting(process: ProcessEvidence, frame: str) -> Verdict:
    missing = missing_ranks(process.command)
    why = f"its node has not come to the rendezvous where launcher {process.pid} waits"
    culprits = tuple(Culprit(rank, "", 0, "", why) for rank in sorted(missing))
    return Verdict(
        Kind.RENDEZVOUS,
        culprits,
        0.85,
        "the launcher waits at the rendezvous for other nodes: no rank has started",
        (f"launcher {process.pid} on {process.host} is in {frame}", " ".join(process.command)[:160]),
    )
