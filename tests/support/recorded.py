"""Two looks at a job, recorded with its sources and the truth; and whether the verdict on them is right."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.kinds import NO_CULPRIT, Kind
from ftdash.monitor.diagnosis.model import FlightDump, ProcessEvidence, RankEvidence, Sample

RECORDED = Path(__file__).parents[1] / "diagnosis" / "recorded"
JOB = "/home/u/job/"  # where the recorded jobs ran


class Recorded(msgspec.Struct):
    """`kinds` are the verdicts that fit; `also` ranks that it is fair to name beside or without a culprit.

    A culprit's frame has to be a line of `sources` (text by file name) that holds one of `lines`, where there
    are any. `flight` and `launchers` were found at the last look.
    """

    title: str
    sources: dict[str, str]
    hangs: bool
    kinds: str
    culprits: list[int]
    also: list[int]
    lines: list[str]
    samples: list[list[RankEvidence]]
    timeout_s: float
    expected: list[int]
    flight: list[FlightDump] = []
    launchers: list[ProcessEvidence] = []


def lines_of(name: str) -> list[tuple[str, bytes]]:
    """Title and line of each case of a recording."""
    lines = (RECORDED / name).read_bytes().splitlines()
    return [(msgspec.json.decode(line, type=Recorded).title, line) for line in lines]


def judge(line: bytes, tmp_path: Path) -> None:
    """Assert that a line of a recording is told rightly; `tmp_path` stands in for the job's folder."""
    case = msgspec.json.decode(line.replace(JOB.encode(), f"{tmp_path}/".encode()), type=Recorded)
    for name, source in case.sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
        os.utime(tmp_path / name, (0, 0))  # older than the processes that ran it
    samples = [
        Sample(
            t=look[0].t if look else 0.0,
            ranks=tuple(look),
            expected=frozenset(case.expected),
            timeout_s=case.timeout_s,
        )
        for look in case.samples
    ]
    samples[-1] = replace(samples[-1], flight=tuple(case.flight), launchers=tuple(case.launchers))
    verdict = diagnose(samples).verdict
    named = {culprit.rank for culprit in verdict.culprits}
    assert verdict.kind in case.kinds.split(), verdict
    if case.hangs:
        assert set(case.culprits) <= named <= {*case.culprits, *case.also}, verdict
    else:
        assert not named, verdict
    assert bool(named) != (Kind(verdict.kind) in NO_CULPRIT), verdict
    gone = {Kind.DEAD_RANK, Kind.RENDEZVOUS}  # whose rank has no line any more, or none yet
    for culprit in verdict.culprits:
        if case.lines and culprit.rank in case.culprits and verdict.kind not in gone:
            shown = re.findall(r"(\w+\.py):(\d+)", culprit.frame)
            texts = [
                source.splitlines()[int(number) - 1]
                for file, number in shown
                for name, source in case.sources.items()
                if Path(name).name == file
            ]
            assert any(wanted in text for text in texts for wanted in case.lines), verdict
