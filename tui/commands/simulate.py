"""`ftdash simulate`: the real model class under fake tensors, beside the closed form."""

from __future__ import annotations

import argparse
import json
import sys

from ftdash.engine.model.load import ModelError
from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from


def _size(count: int) -> str:
    return f"{count / 2**30:9.2f} GiB" if count >= 2**27 else f"{count / 2**20:9.2f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulate one optimizer step of one rank; progress on stderr, the peak on stdout."""
    from ftdash.engine.simulate.run import SimulationError, simulate

    plan = plan_from(args)

    def progress(text: str) -> None:
        sys.stderr.write(f"simulate: {text}\n")

    try:
        found = simulate(plan, progress)
    except (SimulationError, ModelError) as error:
        raise UserError(str(error)) from None
    if args.json:
        answer = {
            "allocated": found.allocated,
            "breakdown": found.breakdown,
            "seconds": round(found.seconds, 3),
            "peak_part": found.peak_part,
            "parts": found.parts,
            "trainable_params": found.trainable_params,
            "simulated_layers": list(found.simulated_layers),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0
    from ftdash.engine.planner import evaluate

    predicted = evaluate(plan).memory.allocated
    lines = [f"{'allocated':<16} {_size(found.allocated)}   peak: {found.peak_part}"]
    for name, size in sorted(found.breakdown.items(), key=lambda item: -item[1]):
        lines.append(f"  {name:<14} {_size(size)}")
    off = f"{predicted / found.allocated - 1:+.1%} against the simulation"
    lines.append(f"{'closed form':<16} {_size(predicted)}   {off}")
    depths = " and ".join(str(layers) for layers in found.simulated_layers)
    lines.append(
        f"{found.seconds:.0f} s, {depths} layers run; no CUDA context, NCCL buffers or fragmentation"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
