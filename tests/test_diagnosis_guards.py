"""Which lines of the user's source only some ranks come to: by conditions, guards, decorators, names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.monitor.diagnosis.guards import rank_condition
from ftdash.monitor.diagnosis.model import Frame

ONLY_SOME = [
    "def f():\n    if rank == 0:\n        gather()",
    "def f():\n    if rank != 0:\n        pass\n    else:\n        gather()",
    "def f():\n    if not is_main_process:\n        return\n    gather()",
    "def f():\n    if step % every or dist.get_rank():\n        return\n    gather()",
    "def f():\n    for x in data:\n        if rank > 0:\n            continue\n        gather()",
    "def f(state):\n    if state.is_world_process_zero and state.step >= 40:\n        gather()",
    "@rank_zero_only\ndef f():\n    gather()",
    "@acc.on_main_process\ndef f():\n    gather()",
    "writer = rank == 0\ndef f():\n    if writer:\n        gather()",
    (
        "class A:\n    def __init__(self):\n        self.lead = dist.get_rank() == 0\n"
        "    def f(self):\n        if self.lead:\n            gather()"
    ),
    "lead, every = rank == 0, 50\ndef f():\n    if lead:\n        gather()",
    "def lead():\n    return get_rank() == 0\ndef f():\n    if lead():\n        gather()",
    "def f():\n    rank == 0 and gather()",
    "def f():\n    x = gather() if is_main else None",
]
ALL = [
    "def f():\n    if rank != 0:\n        gather()",
    "def f():\n    if rank:\n        gather()",
    "def f():\n    if is_main_process:\n        return\n    gather()",
    "def f():\n    if is_main_process:\n        log()\n    gather()",
    "def f():\n    if lora_rank == 8:\n        gather()",
    "def f():\n    if ranking:\n        gather()",
    "@lru_cache\ndef f():\n    gather()",
    "def f():\n    if step >= 40:\n        gather()",
    "writer = open(path)\ndef f():\n    if writer:\n        gather()",
]


def condition_at_the_gather(folder: Path, source: str) -> str:
    path = folder / "job.py"
    path.write_text(source + "\n")
    line = next(n for n, text in enumerate(source.split("\n"), 1) if "gather()" in text)
    return rank_condition(Frame("f", str(path), line))


@pytest.mark.parametrize("source", ONLY_SOME)
def test_a_line_that_only_some_ranks_come_to_is_seen(source: str, tmp_path: Path) -> None:
    assert condition_at_the_gather(tmp_path, source)


@pytest.mark.parametrize("source", ALL)
def test_a_line_that_most_ranks_come_to_is_no_sign(source: str, tmp_path: Path) -> None:
    assert condition_at_the_gather(tmp_path, source) == ""
