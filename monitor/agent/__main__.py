"""`python -m ftdash.monitor.agent`: the node agent as a process."""

from __future__ import annotations

import sys

from ftdash.monitor.agent.cli import main

sys.exit(main(sys.argv[1:]))
