"""Checks of plans and run manifests: what cannot be launched, what will be slow or lossy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import msgspec

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check
from ftdash.engine.configs.refusals import refusal, uses_distributed_config
from ftdash.engine.configs.remedies import flags, remedy
from ftdash.engine.mesh import Mesh
from ftdash.engine.mesh import warnings as mesh_warnings
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import LARGEST_COUNT, ExpertLora, Method, Offload, Plan, PlanError, Strategy


@check
def plans(bundle: Bundle) -> Iterator[Finding]:
    seen: list[dict[str, Any]] = []
    for document in bundle.of(Kind.PLAN):
        stored = document.plan
        if not isinstance(stored, dict) or stored in seen:
            continue
        seen.append(stored)
        try:
            plan = Plan.from_dict(stored)
        except msgspec.ValidationError as problem:
            yield error("plan-invalid", document.name, f"not a plan: {problem}", "write it with ftdash plan")
            continue
        yield from _misspelt(stored, document)
        shape = bundle.model[0] if bundle.model else None
        counts = [getattr(plan, name) for name in LARGEST_COUNT]
        countable = all(count is None or count > 0 for count in counts)
        # What cannot be launched says more than what cannot be planned, but needs counts to reason with.
        invalid = [] if countable and refusal(plan, shape) else list(_not_planned(plan, document.name))
        yield from invalid or plan_findings(plan, shape, document.name)


def _not_planned(plan: Plan, where: str) -> Iterator[Finding]:
    """A model or GPU that nobody knows, counts that do not go up."""
    from ftdash.engine.hardware import HardwareError
    from ftdash.engine.model.load import ModelError
    from ftdash.engine.planner import check as planned

    try:
        planned(plan)
    except HardwareError:
        return  # a GPU of the machine that the plan was made on
    except (PlanError, ModelError) as problem:
        yield error("plan-invalid", where, str(problem), "the flag that the reason names")


def _misspelt(stored: dict[str, Any], document: Document) -> Iterator[Finding]:
    known = set(Plan.__annotations__)
    for name in set(map(str, stored)) - known:
        if near := difflib.get_close_matches(name, known, 1, 0.85):
            yield warning(
                "key-misspelt",
                document.where(name),
                f"{name} is no field of a plan: it takes no effect",
                f"did you mean {near[0]}?",
            )


def plan_findings(plan: Plan, shape: ModelShape | None, where: str = "plan") -> list[Finding]:
    """What a plan runs into before anything is written: refusals first, then what it costs."""
    if reason := refusal(plan, shape):
        change = remedy(plan, shape)
        fix = flags(change) or "change the flag that the reason names"
        return [error("plan-refused", where, reason, fix, change)]
    return [
        *_mesh_findings(plan, where),
        *_adapter_findings(plan, shape, where),
        *_saving_findings(plan, where),
    ]


def _mesh_findings(plan: Plan, where: str) -> Iterator[Finding]:
    mesh = Mesh.from_plan(plan)
    for code, text in mesh_warnings(mesh, plan, _nvlink(plan.gpu)):
        yield warning(code, where, text, "keep tensor parallelism on NVLink, inside a node")
    if plan.gpus == 1 and plan.strategy not in (Strategy.NONE, Strategy.DDP):
        yield note(
            "nothing-to-shard",
            where,
            f"{plan.strategy} on one GPU shards nothing",
            "--strategy none",
            (("strategy", Strategy.NONE),),
        )
    if mesh.shard_spans_nodes and plan.strategy is Strategy.FSDP and mesh.nodes > 1:
        yield note(
            "shard-across-nodes",
            where,
            f"every layer's all-gather crosses {mesh.nodes} nodes",
            "--strategy hsdp shards inside a node, if the memory allows",
            (("strategy", Strategy.HSDP), ("replicate", None)),
        )
    if uses_distributed_config(plan):
        yield note(
            "load-time-sharding-resume",
            where,
            "a model sharded at load time cannot resume: only the model is saved",
            "plan the run to end in one go",
        )


def _nvlink(gpu: str) -> bool:
    """Whether NVLink joins this GPU to its peers; not known of `local` on a machine without one."""
    from ftdash.engine import hardware

    try:
        return hardware.gpu(gpu).has_nvlink
    except hardware.HardwareError:
        return False


def _adapter_findings(plan: Plan, shape: ModelShape | None, where: str) -> Iterator[Finding]:
    if (
        plan.method is Method.QLORA
        and plan.quant_storage == "uint8"
        and plan.strategy
        in (
            Strategy.FSDP,
            Strategy.FSDP_NO_RESHARD,
            Strategy.HSDP,
        )
    ):
        yield warning(
            "quant-storage",
            where,
            "--quant-storage uint8 under FSDP2: packed integers stay whole on every rank",
            "--quant-storage bf16",
            (("quant_storage", "bf16"),),
        )
    if plan.expert_lora is not ExpertLora.NONE and plan.method is not Method.FULL:
        yield note(
            "expert-adapters-unmerged",
            where,
            "adapters on expert weights must be merged before serving",
            "ftdash checkpoint convert merges them",
        )
    if plan.modules_to_save and shape is not None:
        count = shape.vocab * shape.hidden * len(plan.modules_to_save)
        yield warning(
            "modules-to-save",
            where,
            f"--modules-to-save {','.join(plan.modules_to_save)} trains up to {count:,} parameters in full",
            "for a few new tokens use trainable_token_indices",
            (("modules_to_save", ()),),
        )


def _saving_findings(plan: Plan, where: str) -> Iterator[Finding]:
    if plan.strategy is Strategy.FSDP1:
        yield warning(
            "fsdp1-deprecated",
            where,
            "torch has deprecated FSDP1",
            "--strategy fsdp (FSDP2)",
            (("strategy", Strategy.FSDP),),
        )
    if plan.offload is Offload.NVME:
        yield note(
            "not-rehearsed", where, "NVMe offload cannot be rehearsed on a CPU", "try it with few steps first"
        )
    if plan.strategy in (Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3):
        yield note(
            "zero-resume",
            where,
            "another GPU count resumes from a universal checkpoint only",
            "ftdash checkpoint convert --to universal",
        )
