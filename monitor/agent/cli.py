"""The agent's command line, shared by `ftdash agent` and `python -m ftdash.monitor.agent`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ftdash.monitor.agent.agent import Agent, adoptable
from ftdash.monitor.procs import AGENT_ENV
from ftdash.monitor.redact import redact_command
from ftdash.monitor.rundir import NODES_ENV, Manifest, RunDir, RunError, find_run, new_run_id, stored_env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="run directory; made when not given")
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument(
        "--adopt", metavar="RUN", help="watch a run whose agent is gone, instead of starting one"
    )
    parser.add_argument(
        "--node-rank", type=int, default=None, metavar="N", help="0 on the node that writes run.json"
    )
    parser.add_argument("--detached", action="store_true", help="signals end the agent only, never training")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the launcher")


def run(args: argparse.Namespace) -> int:
    """Run an agent in this process until its run has ended. Raises RunError in one line."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    node_rank = args.node_rank
    if node_rank is None:
        node_rank = int(os.environ.get("SLURM_NODEID") or 0)
    if args.adopt is not None:
        if command:
            raise RunError("--adopt takes no command: the run's processes are there already")
        adopted = find_run(args.adopt, args.runs)
        place = adoptable(adopted)
        _become_agent_of(adopted, ["--adopt", str(adopted.path)])
        os.environ[NODES_ENV] = place.nodes
        there = RunDir(adopted.path, place.node_rank)
        return Agent(there, detached=True, node_rank=place.node_rank).run_to_end(None)
    if not command:
        raise RunError("agent: no launcher command after --")
    target = RunDir(os.path.realpath(args.run), node_rank) if args.run else _new_run(command, args.runs)
    target.check_owner()
    again = ["--run", str(target.path), "--node-rank", str(node_rank), *(["--detached"] * args.detached)]
    _become_agent_of(target, [*again, "--", *command])
    return Agent(target, detached=args.detached, node_rank=node_rank).run_to_end(command)


def main(argv: Sequence[str]) -> int:
    """As a program: exit status of the launcher, 2 for what cannot be started."""
    parser = argparse.ArgumentParser(prog="ftdash agent", allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv)) % 256
    except (RunError, OSError) as error:
        sys.stderr.write(f"ftdash: {error}\n")
        return 2


def _become_agent_of(run: RunDir, argv: Sequence[str]) -> None:
    """Show in our own environment whose agent this is: readers look there, as a pid alone proves nothing.

    /proc/PID/environ shows what a process was started with, so the program starts itself anew.
    """
    path = str(run.path)
    if os.environ.get(AGENT_ENV) == path:
        return
    os.environ[AGENT_ENV] = path
    os.execve(sys.executable, [sys.executable, "-m", "ftdash.monitor.agent", *argv], os.environ)


def _new_run(command: Sequence[str], root: str | None) -> RunDir:
    manifest = Manifest(
        run=new_run_id(Path(command[0]).name),
        created=time.time(),
        command=redact_command(command, os.environ),
        env=stored_env(dict(os.environ)),
    )
    return RunDir.create(manifest, root)
