"""Starts a launcher so that it outlives its agent, and leaves its exit status on disk in any case."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from ftdash.monitor import procs
from ftdash.monitor.hostname import node_name
from ftdash.monitor.inject.own import python_path
from ftdash.monitor.procs import AGENT_ENV, children
from ftdash.monitor.rundir import RUN_DIR_ENV, RunDir

INJECT_ENV = "FTDASH_INJECT"  # set for scripts that do not report themselves

# The shell waits for the launcher and writes its status: an agent that was killed cannot. It notes signals
# meant for the launcher without dying of them; unlike `trap ''`, a handler is not inherited by the launcher.
_WAITER = (
    "trap : HUP INT QUIT TERM USR1 USR2; "
    '"$@"; status=$?; '
    'printf "%s\\n" "$status" >"$0.new" && mv "$0.new" "$0"; '
    'exit "$status"'
)


def start(run: RunDir, command: Sequence[str], env: dict[str, str] | None = None) -> int:
    """Start `command` in a session of its own; returns the pid of the shell that waits for it.

    Output goes straight to files: a pipe through the agent would break when the agent dies.
    """
    environment = dict(os.environ if env is None else env)
    environment.pop(AGENT_ENV, None)
    environment[RUN_DIR_ENV] = str(run.path)
    # One file per rank and stream, where torchrun is the launcher and nothing else was asked for.
    environment.setdefault("PET_LOG_DIR", str(run.logs))
    environment.setdefault("PET_TEE", "3")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if environment.pop(INJECT_ENV, ""):
        environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    with open(run.launcher_log, "ab", buffering=0) as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WAITER, str(run.exit_marker), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    process.returncode = 0  # reaped by the agent's own loop, with every other child
    return process.pid


def launcher_pids(shell_pid: int) -> list[int]:
    """The launcher itself: what the waiting shell has started."""
    return children(shell_pid)


def waits_for_launcher(pid: int) -> bool:
    """Whether this process is a shell that waits for a launcher, to write how it ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            words = handle.read().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-c", _WAITER.encode()]


def waiting_shell(run: RunDir) -> int:
    """The shell on this node that waits for the run's launcher, whoever started it; 0 when it is gone."""
    for pid in procs.pids_of_run(run.path):
        if waits_for_launcher(pid) and node_name(procs.environ(pid)) == node_name():
            return pid
    return 0
