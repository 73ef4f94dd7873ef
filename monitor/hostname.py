"""The name by which this machine is known among a run's machines."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """Slurm's name of this node inside a job, which need not be the host's own; else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
