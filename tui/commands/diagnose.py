"""`ftdash diagnose`: names the rank that holds a job up, from live processes, recorded dumps or logs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftdash.tui.cli import UserError

if TYPE_CHECKING:
    from ftdash.engine.plan import Plan
    from ftdash.monitor.diagnosis.model import Diagnosis, Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run of ftdash: id, prefix or directory")
    parser.add_argument("--runs", metavar="DIR", help="where runs are kept")
    parser.add_argument("--pid", type=int, nargs="+", metavar="P", help="ranks, or a launcher above them")
    parser.add_argument("--stacks", metavar="DIR", help="recorded py-spy or faulthandler dumps")
    parser.add_argument(
        "--flight",
        metavar="DIR",
        help="flight recorder dumps, a folder or one file, pickle or JSON; named by rank in any way",
    )
    parser.add_argument(
        "--logs",
        metavar="DIR",
        help="logs of a run that has died, a folder or one file; ranks are read from prefixes such as "
        "[rank3]: or from the names of files",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="for the tokens behind a failed allocation"
    )
    parser.add_argument("--seq-len", type=int, metavar="N", help="configured tokens per sequence")
    parser.add_argument("--plan", metavar="FILE", help="the plan of a run that ran out of memory, as JSON")
    parser.add_argument("--quick", action="store_true", help="a verdict within 2 s, not confirmed")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--markdown", action="store_true", help="a report to paste into an issue")


def _folder(flag: str, value: str) -> Path:
    path = Path(value)
    if not path.exists():
        raise UserError(f"{flag} {value}: no such file or folder")
    return path


def _gather(args: argparse.Namespace) -> list[Sample]:
    """Samples of everything that was named on the command line, joined."""
    from ftdash.monitor.diagnosis.model import Sample

    samples: list[Sample] = []
    if args.run is not None:
        from ftdash.engine.launch.nodes import reach_of
        from ftdash.monitor.diagnosis.rundata import sample_run
        from ftdash.monitor.rundir import find_run

        run = find_run(args.run, args.runs)
        run.check_owner()
        samples = sample_run(run, quick=args.quick, reach=reach_of(run))
    if args.pid:
        from ftdash.monitor.diagnosis.live import sample_processes

        if bad := [pid for pid in args.pid if pid <= 0]:
            raise UserError(f"--pid {bad[0]}: a process id is a positive number")
        if not any(Path(f"/proc/{pid}").exists() for pid in args.pid):
            raise UserError(f"--pid {' '.join(map(str, args.pid))}: no such process on this machine")
        samples = sample_processes(args.pid, quick=args.quick)
    if args.stacks:
        from ftdash.monitor.diagnosis.stacks import read_stacks

        recorded = read_stacks(_folder("--stacks", args.stacks))
        samples = samples or recorded[-2:]
    if not samples:
        samples = [Sample(t=time.time())]
    last = samples[-1]
    if args.flight:
        from ftdash.monitor.diagnosis.flight import read_flight

        dumps, notices = read_flight(_folder("--flight", args.flight))
        if not dumps and not notices:
            notices.append(f"--flight {args.flight}: no flight recorder dumps are in it")
        last = replace(last, flight=tuple(dumps), notices=(*last.notices, *notices))
    if args.logs:
        from ftdash.monitor.diagnosis.logs import read_logs

        logs = read_logs(_folder("--logs", args.logs))
        logs.vocab_size = args.vocab_size or logs.vocab_size
        logs.seq_len = args.seq_len or logs.seq_len
        last = replace(last, logs=logs)
    return [*samples[:-1], last]


def _plan(args: argparse.Namespace) -> Plan | None:
    """The plan of --plan, else of the run."""
    import msgspec

    from ftdash.engine.plan import Plan
    from ftdash.monitor.rundir import decode_json, find_run

    if args.plan:
        try:
            return Plan.from_dict(decode_json(_folder("--plan", args.plan).read_bytes(), dict))
        except (OSError, msgspec.DecodeError, msgspec.ValidationError, TypeError) as error:
            raise UserError(f"--plan {args.plan}: no plan: {error}") from None
    stored = find_run(args.run, args.runs).read_manifest().plan if args.run is not None else None
    try:
        return Plan.from_dict(stored) if stored else None
    except msgspec.ValidationError:
        return None


def _explain_memory(args: argparse.Namespace, samples: Sequence[Sample], diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis, with the post-mortem of the memory that ran out: planned anew, where a plan is known."""
    from ftdash.monitor.diagnosis.kinds import Kind
    from ftdash.monitor.diagnosis.model import LogKind

    verdict = diagnosis.verdict
    kinds = {Kind.OUT_OF_MEMORY: LogKind.OOM, Kind.HOST_OUT_OF_MEMORY: LogKind.HOST_OOM}
    logs = samples[-1].logs if samples else None
    wanted = kinds.get(Kind(verdict.kind))
    if wanted is None or logs is None:
        return diagnosis
    named = {culprit.rank for culprit in verdict.culprits}
    findings = [finding for finding in logs.findings if finding.kind is wanted]
    finding = next((one for one in findings if one.rank in named), next(iter(findings), None))
    if finding is None:
        return diagnosis
    from ftdash.engine.postmortem import lines, next_steps, post_mortem
    from ftdash.monitor import procs
    from ftdash.monitor.hostname import node_name
    from ftdash.monitor.rundir import find_run

    here = args.run is not None and set(find_run(args.run, args.runs).read_manifest().hosts) <= {node_name()}
    capacity = procs.host_memory()[0] if here else None
    found = post_mortem(finding, _plan(args), capacity=capacity)
    explained = replace(
        verdict, evidence=(*verdict.evidence, *lines(found)), next=(*verdict.next, *next_steps(found))
    )
    return replace(diagnosis, verdict=explained)


def run(args: argparse.Namespace) -> int:
    if args.run is None and not (args.pid or args.stacks or args.flight or args.logs):
        raise UserError("diagnose needs RUN, --pid P, --stacks DIR, --flight DIR or --logs DIR")
    from ftdash.monitor.diagnosis.weigh import diagnose

    samples = _gather(args)
    diagnosis = _explain_memory(args, samples, diagnose(samples))
    if args.json:
        sys.stdout.write(json.dumps(diagnosis.to_json(), ensure_ascii=False) + "\n")
        return 0
    from ftdash.monitor.diagnosis.report import as_markdown, as_text

    sys.stdout.write(as_markdown(diagnosis) if args.markdown else as_text(diagnosis))
    return 0
