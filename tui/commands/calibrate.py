"""`ftdash calibrate`: learn the planner's constants from finished runs, and link rates from nccl-tests."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from ftdash.engine import links
from ftdash.engine.calibrate import Learned, calibration_path, learn, learned, save
from ftdash.engine.launch.checks import gpu_count
from ftdash.monitor.rundir import find_run, list_runs
from ftdash.monitor.wording import gib
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="runs to learn from (all)")
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--show", action="store_true", help="print what is known and learn nothing")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be learned and store nothing"
    )
    parser.add_argument(
        "--nccl-tests",
        nargs="?",
        const=links.PROGRAM,
        metavar="PROGRAM",
        help=f"measure the link between the GPUs of this machine ({links.PROGRAM})",
    )
    parser.add_argument(
        "--nccl-output", metavar="FILE", help=f"what {links.PROGRAM} printed elsewhere, on several nodes too"
    )
    parser.add_argument("--gpu", metavar="NAME", help="the GPU measured, where its product is not known")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")


def run(args: argparse.Namespace) -> int:
    if args.nccl_tests is not None or args.nccl_output is not None:
        return _measure_link(args)
    if args.gpu is not None:
        raise UserError("--gpu names the GPU that --nccl-tests or --nccl-output measured: give one of them")
    skipped: list[str] = []
    if args.show:
        calibration = learned()
        if calibration.notice:
            sys.stderr.write(f"ftdash: {calibration.notice}\n")
    else:
        runs = [find_run(name, args.runs) for name in args.run] if args.run else list_runs(args.runs)
        calibration, skipped = learn(runs)
        if calibration.entries and not args.dry_run:
            save(calibration)
    if args.json:
        print_json(
            {
                "file": str(calibration_path()),
                "learned": [msgspec.to_builtins(entry) for entry in calibration.entries],
                "skipped": skipped,
            }
        )
        return 0
    print("\n".join(map(_line, calibration.entries)) or "nothing learned yet")
    for line in skipped:
        print(f"left out: {line}")
    return 0


def _measure_link(args: argparse.Namespace) -> int:
    try:
        if args.nccl_output is not None:
            text = Path(args.nccl_output).read_text(errors="replace")
        else:
            text = links.run(args.nccl_tests, gpu_count())
        rate = links.parse(text, args.gpu)
    except links.LinksError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"--nccl-output {args.nccl_output}: {error.strerror or error}") from None
    if not args.dry_run:
        links.save(rate)
    if args.json:
        print_json({"file": str(links.links_path()), "link": msgspec.to_builtins(rate)})
    else:
        each = f"{rate.ranks} ranks, {rate.ranks_per_node} a node"
        print(f"{rate.gpu} {rate.link}: {rate.bytes_per_s / 1e9:.1f} GB/s for one GPU, over {each}")
    return 0


def _line(entry: Learned) -> str:
    what = []
    if entry.context_bytes is not None:
        what.append(f"context {gib(entry.context_bytes)}")
    for name, value in (
        ("reserved over allocated", entry.reserved_over_allocated),
        ("allocated over predicted", entry.allocated_ratio),
        ("reserved over predicted", entry.reserved_ratio),
        ("step time over predicted", entry.step_ratio),
    ):
        if value is not None:
            what.append(f"{name} {value:.2f}")
    if entry.mfu is not None:
        what.append(f"MFU {entry.mfu:.0%}")
    if entry.link_bytes_per_s is not None:
        what.append(f"link {entry.link_bytes_per_s / 1e9:.1f} GB/s")
    runs = "1 run" if entry.runs == 1 else f"{entry.runs} runs"
    return f"{entry.gpu} {entry.family or '(all models)'} ({runs}): {', '.join(what)}"
