"""Stands above an agent where a scheduler watches its process: the task lives as long as training does.

    python -m ftdash.monitor.agent.keep RUN_DIR NODE_RANK -- AGENT'S ARGV…

Without it, Slurm would take an agent that was killed for the end of the job, and end the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from ftdash.monitor import exits, procs
from ftdash.monitor.agent.launcher import launcher_pids
from ftdash.monitor.agent.watch import adopt_orphans
from ftdash.monitor.rundir import RunDir

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
HEARD = (*PASSED_ON, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """The agent's exit status; that of the launcher when the agent was killed before its end."""
    run = RunDir(argv[0], int(argv[1]))
    adopt_orphans()
    agent = 0

    def heard(number: int, frame: FrameType | None) -> None:
        # Slurm signals the agent too, which passes it on; once it is gone, its launcher is our child
        if number in PASSED_ON and not procs.alive(agent):
            for shell in procs.children(os.getpid()):
                procs.send([shell, *launcher_pids(shell)], number)

    for number in HEARD:
        signal.signal(number, heard)
    agent = os.posix_spawn(argv[3], argv[3:], os.environ)
    status = _wait_for(agent)
    if status >= 0:
        return status
    words = f"ftdash: the agent on this node was {procs.signal_name(status)}; training goes on without it\n"
    with contextlib.suppress(OSError):
        sys.stderr.write(words)
    _wait_for(None)
    code = exits.launcher_exit(run)
    return code % 256 if code is not None else 1


def _wait_for(child: int | None) -> int:
    """Collect every child until `child` has ended, or until none is left; the exit code of the last one."""
    code = 1
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        code = procs.exit_code(status)
        if pid == child:
            return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
