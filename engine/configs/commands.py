"""The launchers' command lines, for one node and for several."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ftdash.engine.configs.types import Command, Launcher, Rendezvous, local_world, nodes_of
from ftdash.engine.plan import Plan

SCRIPT = "ftdash.engine.train"


def own_path(environ: Mapping[str, str]) -> str:
    """PATH with this interpreter's own programs first.

    DeepSpeed compiles its operators with the ninja that PATH offers, and two releases of ninja take turns in
    compiling everything anew, a minute or more each time.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])


def python_command(script: tuple[str, ...], python: str | None) -> Command:
    return Command(Launcher.PYTHON, ((python or "python", "-m", SCRIPT, *script),))


def accelerate_command(
    plan: Plan, config: str, script: tuple[str, ...], *, python: str | None, log_dir: str | None
) -> Command:
    """World size, address and port stand in the config file; only the node's rank differs."""
    start = (python, "-m", "accelerate.commands.launch") if python else ("accelerate", "launch")
    nodes = nodes_of(plan)
    return Command(
        Launcher.ACCELERATE,
        tuple(
            (
                *start,
                "--config_file",
                config,
                *(("--machine_rank", str(rank)) if nodes > 1 else ()),
                *(("--log_dir", log_dir, "--tee", "3") if log_dir else ()),
                "-m",
                SCRIPT,
                *script,
            )
            for rank in range(nodes)
        ),
    )


def torchrun_command(
    plan: Plan,
    script: tuple[str, ...],
    *,
    python: str | None,
    rendezvous: Rendezvous | None,
    log_dir: str | None,
) -> Command:
    start = (python, "-m", "torch.distributed.run") if python else ("torchrun",)
    nodes = nodes_of(plan)
    meeting = rendezvous or Rendezvous()
    argvs = []
    for rank in range(nodes):
        # --standalone takes a free port; several nodes need one that all of them know.
        where = (
            ("--standalone",)
            if nodes == 1
            else (
                *("--nnodes", str(nodes), "--node-rank", str(rank)),
                *("--master-addr", meeting.address, "--master-port", str(meeting.port)),
            )
        )
        logs = ("--log-dir", log_dir, "--tee", "3") if log_dir else ()
        argvs.append(
            (*start, *where, "--nproc-per-node", str(local_world(plan)), *logs, "-m", SCRIPT, *script)
        )
    return Command(Launcher.TORCHRUN, tuple(argvs))


def deepspeed_command(
    plan: Plan,
    script: tuple[str, ...],
    *,
    python: str | None,
    rendezvous: Rendezvous | None,
    log_dir: str | None,
    hostfile: str | None,
) -> Command:
    """Started on every node with --no_ssh, so that each node's agent owns its own processes."""
    start = (python, "-m", "deepspeed.launcher.runner") if python else ("deepspeed",)
    nodes = nodes_of(plan)
    meeting = rendezvous or Rendezvous()
    argvs = []
    for rank in range(nodes):
        several = (
            ("--hostfile", hostfile, "--no_ssh", "--node_rank", str(rank), "--master_addr", meeting.address)
            if nodes > 1 and hostfile
            else ()
        )
        logs = ("--enable_each_rank_log", log_dir) if log_dir else ()
        argvs.append(
            (
                *start,
                *several,
                *("--num_gpus", str(local_world(plan)), "--master_port", str(meeting.port)),
                *logs,
                *("--module", SCRIPT),
                *script,
            )
        )
    return Command(Launcher.DEEPSPEED, tuple(argvs))
