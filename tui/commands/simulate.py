"""`ftdash simulate`: the real model class under fake tensors, beside the closed form."""

from __future__ import annotations

import argparse
import json
import sys

from ftdash.engine.model.load import ModelError
from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from


def _signed(count: int) -> str:
    return ("+" if count >= 0 else "-") + _size(abs(count))


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
    from ftdash.engine.simulate.terms import side_by_side

    memory = evaluate(plan).memory
    predicted = memory.allocated
    lines = [
        f"{'':<24} {'simulated':>13} {'closed form':>13} {'difference':>14}",
        f"{'peak':<24} {_size(found.allocated)} {_size(predicted)} {predicted / found.allocated - 1:>+14.1%}",
        *(
            f"  {pair.name:<22} {_size(pair.simulated)} {_size(pair.planned)} "
            f"{_signed(pair.planned - pair.simulated)}"
            for pair in side_by_side(found.breakdown, memory.peak)
        ),
        f"the simulation peaks in {found.peak_part}, the closed form at {memory.peak_phase}",
    ]
    depths = " and ".join(str(layers) for layers in found.simulated_layers)
    lines.append(
        f"{found.seconds:.0f} s, {depths} layers run; no CUDA context, NCCL buffers or fragmentation"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
