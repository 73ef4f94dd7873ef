"""`ftdash agent`: run a launcher under the node agent, or take over a run whose agent is gone."""

from __future__ import annotations

import argparse

from ftdash.engine.launch.again import silent_hosts, start_on
from ftdash.monitor.agent import cli
from ftdash.monitor.agent.launcher import waiting_shell
from ftdash.monitor.rundir import RunDir, find_run
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import read_once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.adopt is not None and not args.command:
        adopted = find_run(args.adopt, args.runs)
        if adopted.read_manifest().backend != "local" and not waiting_shell(adopted):
            return _adopt_elsewhere(adopted)
    return cli.run(args)


def _adopt_elsewhere(run: RunDir) -> int:
    """From a login node: an agent on each of the run's machines that has fallen silent."""
    hosts = silent_hosts(read_once(run))
    if not start_on(run, hosts):
        raise UserError(f"--adopt {run.run_id}: every agent of it reports")
    print(f"{run.run_id}: a new agent on {', '.join(sorted(hosts))}")
    return 0
