"""`python -m tests.gpu`: train every case, print predicted against measured, and write it as JSON.

Exit 0 when every error is within its limit, 1 when one is not or a case did not train, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ftdash.engine import hardware
from ftdash.engine.plan import Method
from ftdash.engine.planner import evaluate
from ftdash.engine.planner.result import ModelCounts
from tests.gpu.cases import MEMORY_SHARE, Case, cases
from tests.gpu.result import FORMAT, MEMORY_LIMIT, SPEED_LIMIT, Figures, Result, Row, failures

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "msgspec")
CASE_LIMIT_S = 120
DRY_GPU = "h100-sxm-80g"  # a plan needs one: in a dry run its figures are compared with nothing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="dry run on the CPU with tiny sizes")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each case (default 4)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="where the JSON goes")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: 1 or more")
    machine = _dry_machine() if args.cpu else _machine()
    if isinstance(machine, str):
        print(machine, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ftdash-gpu-check-") as scratch:
        budget = int(MEMORY_SHARE * machine["memory_bytes"])
        chosen = cases(machine["plan_gpu"], budget, Path(scratch), tiny=args.cpu)
        chosen = [case for case in chosen if args.only in case.name]
        if not chosen:
            parser.error(f"--only {args.only}: no such case")
        rows = []
        for case in chosen:
            rows.append(_run(case, args.steps, "cpu" if args.cpu else "cuda", Path(scratch)))
            _print(rows[-1], args.cpu)
    versions = {name: found for name in _LIBRARIES if (found := _version(name))}
    result = Result(v=FORMAT, date=_today(), versions=versions, dry=args.cpu, rows=rows, **machine)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(f"{machine['gpu']}, {', '.join(f'{name} {found}' for name, found in versions.items())}")
    print(f"written to {args.out}")
    lines = failures(result)
    print("\n".join(lines) if lines else "every case trained" + ("" if args.cpu else ", all within limits"))
    return 1 if lines else 0


def _machine() -> dict[str, Any] | str:
    """The GPU that torch sees, or one line that says why there is nothing to check."""
    try:
        import torch
    except ImportError:
        return "no torch here: the GPU check needs torch, transformers, accelerate and peft"
    if not torch.cuda.is_available() or torch.version.hip:
        return "no NVIDIA GPU that torch can use: nothing to check (--cpu for a dry run)"
    found = torch.cuda.get_device_properties(0)
    known = hardware.by_product(found.name, found.total_memory)
    return {
        "gpu": found.name,
        "plan_gpu": known.name if known else "local",
        "memory_bytes": found.total_memory,
        "driver": _driver(),
    }


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def _dry_machine() -> dict[str, Any]:
    return {"gpu": "cpu", "plan_gpu": DRY_GPU, "memory_bytes": 0, "driver": ""}


def _run(case: Case, steps: int, device: str, scratch: Path) -> Row:
    """Train a case in a process of its own: its peak is its own, and its failure ends nothing else."""
    prediction = evaluate(case.plan)
    found: dict[str, Any] = {}
    error = ""
    left_out = _missing(case)
    if not left_out:
        found, error = _child(case, steps, device, scratch / case.name)
    predicted = Figures(
        allocated=prediction.memory.allocated,
        reserved=prediction.memory.reserved,
        device=prediction.memory.device,
        tokens_per_s=prediction.time.tokens_per_s_per_gpu,
    )
    return Row(
        name=case.name,
        plan={key: value for key, value in case.plan.to_dict().items() if key != "config"},
        model=json.loads((Path(str(case.plan.config)) / "config.json").read_text()),
        total_params=prediction.model.total_params,
        trainable_params=prediction.model.trainable_params,
        predicted=predicted,
        measured=Figures(**{key: found.get(key) for key in Figures.__struct_fields__}),
        steps=steps,
        losses=found.get("losses", []),
        error=error or (_other_model(prediction.model, found, case) if found else ""),
        left_out=left_out,
    )


def _missing(case: Case) -> str:
    needed = case.plan.method is Method.QLORA and not _version("bitsandbytes")
    return "bitsandbytes is not installed" if needed else ""


def _other_model(predicted: ModelCounts, found: dict[str, Any], case: Case) -> str:
    """A comparison means nothing when the planner counted another model than the one that was trained."""
    adapters = predicted.trainable_params if case.plan.method is not Method.FULL else 0
    counted = (predicted.total_params + adapters, predicted.trainable_params)
    trained = (found["total_params"], found["trainable_params"])
    if case.plan.method is Method.QLORA:  # packed weights are fewer elements
        counted, trained = counted[1:], trained[1:]
    return "" if counted == trained else f"the planner counted {counted} parameters, trained were {trained}"


def _child(case: Case, steps: int, device: str, scratch: Path) -> tuple[dict[str, Any], str]:
    job, out = scratch / "job.json", scratch / "out.json"
    job.write_text(
        json.dumps({"plan": case.plan.to_dict(), "steps": steps, "device": device, "scratch": str(scratch)})
    )
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.train", str(job), str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **hidden},
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=CASE_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {}, f"not done after {CASE_LIMIT_S} s"
    finally:
        shutil.rmtree(scratch / "weights", ignore_errors=True)
    if process.returncode or not out.is_file():
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        return {}, f"did not train: {last[:300] or f'exit status {process.returncode}'}"
    return json.loads(out.read_text()), ""


def _print(row: Row, dry: bool) -> None:
    print(f"{row.name}: {row.total_params / 1e9:.3f} B parameters, sequence {row.plan['seq_len']}")
    if row.error or row.left_out:
        print(f"  {row.error or f'left out: {row.left_out}'}", flush=True)
    elif dry:
        print(f"  {row.measured.tokens_per_s:.0f} tokens/s on the CPU, loss {row.losses[-1]:.3f}", flush=True)
    else:
        for name in ("allocated", "reserved", "device"):
            print(_line(name, row, 2**30, "GiB", MEMORY_LIMIT))
        if row.measured.process is not None:
            print(f"  {'NVML, process':<14} {'':>20}  measured {row.measured.process / 2**30:>10.2f} GiB")
        print(_line("tokens_per_s", row, 1, "tokens/s", SPEED_LIMIT), flush=True)


def _line(name: str, row: Row, unit: float, label: str, limit: float) -> str:
    predicted, measured = getattr(row.predicted, name), getattr(row.measured, name)
    error = row.relative_error(name)
    right = "not measured" if measured is None else f"measured {measured / unit:>10.2f} {label}"
    off = "" if error is None else f"  {error:+.1%}{' past the limit' if abs(error) > limit else ''}"
    return f"  {name:<14} predicted {predicted / unit:>10.2f}  {right}{off}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
