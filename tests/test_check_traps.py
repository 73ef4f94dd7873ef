"""Every trap is found where it is, and not found where it is mended."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ftdash.engine import check
from ftdash.engine.check.findings import Severity
from tests.support import traps_in_configs, traps_in_files, traps_in_runs, traps_in_training
from tests.support.check import FOUR_BIT, codes, fsdp1, fsdp2, script

CASES = {**traps_in_configs.CASES, **traps_in_files.CASES, **traps_in_runs.CASES, **traps_in_training.CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_trap_is_found_and_its_mended_form_is_not(case, tmp_path):
    code = case.split("#")[0]
    trap, mended = CASES[case]
    assert code in codes(tmp_path / "trap", trap)
    assert code not in codes(tmp_path / "mended", mended)


@pytest.mark.parametrize(
    ("config", "severity"), [(fsdp1(), Severity.ERROR), (fsdp2(), Severity.WARNING)], ids=["fsdp1", "fsdp2"]
)
def test_uint8_storage_stops_fsdp1_and_is_left_whole_by_fsdp2(config, severity, tmp_path):
    files = {
        "a.yaml": config,
        "t.py": script(load=FOUR_BIT.format(storage="torch.uint8", dtype="torch.bfloat16")),
    }
    assert codes(tmp_path / "x", files)["quant-storage"] is severity


def test_every_code_that_a_rule_reports_has_a_case():
    """Findings of this machine and of files on disk are tested in files of their own."""
    elsewhere = {
        "checkpoint-world-size",
        "resume-missing",
        "checkpoint-incomplete",
        "port-taken",
        "host-memory",
        "disk-space",
        "locked-memory",
        "file-not-found",
        "file-broken",
    }
    tested = {case.split("#")[0] for case in CASES}
    assert _reported() - tested - elsewhere == set()


def _reported() -> set[str]:
    """The codes that stand as first argument of a finding in the rules."""
    found = set()
    for path in Path(check.__file__).parent.glob("rules_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                if name in ("error", "warning", "note", "report") or isinstance(node.func, ast.IfExp):
                    found.add(node.args[0].value)
    return found
