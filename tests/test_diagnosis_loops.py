"""Loops that may turn for ever without coming nearer to their end, and those that cannot."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis.loops import that_may_stand_still
from ftdash.monitor.diagnosis.model import Frame

MAY_STAND_STILL = [
    (
        "while room > 0:\n    n = following()  # here\n    if n > room:\n        skipped += 1\n"
        "        continue\n    docs.append(n)\n    room -= n"
    ),
    "while len(batch) < size:\n    row = next(rows)  # here\n    if good(row):\n        batch.append(row)",
    (
        "while len(self.held) < self.need:\n    row = self.rows[self.at]  # here\n    self.at += 1\n"
        "    if good(row):\n        self.held.append(row)"
    ),
    "while True:\n    for text in docs:\n        if good(text):  # here\n            yield text",
    (
        "while len(found) < n:\n    try:\n        found.append(parse(next(lines)))  # here\n"
        "    except ValueError:\n        bad += 1"
    ),
]
GETS_ON = [
    "while step < 900:\n    simulate()  # here\n    step += 1",
    (
        "while low < high:\n    middle = (low + high) // 2  # here\n    if fits(middle):\n"
        "        low = middle + 1\n    else:\n        high = middle"
    ),
    "while left:\n    left = encode(left)  # here",
    "while n < 10:\n    row = rows.pop()  # here\n    if good(row):\n        n += 1",
    "while n < 10:\n    out.append(draw())\n    x = draw()  # here\n    if good(x):\n        n += 1",
    (
        "while step < n:\n    batch = following()  # here\n    if bad(batch):\n        continue\n"
        "    train_step(batch)\n    step += 1"
    ),
    "while True:\n    for text in docs:\n        yield text  # here",
    "for row in rows:\n    if good(row):  # here\n        n += 1",
]


def loop_at_the_mark(folder: Path, body: str) -> tuple[str, int] | None:
    path = folder / "job.py"
    text = "def f(self):\n" + textwrap.indent(body, "    ") + "\n"
    path.write_text(text)
    line = next(n for n, shown in enumerate(text.split("\n"), 1) if "# here" in shown)
    return that_may_stand_still(Frame("f", str(path), line))


@pytest.mark.parametrize("body", MAY_STAND_STILL)
def test_a_loop_whose_turns_may_be_for_nothing_is_found(body: str, tmp_path: Path) -> None:
    assert loop_at_the_mark(tmp_path, body) == (str(tmp_path / "job.py"), 2)


@pytest.mark.parametrize("body", GETS_ON)
def test_a_loop_that_comes_nearer_to_its_end_in_every_turn_is_left_alone(body: str, tmp_path: Path) -> None:
    assert loop_at_the_mark(tmp_path, body) is None
