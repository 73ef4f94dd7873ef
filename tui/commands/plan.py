"""`ftdash plan`: what a run would cost, as a readable table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    from ftdash.engine.planner import evaluate

    prediction = evaluate(plan_from(args))
    sys.stdout.write(json.dumps(prediction.to_json(), indent=None if args.json else 2) + "\n")
    return 0
