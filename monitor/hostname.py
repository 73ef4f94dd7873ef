"""The name by which this machine is known among a run's machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

NODE_NAME_ENV = "FTDASH_NODE_NAME"


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name that the launcher gave this node, or Slurm's inside a job, or the host's own."""
    return environ.get(NODE_NAME_ENV) or environ.get("SLURMD_NODENAME") or socket.gethostname()
