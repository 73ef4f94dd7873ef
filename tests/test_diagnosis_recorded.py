"""Two looks each at real hangs of gloo ranks, recorded: the verdict without the source and the processes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.model import RankEvidence, Sample


class Recorded(msgspec.Struct):
    """`kinds` names the verdicts that fit; `samples` are the ranks at two moments."""

    title: str
    culprits: list[int]
    kinds: str
    samples: list[list[RankEvidence]]


LINES = (Path(__file__).parent / "diagnosis" / "recorded" / "field.jsonl").read_bytes().splitlines()
CASES = [msgspec.json.decode(line, type=Recorded) for line in LINES]


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
def test_the_rank_that_holds_the_others_up_is_named(case: Recorded) -> None:
    ranks = frozenset(range(len(case.samples[0])))
    samples = [Sample(t=look[0].t, ranks=tuple(look), expected=ranks) for look in case.samples]
    verdict = diagnose(samples).verdict
    assert {culprit.rank for culprit in verdict.culprits} == set(case.culprits), verdict.reason
    assert verdict.kind in case.kinds.split(), verdict.reason
    assert all("/home/u/job/train.py" in culprit.frame for culprit in verdict.culprits)
