"""Hang patterns met in the field, as recorded dumps in every style."""

from __future__ import annotations

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.kinds import NO_CULPRIT
from ftdash.monitor.diagnosis.stacks import read_stacks
from tests.diagnosis import table


@pytest.mark.parametrize("style", table.STYLES)
@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.name)
def test_pattern_is_named_in_every_style(row, style, tmp_path):
    table.write(tmp_path, row, style)
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert {culprit.rank for culprit in verdict.culprits} == row.culprits, verdict.reason
    assert str(verdict.kind) in row.kinds, verdict.reason
    assert bool(verdict.culprits) == (verdict.kind not in NO_CULPRIT)
    assert row.fix in verdict.fix
    for culprit in verdict.culprits:
        assert row.frame in culprit.frame
        assert not culprit.frame or culprit.host == f"node{culprit.rank // 8:02}"


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.name)
def test_pattern_is_named_when_all_ranks_are_in_one_file(row, tmp_path):
    table.write_one_file(tmp_path, row)
    verdict = diagnose(read_stacks(tmp_path)).verdict
    assert {culprit.rank for culprit in verdict.culprits} == row.culprits, verdict.reason
    assert str(verdict.kind) in row.kinds
