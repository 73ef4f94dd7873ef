"""`ftdash plan`: what a run would cost, as readable tables or as JSON.

With a strategy it shows that one plan phase by phase; without one it compares all stages side by
side, with HSDP, the MoE's counts and its expert adapters.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from, strategy_was_given

if TYPE_CHECKING:
    from ftdash.engine.calibrate import Corrected
    from ftdash.engine.check.findings import Finding
    from ftdash.engine.plan import Plan
    from ftdash.engine.planner.bill import Bill
    from ftdash.engine.planner.result import Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument(
        "--price", metavar="P", help="of one GPU-hour: what --tokens would cost, in its currency"
    )
    parser.add_argument(
        "--tokens", metavar="N", help="tokens to train on (default 1e9), for time and --price"
    )
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON and nothing else")
    parser.add_argument(
        "--states-only",
        action="store_true",
        help="DeepSpeed's estimate of model states, beside the plan's peak",
    )
    parser.add_argument("--smoke", action="store_true", help="check the planner's published values and end")


def run(args: argparse.Namespace) -> int:
    if args.smoke:
        return _smoke()
    from ftdash.engine.planner import evaluate
    from ftdash.tui import plan_tables

    plan = plan_from(args)
    bill = _bill(args)
    if args.states_only:
        return _states(plan, as_json=args.json)
    if args.json:
        prediction = evaluate(plan)
        found = prediction.to_json()
        if (measured := _as_measured(prediction)) is not None:
            found["calibrated"] = measured.to_json()
        if bill is not None:
            found["cost"] = bill.of(prediction.time).to_json()
        known = {advice["code"] for advice in found["advice"]}
        found["advice"] += [
            {"code": trap.code, "text": f"{trap.text}: {trap.fix}", "saves_bytes": 0}
            for trap in _traps(plan)
            if trap.code not in known
        ]
        sys.stdout.write(json.dumps(found) + "\n")
    elif strategy_was_given(args):
        prediction = evaluate(plan)
        plan_tables.show(prediction, bill)
        if (measured := _as_measured(prediction)) is not None:
            sys.stdout.write(_measured_line(measured))
        for trap in _traps(plan):
            sys.stdout.write(f"- {trap.code}: {trap.text}: {trap.fix}\n")
    else:
        plan_tables.compare(plan, bill)
    return 0


def _as_measured(prediction: Prediction) -> Corrected | None:
    """The prediction as `ftdash calibrate` learned it from earlier runs; None when that was nothing."""
    from ftdash.engine.calibrate import correct, learned

    calibration = learned()
    if calibration.notice:
        sys.stderr.write(f"ftdash: {calibration.notice}\n")
    return correct(prediction, calibration)


def _measured_line(measured: Corrected) -> str:
    allocated, reserved, device = (
        f"{size / 1e9:.1f}" for size in (measured.allocated, measured.reserved, measured.device)
    )
    return (
        f"as measured {measured.because}: allocated {allocated}, reserved {reserved}, device {device} GB;"
        f" step {measured.step_s:.2f} s, {measured.tokens_per_s_per_gpu:,.0f} tokens/s a GPU\n"
    )


def _states(plan: Plan, *, as_json: bool) -> int:
    from ftdash.tui.plan_states import show_states, states_json

    if as_json:
        sys.stdout.write(json.dumps(states_json(plan)) + "\n")
    else:
        show_states(plan)
    return 0


def _bill(args: argparse.Namespace) -> Bill | None:
    """What --tokens and --price ask for; None where neither was given."""
    if args.price is None and args.tokens is None:
        return None
    from ftdash.engine.planner.bill import Bill

    tokens = Bill().tokens if args.tokens is None else _positive("tokens", args.tokens, MOST_TOKENS)
    return Bill(tokens, None if args.price is None else _positive("price", args.price, HIGHEST_PRICE))


MOST_TOKENS = 1e18
HIGHEST_PRICE = 1e9


def _positive(name: str, text: str, most: float) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise UserError(f"--{name} {text}: must be a number above 0 and at most {most:g}")
    return value


def _traps(plan: Plan) -> list[Finding]:
    """Why this plan could not be launched, or what it would run into; a plan is counted all the same."""
    from ftdash.engine.check.findings import Severity
    from ftdash.engine.check.rules_plan import plan_findings
    from ftdash.engine.model.load import resolve

    return [trap for trap in plan_findings(plan, resolve(plan)) if trap.severity is not Severity.NOTE]


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
