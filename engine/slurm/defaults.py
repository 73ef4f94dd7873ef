"""What a job asks for where nobody said: the partition's own, as sinfo describes its nodes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftdash.engine.slurm import client
from ftdash.engine.slurm.client import Node
from ftdash.engine.slurm.options import SlurmOptions

KNOWN_S, FAILED_S = 60.0, 10.0
_asking = threading.Lock()
_due = 0.0  # monotonic
_site: Site | client.SlurmError = client.SlurmError("sinfo was not asked yet")

GPUS = re.compile(r"(?:^|,)gpu(?::(?P<kind>[^:,()]+))?:(?P<count>\d+)(?=[,(]|$)")


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The least that every node of a partition has."""

    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    gpu_kind: str = ""
    default_mb: int = 0  # host memory of a job that names none: on a node, or for each CPU; 0: no such limit
    default_mb_per_cpu: int = 0


def shape_of(partition: str, nodes: Sequence[Node]) -> NodeShape | None:
    """None for a partition that sinfo does not know."""
    members = [node for node in nodes if partition in node.partitions]
    if not members:
        return None
    found = [list(GPUS.finditer(node.gres)) for node in members]
    kinds = {match["kind"] or "" for matches in found for match in matches}
    return NodeShape(
        nodes=len(members),
        cpus=min(node.cpus for node in members),
        memory_mb=min(node.memory_mb for node in members),
        gpus=min(sum(int(match["count"]) for match in matches) for matches in found),
        gpu_kind=kinds.pop() if len(kinds) == 1 else "",
    )


@dataclass(frozen=True, slots=True)
class Site:
    """The partitions by name, and the one of jobs that name none."""

    shapes: dict[str, NodeShape]
    default: str = ""

    def shape(self, partition: str) -> NodeShape | None:
        """Of the partition that a job with this one, or without one, goes to."""
        return self.shapes.get(partition or self.default)


def ask_site() -> Site:
    """Raises SlurmError; takes as long as the controller does."""
    nodes = client.nodes()
    limits = client.default_memory()
    names = dict.fromkeys(name for node in nodes for name in node.partitions if name)
    shapes = {name: shape for name in names if (shape := shape_of(name, nodes)) is not None}
    for name, shape in shapes.items():
        per_node, per_cpu = limits.get(name, (0, 0))
        shapes[name] = replace(shape, default_mb=per_node, default_mb_per_cpu=per_cpu)
    return Site(shapes, client.default_partition())


def known_site() -> Site:
    """`ask_site`, asked anew a minute later at the soonest, ten seconds if it failed. Raises SlurmError."""
    global _due, _site
    with _asking:
        if time.monotonic() >= _due:
            try:
                _site, known_s = ask_site(), KNOWN_S
            except client.SlurmError as error:
                _site, known_s = error, FAILED_S
            _due = time.monotonic() + known_s
    if isinstance(_site, client.SlurmError):
        raise _site
    return _site


def with_defaults(options: SlurmOptions, ranks_per_node: int, shape: NodeShape | None) -> SlurmOptions:
    """CPUs for the ranks of a node: as many as come with its GPUs, else one for each rank.

    Left to itself Slurm gives a task one CPU, on which all ranks of the node and their data loaders would
    run (snakemake-executor-plugin-slurm#41, Lightning#18650). Without a shape nothing is added.
    """
    if options.cpus_per_task is not None or shape is None or not shape.cpus:
        return options
    asked = options.gpus_per_node or 0
    cpus = shape.cpus * asked // shape.gpus if asked and shape.gpus else ranks_per_node
    return replace(options, cpus_per_task=max(1, min(shape.cpus, cpus)))


def in_words(partition: str, shape: NodeShape) -> str:
    """One line: h100 · 12 nodes, each 8 h100, 96 CPUs, 2,000 GB."""
    gpus = f"{shape.gpus} {shape.gpu_kind or 'GPUs'}, " if shape.gpus else ""
    memory = f", {shape.memory_mb / 1000:,.0f} GB" if shape.memory_mb else ""
    count = f"{shape.nodes} node{'s' if shape.nodes != 1 else ''}"
    return f"{partition} · {count}, each {gpus}{shape.cpus} CPUs{memory}"
