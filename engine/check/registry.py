"""The list of checks: each a small function from what the files say to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import read_document
from ftdash.engine.check.findings import Finding

Check = Callable[[Bundle], Iterator[Finding]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a check."""
    CHECKS.append(function)
    return function


def load_rules() -> None:
    """Import every module of checks, once."""
    from ftdash.engine.check import (  # noqa: F401
        rules_accelerate,
        rules_adapters,
        rules_axolotl,
        rules_batch,
        rules_deepspeed,
        rules_environment,
        rules_fsdp,
        rules_host,
        rules_launch,
        rules_loops,
        rules_machine,
        rules_model,
        rules_onerank,
        rules_plan,
        rules_script,
        rules_slurm,
        rules_torchtitan,
        rules_trainer,
        rules_values,
        rules_versions,
    )


def check_bundle(bundle: Bundle) -> list[Finding]:
    """All findings, worst first, each said once."""
    load_rules()
    found: dict[tuple[str, str], Finding] = {}
    for function in CHECKS:
        for finding in function(bundle):
            found.setdefault((finding.code, finding.where), finding)
    return sorted(found.values(), key=lambda finding: (finding.severity.order, finding.where, finding.code))


def check_files(paths: list[str | Path]) -> list[Finding]:
    """Read the files, follow what they name, and check them together. Raises DocumentError in one line."""
    return check_bundle(Bundle([read_document(Path(path)) for path in paths]))
