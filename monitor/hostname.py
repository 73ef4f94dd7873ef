"""The name by which this machine is known among a run's machines."""

from __future__ import annotations

import os
import socket

NODE_NAME_ENV = "FTDASH_NODE_NAME"


def node_name() -> str:
    """The name that the launcher gave this node, or Slurm's inside a job, or the host's own."""
    return os.environ.get(NODE_NAME_ENV) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
