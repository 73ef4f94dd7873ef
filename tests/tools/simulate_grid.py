"""Simulates a grid of settings into tests/data/simulated.csv, and compares it with the closed form.

python tests/tools/simulate_grid.py run       settings without a row yet, each a few seconds
python tests/tools/simulate_grid.py compare   the closed form beside every stored row
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import sys
from pathlib import Path

from ftdash.engine.plan import Plan
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from

STORED = Path(__file__).parents[1] / "data" / "simulated.csv"
FIELDS = ("flags", "allocated", "peak_part", "breakdown", "trainable_params", "seconds")

LORA = "--method lora --lora-rank 16"
PLAIN = "--checkpointing none"
SETTINGS = (
    "--model qwen3-8b --gpus 8 --seq-len 2048",
    f"--model qwen3-8b --gpus 8 --seq-len 2048 {PLAIN}",
    f"--model qwen3-8b --gpus 8 --seq-len 2048 {LORA}",
    f"--model qwen3-8b --gpus 8 --seq-len 2048 {LORA} {PLAIN}",
    "--model llama-2-7b --gpus 4 --seq-len 4096",
    f"--model llama-2-7b --gpus 4 --seq-len 4096 {PLAIN}",
    "--model qwen3-30b-a3b --gpus 8 --seq-len 2048",
    f"--model qwen3-30b-a3b --gpus 8 --seq-len 2048 {PLAIN}",
    f"--model qwen3-30b-a3b --gpus 8 --seq-len 4096 {LORA}",
    f"--model qwen3-30b-a3b --gpus 8 --seq-len 2048 {LORA} {PLAIN}",
    "--model llama-3.2-1b --gpus 1 --strategy fsdp --seq-len 2048",
    f"--model llama-3.2-1b --gpus 2 --seq-len 1024 {PLAIN}",
    "--model llama-3.1-70b --gpus 64 --seq-len 4096",
    "--model qwen3-8b --gpus 64 --seq-len 2048 --reduce-dtype fp32",
    "--model qwen3-8b --gpus 16 --strategy hsdp --replicate 2 --seq-len 4096",
    "--model qwen3-8b --gpus 8 --strategy fsdp-no-reshard --seq-len 2048",
    "--model qwen3-8b --gpus 8 --seq-len 16384",
    "--model qwen3-8b --gpus 8 --seq-len 16384 --loss fused",
    "--model qwen3-8b --gpus 1 --strategy fsdp --seq-len 1024 --reduce-dtype fp32",
    "--model llama-3.1-8b --gpus 8 --seq-len 8192 --reduce-dtype fp32",
    "--model llama-3.1-8b --gpus 8 --seq-len 2048 --micro-batch 4",
    f"--model llama-3.1-8b --gpus 2 --seq-len 8192 {LORA}",
    f"--model llama-3.1-8b --gpus 64 --seq-len 1024 {PLAIN}",
    "--model mistral-7b --gpus 16 --seq-len 16384",
    f"--model mistral-7b --gpus 8 --seq-len 4096 {PLAIN} --loss fused",
    f"--model qwen2.5-7b --gpus 4 --seq-len 4096 {LORA} {PLAIN}",
    "--model qwen2.5-14b --gpus 16 --seq-len 8192",
    f"--model qwen3-32b --gpus 8 --seq-len 4096 {LORA}",
    "--model qwen3-32b --gpus 32 --seq-len 2048 --reduce-dtype fp32",
    "--model qwen3-0.6b --gpus 4 --seq-len 4096",
    f"--model qwen3-0.6b --gpus 1 --strategy fsdp --seq-len 8192 {LORA}",
    "--model mixtral-8x7b --gpus 32 --seq-len 4096",
    f"--model mixtral-8x7b --gpus 8 --seq-len 4096 {LORA}",
    f"--model mixtral-8x7b --gpus 64 --seq-len 1024 {PLAIN}",
    "--model qwen3-30b-a3b --gpus 64 --seq-len 8192 --reduce-dtype fp32",
    f"--model qwen3-30b-a3b --gpus 2 --seq-len 16384 {LORA}",
    f"--model qwen3-30b-a3b --gpus 16 --seq-len 2048 {LORA} --loss fused",
    f"--model llama-3.1-70b --gpus 16 --seq-len 2048 {LORA}",
    "--model llama-3.1-70b --gpus 32 --strategy hsdp --replicate 2 --seq-len 8192",
    "--model phi-4 --gpus 8 --seq-len 4096",
    f"--model phi-4 --gpus 16 --seq-len 2048 {PLAIN}",
    "--model pythia-2.8b --gpus 4 --seq-len 2048",
    "--model qwen3-8b --gpus 8 --seq-len 2048 --optimizer adamw-foreach",
    "--model qwen3-8b --gpus 8 --seq-len 2048 --precision bf16",
    f"--model llama-2-7b --gpus 8 --seq-len 1024 {LORA} --loss fused",
    f"--model llama-2-13b --gpus 8 --seq-len 2048 --micro-batch 2 {PLAIN}",
    "--model qwen3-30b-a3b --gpus 16 --strategy hsdp --replicate 2 --seq-len 1024",
)


def plan_of(flags: str) -> Plan:
    """The plan behind one row's flags."""
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return plan_from(parser.parse_args(shlex.split(flags)))


def stored_rows(path: Path = STORED) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run() -> None:
    """Simulate every setting that has no row, in this one process, and append its row at once."""
    import time

    from ftdash.engine.model import load
    from ftdash.engine.simulate import step
    from ftdash.engine.simulate.request import request_of
    from ftdash.engine.simulate.run import read_runs

    done = {row["flags"] for row in stored_rows()}
    for flags in SETTINGS:
        if flags in done:
            continue
        started = time.monotonic()
        plan = plan_of(flags)
        request = request_of(plan)
        step.prepare_processes(request.world)
        mesh = step.make_mesh(request) if request.shards else None
        runs = [step.run_step(request, layers, mesh, lambda text: None) for layers in request.layer_counts]
        found = read_runs(runs, load.resolve(plan).layers, time.monotonic() - started)
        is_new = not STORED.exists()
        with STORED.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(FIELDS)
            breakdown = json.dumps(found.breakdown, sort_keys=True)
            row = (flags, found.allocated, found.peak_part, breakdown, found.trainable_params)
            writer.writerow((*row, f"{found.seconds:.1f}"))
        sys.stderr.write(f"{flags}: {found.allocated / 2**30:.3f} GiB in {found.seconds:.0f} s\n")


def compare() -> None:
    """Print closed form against simulation, worst first, with median and largest difference."""
    from ftdash.engine.planner import evaluate

    lines = []
    for row in stored_rows():
        predicted, simulated = evaluate(plan_of(row["flags"])).memory.allocated, int(row["allocated"])
        lines.append((predicted / simulated - 1, predicted, simulated, row["flags"], row["peak_part"]))
    for off, predicted, simulated, flags, part in sorted(lines, key=lambda line: -abs(line[0])):
        print(f"{off:+7.1%} {predicted / 2**30:8.2f} {simulated / 2**30:8.2f} GiB  {flags}  ({part})")
    sizes = [abs(line[0]) for line in lines]
    print(f"{len(sizes)} settings: median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}")


if __name__ == "__main__":
    {"run": run, "compare": compare}[sys.argv[1]]()
