"""What speaks against a job before Slurm is asked for it: too few nodes, too little host memory on them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ftdash.engine.check.findings import Change, Finding, warning
from ftdash.engine.hardware import HardwareError
from ftdash.engine.launch.job import spec_plan
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.model.load import ModelError
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.slurm.client import SlurmError
from ftdash.engine.slurm.defaults import NodeShape, known_site, with_defaults
from ftdash.engine.slurm.options import SlurmOptions

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # sbatch(1): powers of 1,024, M when none is given
GIB = 2**30


def job_findings(spec: LaunchSpec) -> Iterator[Finding]:
    """Of a run under Slurm. Asks sinfo, whose last answer is used for a while; a site that does not answer
    finds nothing here, and says so when the job is submitted."""
    options = spec.slurm or SlurmOptions()
    nodes = max(options.nodes, spec.nodes)
    try:
        shape = known_site().shape(options.partition)
    except SlurmError:
        shape = None
    if shape is not None and nodes > shape.nodes:
        yield warning(
            "job-nodes",
            "nodes",
            f"{nodes} nodes, and {options.partition or 'the default partition'} has {shape.nodes}: "
            "such a job is refused, or waits for ever",
            f"--nodes {shape.nodes}",
            (("nodes", shape.nodes),),
        )
    if spec.plan is not None:
        yield from _memory(spec.plan, nodes, options, shape)


def _memory(plan: Plan, nodes: int, options: SlurmOptions, shape: NodeShape | None) -> Iterator[Finding]:
    from ftdash.engine.planner import evaluate

    try:
        plan = spec_plan(plan, nodes)
        needed = evaluate(plan).memory.host_ram_per_node
    except (LaunchError, PlanError, ModelError, HardwareError):
        return
    yield from memory_findings(plan, needed, with_defaults(options, plan.gpus_per_node, shape), shape)


def memory_findings(
    plan: Plan, needed: int, options: SlurmOptions, shape: NodeShape | None
) -> Iterator[Finding]:
    """Host memory: `needed` bytes on each node against what the job is given there."""
    node = shape.memory_mb * UNITS["M"] if shape is not None else 0
    asked = _asked(options)
    given, whose = asked or node, "--memory" if asked else f"a node of {options.partition or 'the partition'}"
    if not asked and shape is not None and (default := _default(options, shape)):
        given, whose = default, "the partition's default"
    if not given or needed <= given:
        return
    wanted = f"{math.ceil(needed / GIB)}G"
    change: Change = ()
    if not node or needed <= node:
        fix, change = f"--memory {wanted}", (("memory", wanted),)
    else:
        fix = f"nodes with more memory (these have {node / GIB:.0f} GiB), more of them, or less offload"
    yield warning(
        "job-memory",
        "memory",
        f"{plan.gpus_per_node} ranks on a node need {needed / GIB:.0f} GiB of host memory (loading, offload, "
        f"processes) and {whose} gives {given / GIB:.0f} GiB: the kernel would kill a rank",
        fix,
        change,
    )


def _asked(options: SlurmOptions) -> int:
    """Bytes on each node that the job asks for; 0 when it leaves that to the cluster or takes all."""
    text = options.memory
    for directive in options.directives:
        if match := re.fullmatch(r"--mem[= ](\S+)", directive):
            text = match[1]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.upper())
    return int(float(match[1]) * UNITS[match[2] or "M"]) if match else 0


def _default(options: SlurmOptions, shape: NodeShape) -> int:
    """Bytes on each node of a job that names no memory, where the partition limits it."""
    if any(directive.startswith("--mem") for directive in options.directives) or options.memory:
        return 0
    per_node_mb = shape.default_mb or shape.default_mb_per_cpu * (options.cpus_per_task or 0)
    return per_node_mb * UNITS["M"]
