"""`ftdash fit`: every strategy that fits a model on given GPUs, fastest first."""

from __future__ import annotations

import argparse
import json
import sys
import time

from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--limit", type=int, default=20, help="how many candidates to print (default 20)")
    parser.add_argument("--json", action="store_true", help="print the candidates as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    from ftdash.engine.planner import PlanError
    from ftdash.engine.planner.fit import search
    from ftdash.tui.format import gb, rate

    if args.limit < 1:
        raise UserError(f"--limit {args.limit}: must be at least 1")
    plan = plan_from(args)
    started = time.perf_counter()
    try:
        found = search(plan, args.limit)
    except PlanError as error:
        raise UserError(str(error)) from None
    seconds = time.perf_counter() - started
    if args.json:
        candidates = [
            {
                "plan": one.plan.to_dict(),
                "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
                "reserved": one.reserved,
            }
            for one in found.candidates
        ]
        sys.stdout.write(json.dumps({"candidates": candidates}) + "\n")
        return 0
    from ftdash.tui.plan_tables import plain_table, table_console

    table = plain_table(
        "strategy", "tp", "cp", "ep", "batch", "accum", "ckpt", "loss", "offload", "tok/s", "GB", "left"
    )
    for one in found.candidates:
        p = one.plan
        table.add_row(
            p.strategy.value,
            str(p.tp),
            str(p.cp),
            str(p.ep),
            str(p.micro_batch),
            str(p.grad_accum),
            p.checkpointing.value,
            p.loss.value,
            p.offload.value,
            rate(one.tokens_per_s_per_gpu),
            gb(one.reserved),
            gb(one.headroom),
        )
    console = table_console()
    if found.candidates:
        console.print(table)
    else:
        console.print("nothing fits: try --method lora or qlora, a shorter --seq-len, or more GPUs")
    console.print(f"{found.tried:,} configurations in {seconds:.1f} s")
    return 0
