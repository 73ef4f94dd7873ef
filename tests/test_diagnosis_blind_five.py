"""Of a fifth blind part of the hang zoo: jobs that were told wrongly at first sight, and mended as kinds.

A handler of a signal that one rank got, a ring of point-to-point calls in which one rank sends and the others
receive, a group that only its members made, and, no hang at all, an upload through a slow link.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recorded import judge, lines_of

CASES = lines_of("blind_five.jsonl")


@pytest.mark.parametrize("line", [line for _, line in CASES], ids=[title for title, _ in CASES])
def test_the_job_that_was_told_wrongly_at_first_is_told_rightly(line: bytes, tmp_path: Path) -> None:
    judge(line, tmp_path)
