"""What a plan needs of the machine it is checked on: free disk, host memory, memory that may be locked.

Always notes: plans are often checked on a login node, and run elsewhere.
"""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind
from ftdash.engine.check.findings import Finding, note
from ftdash.engine.check.registry import check
from ftdash.engine.configs.refusals import uses_distributed_config
from ftdash.engine.configs.types import nodes_of
from ftdash.engine.hardware import HardwareError
from ftdash.engine.model.load import ModelError
from ftdash.engine.plan import Method, Offload, Plan, PlanError

# A checkpoint holds the trained parameters and AdamW's two moments, each in fp32.
CHECKPOINT_BYTES = 12
FINAL_BYTES = 4  # of each trained parameter in the final model
GIB = 2**30


@check
def plans_on_this_machine(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.PLAN):
        stored = next((plan for plan in bundle.plans if plan.where == document.name), None)
        if stored is None:
            continue
        try:
            plan = Plan.from_dict(stored.value)
        except msgspec.ValidationError:
            continue
        told = document.data.get("output_dir")
        output = Path(told) if isinstance(told, str) and told else Path.cwd()
        steps, save_steps = (_count(document.data.get(name)) for name in ("max_steps", "save_steps"))
        yield from host_findings(plan, document.name, output, steps=steps, save_steps=save_steps)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def host_findings(
    plan: Plan, where: str, output: Path, *, steps: int = 0, save_steps: int = 0
) -> Iterator[Finding]:
    """Disk for one checkpoint, or for all that `steps` and `save_steps` make, and the memory of a node."""
    from ftdash.engine.planner import evaluate

    try:
        prediction = evaluate(plan)
    except (PlanError, ModelError, HardwareError):
        return
    yield from _disk(plan, prediction.model.trainable_params, where, output, steps, save_steps)
    needed, free = prediction.memory.host_ram_per_node, available_bytes()
    if free and needed > free:
        yield note(
            "host-memory",
            where,
            f"a node of {plan.gpus // nodes_of(plan)} ranks needs {needed / GIB:.0f} GiB of host memory "
            f"(loading, offload, processes); this machine has {free / GIB:.0f} GiB free",
            "check the host memory of the nodes that will run it, and the job's limit",
        )
    yield from _locked(plan, where)


def _disk(
    plan: Plan, trained: int, where: str, output: Path, steps: int, save_steps: int
) -> Iterator[Finding]:
    count = steps // save_steps if save_steps else 1
    per_checkpoint = (FINAL_BYTES if uses_distributed_config(plan) else CHECKPOINT_BYTES) * trained
    needed = count * per_checkpoint + FINAL_BYTES * trained
    free = _free_bytes(output)
    if free is None or needed <= free:
        return
    many = f"{count} checkpoints" if count > 1 else "one checkpoint"
    kept = "adapters" if plan.method is not Method.FULL else "weights and optimizer"
    yield note(
        "disk-space",
        where,
        f"{many} of {per_checkpoint / GIB:.1f} GiB ({kept} in fp32) and the final model need "
        f"{needed / GIB:.0f} GiB; {output} has {free / GIB:.0f} GiB free",
        "save less often, delete old checkpoints, or write to a larger disk: --out DIR",
    )


def _free_bytes(path: Path) -> int | None:
    nearest = path
    while not nearest.exists() and nearest.parent != nearest:
        nearest = nearest.parent
    try:
        return shutil.disk_usage(nearest).free
    except OSError:
        return None


def _locked(plan: Plan, where: str) -> Iterator[Finding]:
    """InfiniBand registers, and NVMe offload's asynchronous I/O locks, the buffers that they send from."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    several = nodes_of(plan) > 1
    if limit == resource.RLIM_INFINITY or not (several or plan.offload is Offload.NVME):
        return
    user = "InfiniBand registers its buffers" if several else "NVMe offload locks its buffers"
    yield note(
        "locked-memory",
        where,
        f"{user} as locked memory, and ulimit -l is {limit // 1024:,} KiB here",
        "ulimit -l unlimited on the nodes (limits.conf, or Slurm's PropagateResourceLimitsExcept=MEMLOCK)",
    )


def available_bytes() -> int:
    """Memory that new processes can have here: MemAvailable, or less where a cgroup limits it. 0: unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as handle:
            match = re.search(r"MemAvailable:\s+(\d+) kB", handle.read())
    except OSError:
        return 0
    free = int(match.group(1)) * 1024 if match else 0
    limit = _cgroup_left()
    return min(free, limit) if limit is not None else free


def _cgroup_left() -> int | None:
    """What the memory limit of this process's own cgroup (version 2) leaves."""
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        folder = Path("/sys/fs/cgroup") / path.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None
