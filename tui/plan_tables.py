"""Predictions as tables for a terminal or a pipe: one plan by phase, or all stages side by side."""

from __future__ import annotations

import sys

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftdash.engine.model.load import resolve
from ftdash.engine.model.lora import expert_rank, lora_params
from ftdash.engine.plan import ExpertLora, Method, Plan, PlanError, Strategy
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.bill import Bill, Cost
from ftdash.engine.planner.numerics import master_weights
from ftdash.engine.planner.result import HostRam, Prediction, Term, Verdict
from ftdash.tui.format import count, gb, rate, size

COMPARED = (
    ("DDP / ZeRO-0", Strategy.DDP),
    ("ZeRO-1", Strategy.ZERO1),
    ("ZeRO-2", Strategy.ZERO2),
    ("ZeRO-3", Strategy.ZERO3),
    ("FSDP2", Strategy.FSDP),
    ("FSDP2 no-reshard", Strategy.FSDP_NO_RESHARD),
)


PIPE_WIDTH = 160  # a file or a pipe has no edge to wrap at
MARKS = {Verdict.FITS: "✓ fits", Verdict.TIGHT: "▲ tight", Verdict.DOES_NOT_FIT: "✗ no"}


def table_console() -> Console:
    """The terminal, as wide as it is; a pipe is as wide as tables need."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def plain_table(*columns: str, title: str = "") -> Table:
    """A borderless table: words to the left in the first column, figures to the right in the others."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", no_wrap=True)
    return table


def show(found: Prediction, bill: Bill | None = None) -> None:
    """One plan: memory by phase and term, host memory, traffic, time, what some tokens take, advice."""
    console = table_console()
    memory, time = found.memory, found.time
    console.print(Text(_headline(found), style="bold"))
    console.print(
        Text(
            f"{memory.device / 1e9:.1f} of {memory.capacity / 1e9:.1f} GB a GPU "
            f"({memory.device / 2**30:.1f} of {memory.capacity / 2**30:.1f} GiB): {found.verdict}; "
            f"peak at {memory.peak_phase}; most runs between {gb(found.device_range[0])} and "
            f"{gb(found.device_range[1])}"
        )
    )
    table = plain_table("phase, GB", *(term.value for term in Term), "allocated", title="\nMemory by phase")
    for phase in memory.phases:
        mark = " *" if phase.name is memory.peak_phase else ""
        table.add_row(
            phase.name.value + mark, *(gb(held) if held else "" for _, held in phase.terms()), gb(phase.total)
        )
    console.print(table)
    console.print(
        Text(
            f"allocated {gb(memory.allocated)}, reserved {gb(memory.reserved)}, with context and NCCL "
            f"{gb(memory.device)} GB; model states alone {gb(memory.model_states.total)} GB; "
            f"host {gb(memory.host_ram_per_node)} GB a node ({_host_words(memory.host)})"
        )
    )
    console.print(Text(f"master weights: fp32 ({master_weights(found.plan)})"))
    if memory.imbalance:
        console.print(Text(f"the hottest expert rank: up to {gb(memory.imbalance)} GB more"))
    if found.traffic.collectives:
        table = plain_table("collective", "link", "a step", "time", "exposed", title="\nTraffic of one rank")
        for one in found.traffic.collectives:
            table.add_row(
                one.name, one.link, size(one.step_bytes), f"{one.time_s:.3f} s", f"{one.exposed_s:.3f} s"
            )
        console.print(table)
        console.print(Text(f"gradients reduced in {found.reduce_dtype}"))
    console.print(
        Text(
            f"\n{rate(time.tokens_per_s_per_gpu)} tokens/s a GPU{_useful(found)}, step {time.step_s:.2f} s "
            f"of {time.tokens_per_step:,} tokens, MFU {time.mfu:.0%}, bubble {time.bubble:.0%}, "
            f"bound by {time.bound_by}"
        )
    )
    console.print(Text(_takes((bill or Bill()).of(time))))
    for note in found.notes:
        console.print(Text(f"not placed: {note}"))
    for advice in found.advice:
        console.print(Text(f"- {advice.code}: {advice.text}"))


def _useful(found: Prediction) -> str:
    """How much of that is data, where samples are shorter than their rows."""
    if found.plan.mean_len is None:
        return ""
    time = found.time
    return f" processed, {rate(time.useful_tokens_per_s_per_gpu)} of data ({time.useful_share:.0%})"


def _host_words(host: HostRam) -> str:
    """Host memory by phase, and what two common choices would make of it."""
    words = [f"loading {gb(host.loading)}", f"training {gb(host.training)}"]
    if host.loading_everywhere > host.loading:
        words.append(f"{gb(host.loading_everywhere)} if every rank loads for itself")
    if host.saving_full > host.training:
        words.append(f"{gb(host.saving_full)} with a full state dict on rank 0")
    return ", ".join(words)


def _headline(found: Prediction) -> str:
    plan, model = found.plan, found.model
    trained = (
        "" if plan.method is Method.FULL else f", {count(model.trainable_params)} trained ({plan.method})"
    )
    active = "" if model.active_params == model.total_params else f", {count(model.active_params)} active"
    return (
        f"{model.name}: {count(model.total_params)} parameters{active}{trained}; {plan.strategy} on "
        f"{plan.gpus} x {plan.gpu}, {plan.micro_batch} x {plan.seq_len} tokens a micro-step"
    )


def _takes(cost: Cost) -> str:
    """The sentence of what some tokens take: 1.00 B tokens: 9.4 hours, 75 GPU-hours, 187.50 at 2.50 each."""
    hours = f"{cost.hours:,.1f} hours" if cost.hours < 48 else f"{cost.hours / 24:,.1f} days"
    price = "" if cost.price is None else f", {cost.total:,.2f} at {cost.price:,.2f} each"
    return f"{count(cost.tokens)} tokens: {hours}, {cost.gpu_hours:,.0f} GPU-hours{price}"


def compare(plan: Plan, bill: Bill | None = None) -> None:
    """All stages, HSDP, and for an MoE its sizes and expert adapters, under the plan's other choices.

    Raises PlanError only where no strategy can be planned at all.
    """
    console = table_console()
    rows = [(title, replace(plan, strategy=strategy, replicate=None)) for title, strategy in COMPARED]
    rows += _hybrid(plan)
    methods = [plan.method]
    if plan.method is Method.FULL:
        methods.append(Method.LORA)
    for method in methods:
        refused: list[str] = []
        table = plain_table(
            "strategy",
            "states",
            "alloc.",
            "device",
            "",
            "sent/step",
            "tok/s",
            "bound by",
            *(["GPU-hours"] if bill is not None else []),
            *(["cost"] if bill is not None and bill.price is not None else []),
            title=f"\n{_subject(plan, method)}",
        )
        for title, candidate in rows:
            _compare_row(table, title, replace(candidate, method=method), refused, bill)
        console.print(table)
        for line in refused:
            console.print(Text(line))
    shape = resolve(plan)
    if shape.is_moe:
        _moe_table(console, plan)


def _subject(plan: Plan, method: Method) -> str:
    shape = resolve(plan)
    how = "full fine-tune" if method is Method.FULL else f"{method}, rank {plan.lora_rank}"
    return (
        f"{shape.name} ({count(shape.total_params)}), {how}, on {plan.gpus} x {plan.gpu}\n"
        f"GB a GPU; {plan.micro_batch} x {plan.seq_len} tokens, checkpointing {plan.checkpointing}"
    )


def _hybrid(plan: Plan) -> list[tuple[str, Plan]]:
    """HSDP with one group a node, or two groups where there is one node only."""
    data = plan.gpus // (plan.tp * plan.cp * plan.pp)
    nodes = -(-plan.gpus // plan.gpus_per_node)
    replicas = nodes if nodes > 1 else 2
    if data % replicas or data // replicas < 2:
        return []
    return [
        (f"HSDP {replicas} x {data // replicas}", replace(plan, strategy=Strategy.HSDP, replicate=replicas))
    ]


def _compare_row(table: Table, title: str, plan: Plan, refused: list[str], bill: Bill | None) -> None:
    """One strategy's figures; why it cannot be planned goes to `refused`, as a table cuts it off."""
    try:
        found = evaluate(plan)
    except PlanError as error:
        table.add_row(title, "", "", "", "✗")
        refused.append(f"{title}: {error}")
        return
    memory = found.memory
    table.add_row(
        title,
        gb(memory.model_states.total),
        gb(memory.allocated),
        gb(memory.device),
        MARKS[found.verdict],
        size(found.traffic.step_bytes),
        rate(found.time.tokens_per_s_per_gpu),
        found.time.bound_by,
        *(_bill_cells(bill.of(found.time)) if bill is not None else ()),
    )


def _bill_cells(cost: Cost) -> list[str]:
    return [f"{cost.gpu_hours:,.0f}", *([] if cost.total is None else [f"{cost.total:,.2f}"])]


def _moe_table(console: Console, plan: Plan) -> None:
    shape = resolve(plan)
    experts = next(group.layer.moe.experts for group in shape.groups if group.layer.moe)
    table = plain_table(
        "mixture of experts", "parameters", "bf16 GB", "full states GB", title="\nWhat it stores and computes"
    )
    table.add_row(
        "all, resident", f"{shape.total_params:,}", gb(2 * shape.total_params), gb(16 * shape.total_params)
    )
    table.add_row("active per token", f"{shape.active_params:,}", gb(2 * shape.active_params), "")
    console.print(table)
    table = plain_table(
        "expert adapters",
        "rank each",
        "trained in all",
        "of it experts",
        "states GB",
        title=f"\nExpert LoRA, --lora-rank {plan.lora_rank}",
    )
    for mode in ExpertLora:
        counted = lora_params(shape, plan.lora_rank, plan.lora_targets, mode, plan.modules_to_save, plan.dora)
        table.add_row(
            mode.value,
            str(expert_rank(plan.lora_rank, experts, mode)),
            f"{counted.total:,}",
            f"{counted.expert:,}",
            gb(16 * counted.total),
        )
    console.print(table)
