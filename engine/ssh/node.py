"""Runs on each host of an ssh run: works out this host's command, then becomes its agent.

python -m ftdash.engine.ssh.node RUN_DIR NODE_RANK ADDRESS ATTEMPT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from ftdash.engine.launch.job import start_agent_here
from ftdash.monitor.rundir import RunDir, RunError


def main(argv: list[str]) -> NoReturn:
    """Replace this process by the agent; one line and exit status 1 when it cannot."""
    if len(argv) != 4 or not argv[1].isdigit():
        sys.exit("usage: python -m ftdash.engine.ssh.node RUN_DIR NODE_RANK ADDRESS ATTEMPT")
    path, node_rank, address, attempt = argv
    try:
        start_agent_here(
            RunDir(Path(path)), node_rank=int(node_rank), address=address, attempt=attempt, detached=True
        )
    except (RunError, OSError) as error:
        sys.exit(f"ftdash: {os.uname().nodename}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
