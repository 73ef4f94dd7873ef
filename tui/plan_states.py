"""DeepSpeed's own estimate of model states beside the plan, with what it leaves out said."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from rich.text import Text

from ftdash.engine.model.load import resolve
from ftdash.engine.model.shape import ModelShape, Role
from ftdash.engine.plan import Method, Offload, Plan, PlanError, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.estimators import (
    GIB,
    HOST_BUFFER_FACTOR,
    ModelStatesEstimate,
    deepspeed_zero2,
    deepspeed_zero3,
)
from ftdash.tui.plan_tables import plain_table, table_console


@dataclass(frozen=True, slots=True)
class StatesRow:
    """One stage and offload: what DeepSpeed's function returns, and the plan's peak on a GPU and on a host.

    The plan's two are None where the plan cannot be.
    """

    title: str
    estimate: ModelStatesEstimate
    planned_bytes: int | None
    planned_host_bytes: int | None


def largest_module(shape: ModelShape) -> int:
    """Parameters that one module holds itself, at most: an embedding, a matrix, or a layer's experts."""
    sizes = [shape.embedding_params, shape.head_params]
    for group in shape.groups:
        linears = group.layer.linears
        sizes += [linear.params for linear in linears if linear.role is not Role.EXPERT]
        sizes.append(sum(linear.params for linear in linears if linear.role is Role.EXPERT))
    return max(sizes)


def rows(plan: Plan) -> list[StatesRow]:
    """ZeRO-2 and ZeRO-3 with and without offload, each as a full fine-tune of the plan's model."""
    shape = resolve(plan)
    per_node = min(plan.gpus, plan.gpus_per_node)
    nodes = -(-plan.gpus // per_node)
    largest = largest_module(shape)
    found = []
    for strategy, offload in (
        (Strategy.ZERO2, Offload.NONE),
        (Strategy.ZERO2, Offload.OPTIMIZER),
        (Strategy.ZERO3, Offload.NONE),
        (Strategy.ZERO3, Offload.OPTIMIZER),
        (Strategy.ZERO3, Offload.ALL),
    ):
        optimizer = offload is not Offload.NONE
        if strategy is Strategy.ZERO2:
            estimate = deepspeed_zero2(shape.total_params, per_node, nodes, offload_optimizer=optimizer)
        else:
            estimate = deepspeed_zero3(
                shape.total_params,
                largest,
                per_node,
                nodes,
                offload_optimizer=optimizer,
                offload_params=offload is Offload.ALL,
            )
        candidate = replace(plan, strategy=strategy, offload=offload, replicate=None, method=Method.FULL)
        title = f"ZeRO-{strategy[-1]}" + (f", offload {offload}" if optimizer else "")
        try:
            memory = evaluate(candidate).memory
        except PlanError:
            found.append(StatesRow(title, estimate, None, None))
        else:
            found.append(StatesRow(title, estimate, memory.allocated, memory.host_ram_per_node))
    return found


def notes(plan: Plan) -> list[str]:
    """How the estimate is to be read."""
    largest = largest_module(resolve(plan))
    return [
        "DeepSpeed's estimate counts model states only: no activations, logits, gathered layers or buckets",
        'all in GiB (2**30 bytes), which DeepSpeed prints as "GB"; 1 GiB is 1.074 GB',
        f"its host figures hold a factor of {HOST_BUFFER_FACTOR:g} for buffers that it does not print",
        f"ZeRO-3 on the GPU starts from 4 bytes a parameter of the largest module: {largest:,} of them",
        "every parameter is taken to learn",
    ]


def show_states(plan: Plan) -> None:
    """The estimate and the plan side by side, and the notes."""
    console = table_console()
    shape = resolve(plan)
    console.print(
        Text(f"{shape.name}: {shape.total_params:,} parameters on {plan.gpus} x {plan.gpu}, full fine-tune")
    )
    table = plain_table(
        "GiB", "states a GPU", "states on a host", "plan: peak a GPU", "plan: host", title="\nModel states"
    )
    for row in rows(plan):
        table.add_row(
            row.title,
            f"{row.estimate.gpu_gib:.2f}",
            f"{row.estimate.host_gib:.2f}",
            "" if row.planned_bytes is None else f"{row.planned_bytes / GIB:.2f}",
            "" if row.planned_host_bytes is None else f"{row.planned_host_bytes / GIB:.2f}",
        )
    console.print(table)
    sys.stdout.write("".join(f"{line}\n" for line in notes(plan)))


def states_json(plan: Plan) -> dict[str, Any]:
    """The same in bytes."""
    return {
        "model_states": [
            {
                "title": row.title,
                "gpu_bytes": row.estimate.gpu_bytes,
                "host_bytes": row.estimate.host_bytes,
                "plan_allocated_bytes": row.planned_bytes,
                "plan_host_bytes": row.planned_host_bytes,
            }
            for row in rows(plan)
        ],
        "notes": notes(plan),
    }
