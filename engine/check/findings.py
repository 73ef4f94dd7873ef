"""What a check reports: a named finding with its severity, where it was seen, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


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
    """`where` is file:line or a flag; `text` says what is wrong with the evidence; `fix` what to change."""

    code: str
    severity: Severity
    where: str
    text: str
    fix: str

    def to_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


def error(code: str, where: str, text: str, fix: str) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, where=where, text=text, fix=fix)


def warning(code: str, where: str, text: str, fix: str) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, where=where, text=text, fix=fix)


def note(code: str, where: str, text: str, fix: str) -> Finding:
    return Finding(code=code, severity=Severity.NOTE, where=where, text=text, fix=fix)
