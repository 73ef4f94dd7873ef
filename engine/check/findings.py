"""What a check reports: a named finding with its severity, where it was seen, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ftdash.engine.configs.remedies import Change

__all__ = ["Change", "Finding", "Severity", "error", "note", "warning"]


class Severity(StrEnum):
    """Error: it cannot work or loses work. Warning: it works and costs. Note: worth knowing here."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def order(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`where` is file:line or a flag; `text` says what is wrong with the evidence; `fix` what to change.

    `change` is that fix as field values, where it can be made without asking; empty otherwise.
    """

    code: str
    severity: Severity
    where: str
    text: str
    fix: str
    change: Change = ()

    def to_dict(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("code", "severity", "where", "text", "fix")}


def error(code: str, where: str, text: str, fix: str, change: Change = ()) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, where=where, text=text, fix=fix, change=change)


def warning(code: str, where: str, text: str, fix: str, change: Change = ()) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, where=where, text=text, fix=fix, change=change)


def note(code: str, where: str, text: str, fix: str, change: Change = ()) -> Finding:
    return Finding(code=code, severity=Severity.NOTE, where=where, text=text, fix=fix, change=change)
