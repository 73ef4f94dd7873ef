"""Of a sixth blind part of the hang zoo, recorded: two looks each at jobs whose author had never seen a rule.

25 hangs and 6 jobs at work of 2 to 4 ranks, below torchrun, accelerate, the DeepSpeed launcher, `spawn` and
a shell, half of them through `ftdash launch`, sealed until the rules were frozen. The first answers:

- culprits 23 of 25 hangs, kind and line as well 21 of 25
- no false alarm in the 6 jobs at work

Eleven of the hangs and five of the jobs at work are kept here. All of these were told rightly at first sight.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recorded import judge, lines_of

CASES = lines_of("blind_six.jsonl")


@pytest.mark.parametrize("line", [line for _, line in CASES], ids=[title for title, _ in CASES])
def test_the_blind_case_is_told_rightly(line: bytes, tmp_path: Path) -> None:
    judge(line, tmp_path)
