"""`ftdash plan`: what a run would cost, as readable tables or as JSON.

With a strategy it shows that one plan phase by phase; without one it compares all stages side by
side, with HSDP, the MoE's counts and its expert adapters.
"""

from __future__ import annotations

import argparse
import json
import sys

from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from, strategy_was_given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON and nothing else")
    parser.add_argument("--smoke", action="store_true", help="check the planner's published values and end")


def run(args: argparse.Namespace) -> int:
    if args.smoke:
        return _smoke()
    from ftdash.engine.planner import evaluate
    from ftdash.tui import plan_tables

    plan = plan_from(args)
    if args.json:
        sys.stdout.write(json.dumps(evaluate(plan).to_json()) + "\n")
    elif strategy_was_given(args):
        plan_tables.show(evaluate(plan))
    else:
        plan_tables.compare(plan)
    return 0


def _smoke() -> int:
    """Print every checked value; exit status 1 when one is wrong."""
    from ftdash.engine.planner.smoke import checks

    found = checks()
    for check in found:
        mark = "ok   " if check.passed else "WRONG"
        wanted = "" if check.passed else f", must be {check.want:,.12g}"
        sys.stdout.write(f"{mark} {check.what}: {check.got:,.12g}{wanted}\n")
    wrong = sum(not check.passed for check in found)
    sys.stdout.write(f"{len(found) - wrong} of {len(found)} values verified\n")
    return 1 if wrong else 0
