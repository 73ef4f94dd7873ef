"""A rank that tries the same again, for far longer than its own steps took, is no slow rank."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import msgspec
import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import (
    Beat,
    Frame,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Sample,
    Thread,
)
from ftdash.monitor.diagnosis.pace import add_pace, last_beat

C10D = "torch/distributed/distributed_c10d.py"
STEP_S = 0.4


def looks(file: Path, line: int, *, age_s: float, usual_s: float = STEP_S, gil: bool = False) -> list[Sample]:
    """Rank 1 busy at `line` of `draw`, its last beat `age_s` before; ranks 0 and 2 in an all_reduce."""
    samples = []
    for t in (100.0, 105.0):
        ranks = []
        for rank in range(3):
            stuck = rank == 1
            deepest = Frame("draw", str(file), line) if stuck else Frame("all_reduce", C10D, 3000)
            stack = [deepest, Frame("main", str(file), 1)]
            cpu_s = t if stuck else 1.0
            proc = ProcState(state="R" if stuck else "S", cpu_s=cpu_s, main_wanted_s=cpu_s, threads=1)
            process = ProcessEvidence(
                pid=100 + rank,
                rank=rank,
                t=t,
                proc=proc,
                threads=[Thread(name="MainThread", frames=stack, owns_gil=gil and stuck)],
                source="py-spy",
            )
            beat = Beat(105.0 - age_s, 40, "data", usual_s, 2 * usual_s)
            ranks.append(RankEvidence(rank=rank, t=t, process=process, beat=beat))
        samples.append(Sample(t=t, ranks=tuple(ranks), expected=frozenset(range(3)), world_size=3))
    return samples


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text("def draw(self, rows, p):\n" + textwrap.indent(body, "    "))
    os.utime(path, (0, 0))
    return path


TRIES_AGAIN = [
    "while not mask.any():\n    mask = bernoulli(p)",
    "while True:\n    row = rows[randrange(len(rows))]\n    if len(row) > 8:\n        return row",
    "for start in cycle(rows):\n    piece = cut(start)\n    if fits(piece):\n        break",
    "while True:\n    tries += 1\n    row = choice(rows)\n    if row.ok:\n        return row",
]
GETS_ON = [
    "while left:\n    left = encode(left)",
    "while step < 900:\n    simulate(p)\n    step += 1",
    "for row in rows:\n    row = bernoulli(p)",
    "while not done:\n    state, done = self.env.step(policy(state))",
    "while True:\n    part = rows.pop()\n    if not part:\n        break",
    "while not done:\n    self.seen = bernoulli(p)\n    done = self.seen.all()",
    "while not done:\n    write(p)\n    done = measure(p)",
]


@pytest.mark.parametrize("body", TRIES_AGAIN)
def test_a_loop_that_only_tries_again_names_its_rank_beyond_the_pace_of_its_steps(
    body: str, tmp_path: Path
) -> None:
    verdict = diagnose(looks(script(tmp_path, body), 3, age_s=75.0)).verdict
    assert verdict.kind is Kind.OUTSIDE
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert "computed for 75 s where its steps took 0.4 s" in verdict.culprits[0].why


@pytest.mark.parametrize("body", GETS_ON)
def test_work_that_builds_on_itself_is_slow_however_long_it_takes(body: str, tmp_path: Path) -> None:
    verdict = diagnose(looks(script(tmp_path, body), 3, age_s=75.0)).verdict
    assert verdict.kind is Kind.SLOW


@pytest.mark.parametrize(("age_s", "usual_s"), [(75.0, 0.0), (6.0, 0.01), (75.0, 15.0)])
def test_nobody_is_suspected_within_the_pace_of_the_steps_or_without_one(
    age_s: float, usual_s: float, tmp_path: Path
) -> None:
    file = script(tmp_path, TRIES_AGAIN[0])
    assert diagnose(looks(file, 3, age_s=age_s, usual_s=usual_s)).verdict.kind is Kind.SLOW


def test_a_search_of_text_that_backtracks_names_its_rank(tmp_path: Path) -> None:
    file = script(tmp_path, "for row in rows:\n    found = PATTERN.match(row)")
    assert diagnose(looks(file, 3, age_s=75.0)).verdict.kind is Kind.SLOW
    assert diagnose(looks(file, 3, age_s=75.0, gil=True)).verdict.kind is Kind.OUTSIDE


def test_the_pace_is_read_from_the_end_of_the_telemetry(tmp_path: Path) -> None:
    steps = [{"kind": "step", "t": 50.0 + n, "step": n, "step_s": 9.0 if n == 1 else 0.5} for n in range(6)]
    lines = b"\n".join(map(msgspec.json.encode, steps)) + b'\n{"kind":"st'
    (tmp_path / "rank-3.jsonl").write_bytes(lines)
    assert last_beat(tmp_path, 4) is None
    elsewhere = rank_at(Frame("draw", "/home/u/train.py", 3), last_beat(tmp_path, 3))
    in_a_collective = rank_at(Frame("all_reduce", C10D, 3000), last_beat(tmp_path, 3))
    add_pace(tmp_path, [elsewhere, in_a_collective])
    assert elsewhere.beat == Beat(55.0, 5, "", 0.5, 9.0)
    assert in_a_collective.beat == Beat(55.0, 5)  # its pace is of no use


def rank_at(frame: Frame, beat: Beat | None) -> RankEvidence:
    thread = Thread(name="MainThread", frames=[frame])
    return RankEvidence(rank=3, process=ProcessEvidence(pid=7, threads=[thread]), beat=beat)
