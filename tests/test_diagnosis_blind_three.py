"""A third blind part of the hang zoo, recorded: two looks each at jobs whose author had never seen a rule.

22 hangs of 2 to 8 ranks in code of torch, accelerate, transformers, TRL, peft, DeepSpeed and plain loops,
each below its own launcher (torchrun or deepspeed) through `ftdash launch`. The scripts and what a careful
engineer would say of each were written apart from the rules. The first answers:

- culprits 20 of 22 (one rank of a pair that waits for each other crosswise; an endless loop called slow)
- culprits, kind and line 18 of 22 (a line of ftdash's own injected module; a helper process that an ended
  rank had left behind, taken for the rank)

All four were mended afterwards, so these looks are no longer blind. The endless loop was looked at anew:
the first looks had not kept how long the steps of the run had taken.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.kinds import NO_CULPRIT, Kind
from ftdash.monitor.diagnosis.model import RankEvidence, Sample

JOB = "/home/u/job/"  # where the recorded jobs ran


class Recorded(msgspec.Struct):
    """`kinds` are the verdicts that fit; `also` ranks that it is fair to name beside or without a culprit.

    A culprit's frame has to be a line of `source` that holds `line`.
    """

    title: str
    script: str
    source: str
    kinds: str
    culprits: list[int]
    also: list[int]
    line: str
    samples: list[list[RankEvidence]]
    timeout_s: float


LINES = (Path(__file__).parent / "diagnosis" / "recorded" / "blind_three.jsonl").read_bytes().splitlines()
TITLES = [msgspec.json.decode(line, type=Recorded).title for line in LINES]


@pytest.mark.parametrize("line", LINES, ids=TITLES)
def test_the_blind_case_is_told_rightly(line: bytes, tmp_path: Path) -> None:
    case = msgspec.json.decode(line.replace(JOB.encode(), f"{tmp_path}/".encode()), type=Recorded)
    script = tmp_path / case.script
    script.write_text(case.source)
    os.utime(script, (0, 0))  # older than the processes that ran it
    ranks = frozenset(range(len(case.samples[0])))
    samples = [
        Sample(t=look[0].t, ranks=tuple(look), expected=ranks, timeout_s=case.timeout_s)
        for look in case.samples
    ]
    verdict = diagnose(samples).verdict
    named = {culprit.rank for culprit in verdict.culprits}
    assert verdict.kind in case.kinds.split(), verdict
    assert set(case.culprits) <= named <= {*case.culprits, *case.also}, verdict
    assert bool(named) != (Kind(verdict.kind) in NO_CULPRIT | {Kind.RENDEZVOUS}), verdict
    source = case.source.splitlines()
    for culprit in verdict.culprits:
        if culprit.rank in case.culprits and verdict.kind != Kind.DEAD_RANK:  # which has no line any more
            shown = re.findall(re.escape(case.script) + r":(\d+)", culprit.frame)
            assert any(case.line in source[int(number) - 1] for number in shown), verdict
