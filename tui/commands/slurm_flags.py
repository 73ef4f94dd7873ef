"""The flags of `--backend slurm` and `--backend ssh`, and what they ask for."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from ftdash.engine.slurm.options import ContainerRuntime, SlurmOptionError, SlurmOptions
from ftdash.tui.cli import UserError


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Slurm's directives, by sbatch's own names where they have one, and the hosts file of ssh."""
    add = parser.add_argument_group("other machines").add_argument
    add("--partition", default="", metavar="NAME")
    add("--account", default="", metavar="NAME")
    add("--qos", default="", metavar="NAME")
    add("--cpus-per-task", type=int, metavar="N", help="CPUs on each node")
    add("--memory", default="", metavar="SIZE", help="on each node, such as 200G")
    add("--time", default="", metavar="LIMIT", help="minutes, H:M:S or D-H:M:S")
    add("--constraint", default="", metavar="EXPR")
    add("--exclude", default="", metavar="NODES")
    add("--reservation", default="", metavar="NAME")
    add("--container", default="", metavar="IMAGE")
    add("--container-runtime", default="pyxis", choices=list(ContainerRuntime), help="(pyxis)")
    add("--module", action="append", default=[], metavar="NAME", help="module to load; may be given again")
    add(
        "--directive",
        action="append",
        default=[],
        metavar="OPTION",
        help="further sbatch option, with its --",
    )
    add(
        "--signal-lead",
        type=int,
        default=120,
        metavar="S",
        help="save so many seconds before the limit (120)",
    )
    add("--no-requeue", action="store_true", help="do not go on in a new job after the time limit")
    add("--hosts", metavar="FILE", help="hosts file for --backend ssh: NAME [slots=N] [address=A] a line")


def slurm_options(args: argparse.Namespace, nodes: int, before: SlurmOptions | None = None) -> SlurmOptions:
    """What the flags ask for, else what was asked `before`; nodes are excluded beside those. UserError names
    the flag."""
    try:
        given = SlurmOptions(
            nodes=nodes,
            gpus_per_node=_gpus_per_node(args),
            cpus_per_task=args.cpus_per_task,
            partition=args.partition,
            account=args.account,
            qos=args.qos,
            memory=args.memory,
            time=args.time,
            constraint=args.constraint,
            exclude=args.exclude,
            reservation=args.reservation,
            container=args.container,
            container_runtime=ContainerRuntime(args.container_runtime),
            modules=tuple(args.module),
            directives=tuple(args.directive),
            signal_lead_s=args.signal_lead,
            requeue=not args.no_requeue,
        )
    except SlurmOptionError as error:
        raise UserError(str(error)) from None
    if before is None:
        return given
    untouched = SlurmOptions()
    said = {
        field.name: value
        for field in fields(SlurmOptions)
        if (value := getattr(given, field.name)) != getattr(untouched, field.name)
    }
    exclude = dict.fromkeys([*before.exclude.split(","), *given.exclude.split(",")])
    said |= {"exclude": ",".join(filter(None, exclude)), "nodes": nodes}
    return replace(before, **said)


def _gpus_per_node(args: argparse.Namespace) -> int | None:
    """For a command of one's own; a plan says it itself."""
    if not args.command or args.gpus_per_node is None:
        return None
    if not args.gpus_per_node.isdecimal():
        raise UserError(f"--gpus-per-node {args.gpus_per_node}: must be a whole number")
    return int(args.gpus_per_node)


def hosts_file(args: argparse.Namespace) -> Path | None:
    return Path(args.hosts) if args.hosts else None
