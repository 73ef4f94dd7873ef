"""`ftdash launch`: start a run from a plan, or run somebody's own launcher command under the agent."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from ftdash.engine.launch.reading import reader_for
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.launch.start import start
from ftdash.monitor.home import home
from ftdash.monitor.rundir import find_run, new_run_id
from ftdash.monitor.state import RunPhase
from ftdash.tui.cli import UserError
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from, recipe_of
from ftdash.tui.commands.run_json import print_json, run_summary
from ftdash.tui.commands.slurm_flags import add_cluster_flags, hosts_file, slurm_options

Chosen = TypeVar("Chosen", bound=StrEnum)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_flags(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--data", metavar="NAME", help="hub id or .jsonl file of chats (the set that ships)")
    run.add_argument("--steps", metavar="N", help="optimizer steps (100)")
    run.add_argument("--out", metavar="DIR", help="checkpoints and the final model (below the run)")
    run.add_argument("--save-steps", metavar="N", help="a checkpoint every N steps (the final model only)")
    run.add_argument("--resume", metavar="DIR", help="a checkpoint folder to go on from")
    run.add_argument("--restart", metavar="RUN", help="the plan of an ended run, from its last checkpoint")
    run.add_argument("--debug-switches", metavar="NAME,…", help="for the ranks; see ftdash configs")
    run.add_argument("--device", default="auto", metavar="|".join(Device), help="(auto)")
    run.add_argument("--backend", default="local", metavar="|".join(Backend), help="(local)")
    run.add_argument("--name", default="", metavar="TEXT", help="part of the run's id")
    run.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    run.add_argument("--rehearse", action="store_true", help="prove the plan on CPU ranks, launch nothing")
    run.add_argument("--detach", action="store_true", help="do not open the app on the run")
    run.add_argument("--json", action="store_true")
    add_cluster_flags(parser)
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="your own launcher command")


def run(args: argparse.Namespace) -> int:
    spec = spec_from(args)
    if args.rehearse:
        return _rehearse(spec, as_json=args.json)
    if spec.backend is Backend.SLURM:
        _warn(spec)
    try:
        started = start(spec)
    except LaunchError as error:
        raise UserError(str(error)) from None
    if args.json:
        print_json(run_summary(started))
        return 0
    if args.detach or not sys.stdout.isatty() or not sys.stdin.isatty():
        print(f"{started.run_id} started; ftdash watch {started.run_id}  ·  ftdash stop {started.run_id}")
        return 0
    from ftdash.tui.app import open_app

    return open_app([], run=started, pane="monitor")


def _warn(spec: LaunchSpec) -> None:
    """What Slurm would take and the job would die of."""
    from ftdash.engine.slurm.preflight import job_findings

    for finding in job_findings(spec):
        sys.stderr.write(f"ftdash: {finding.severity}: {finding.text}; {finding.fix}\n")


def _rehearse(spec: LaunchSpec, *, as_json: bool) -> int:
    """Prove the plan on CPU ranks and launch nothing; exit status 1 when something does not hold."""
    from ftdash.engine.rehearse import RehearsalError, rehearse

    if spec.plan is None or spec.command:
        raise UserError("--rehearse: only a plan can be rehearsed, not a command")
    run_id = new_run_id(f"rehearsal-{spec.name or spec.plan.model or 'model'}")
    work = home() / "rehearsals" / run_id
    work.mkdir(parents=True, mode=0o700)
    proved: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    failure = ""
    try:
        found = rehearse(spec.plan, work=work)
        proved, not_proved = found.proved, found.not_proved
    except RehearsalError as error:
        failure = " ".join(str(error).split())
        proved, not_proved = error.proved, (failure,)
    if as_json:
        state = RunPhase.FAILED if failure else RunPhase.FINISHED
        about = {"run": run_id, "dir": str(work), "state": str(state)}
        print_json({**about, "proved": list(proved), "not_proved": list(not_proved)})
    else:
        print(
            "\n".join(
                [*(f"proved      {line}" for line in proved), *(f"not proved  {line}" for line in not_proved)]
            )
        )
    if failure:
        sys.stderr.write(f"ftdash: rehearsal: {failure}\n")
    return 1 if failure else 0


def spec_from(args: argparse.Namespace) -> LaunchSpec:
    """What the flags ask for. Raises UserError naming the flag."""
    if args.restart is not None:
        return _restarted(args)
    command = tuple(args.command)
    sources = (args.model, args.config, args.params, args.from_file, args.recipe)
    plan_given = any(value is not None for value in sources)
    recipe = recipe_of(args)
    backend = choice("--backend", args.backend, Backend)
    nodes = whole_number("--nodes", args.nodes) or 1
    return LaunchSpec(
        plan=plan_from(args) if plan_given or not command else None,
        command=command,
        data=args.data or (recipe.data if recipe else None),
        steps=whole_number("--steps", args.steps),
        save_steps=whole_number("--save-steps", args.save_steps) or 0,
        resume=_checkpoint(args.resume),
        env=_switched(args),
        out=Path(args.out) if args.out is not None else None,
        device=choice("--device", args.device, Device),
        backend=backend,
        nodes=nodes,
        slurm=slurm_options(args, nodes) if backend is Backend.SLURM else None,
        hosts=hosts_file(args),
        name=args.name,
        runs=Path(args.runs) if args.runs is not None else None,
    )


def _restarted(args: argparse.Namespace) -> LaunchSpec:
    """An ended run's own choices; steps, switches and what names machines may be given anew."""
    from ftdash.engine.launch.restart import restarted
    from ftdash.monitor.liveness import FINAL

    run = find_run(args.restart, args.runs)
    state = reader_for(run).read_whole().state
    if state not in FINAL:
        raise UserError(f"--restart {args.restart}: it is {state}; ftdash stop {run.run_id} first")
    try:
        spec = restarted(run, steps=whole_number("--steps", args.steps))
    except LaunchError as error:
        raise UserError(f"--restart {args.restart}: {error}") from None
    return replace(
        spec,
        env=_switched(args) or spec.env,
        slurm=slurm_options(args, spec.nodes, spec.slurm) if spec.backend is Backend.SLURM else None,
        hosts=hosts_file(args) or spec.hosts,
    )


def _checkpoint(text: str | None) -> Path | None:
    from ftdash.engine.launch.resume import is_whole

    if text is None:
        return None
    path = Path(text)
    if not path.is_dir():
        raise UserError(f"--resume {text}: no such folder")
    if not is_whole(path):
        raise UserError(f"--resume {text}: no whole checkpoint; see ftdash checkpoint ls")
    return path


def _switched(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    from ftdash.engine.configs import ConfigError
    from ftdash.engine.configs.debug_switches import variables

    try:
        return variables(args.debug_switches.split(",") if args.debug_switches else [])
    except ConfigError as error:
        raise UserError(str(error)) from None


def whole_number(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UserError(f"{flag} {text}: must be a whole number, 1 or more")
    return value


def choice(flag: str, text: str, kind: type[Chosen]) -> Chosen:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{flag} {text}: one of {', '.join(kind)}") from None
