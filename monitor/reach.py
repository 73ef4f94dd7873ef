"""What a screen needs of whoever can start a process on a node whose agent does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

# An agent of several nodes looks for requests once a second and marks a request before it works on it.
ANSWER_S = 2.5


class Reach(Protocol):
    """Does an agent's work on nodes by another way. All methods raise RunError in one line."""

    def dump(self, hosts: Collection[str], folder: Path) -> None:
        """Write the stacks of the ranks on `hosts` into `folder`, a file below the run's stacks/ each."""

    def end(self, hosts: Collection[str], *, grace_s: float, save: bool) -> None:
        """End every process of the run on `hosts`; with `save`, once a checkpoint had its time."""

    def watch(self, hosts: Collection[str]) -> None:
        """Put a new agent beside the ranks on each of `hosts`; returns once all of them report."""


def unanswered(request: Path, hosts: Iterable[str], within_s: float) -> set[str]:
    """Those of `hosts` whose agents have not taken the request up `within_s` seconds after this call."""
    deadline = time.monotonic() + within_s
    left = set(hosts)
    while left:
        left = {host for host in left if not os.path.exists(f"{request}.done-{host}")}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left
