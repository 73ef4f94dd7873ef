"""The checks before a launch: errors first, each with its fix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rich.style import Style

from ftdash.engine.check.findings import Finding, Severity
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line

LOOK: dict[Severity, tuple[str, Style]] = {
    Severity.ERROR: (theme.GLYPHS.no, theme.BAD),
    Severity.WARNING: (theme.GLYPHS.tight, theme.WARN),
    Severity.NOTE: (theme.GLYPHS.dot, theme.DIM),
}

CheckRow = tuple[Finding, bool]  # the finding, and whether this line shows its fix


class CheckList(Grid):
    """Two lines a finding: what is wrong, and what to do."""

    HELP = "✗ cannot work, ▲ works and costs, · worth knowing. Below each stands its fix."
    HINTS = "↑↓ finding"
    HEADER = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "Checks"

    def show(self, findings: Sequence[Finding], trouble: str = "") -> None:
        """The findings, or why there are none."""
        errors = sum(1 for finding in findings if finding.severity is Severity.ERROR)
        warnings = sum(1 for finding in findings if finding.severity is Severity.WARNING)
        if trouble:
            title = f"Checks {theme.GLYPHS.no} {fmt.clean(trouble)}"
        elif not findings:
            title = f"Checks {theme.GLYPHS.fits} nothing found"
        else:
            mark = theme.GLYPHS.no if errors else theme.GLYPHS.tight if warnings else theme.GLYPHS.fits
            notes = len(findings) - errors - warnings
            counts = [fmt.plural(errors, "error"), fmt.plural(warnings, "warning"), fmt.plural(notes, "note")]
            title = f"Checks {mark} {', '.join(counts)}"
        self.border_title = title
        self.set_items([row for finding in findings for row in ((finding, False), (finding, True))])

    def columns(self) -> Sequence[Column]:
        return [Column("text", "", 10, grow=True)]

    def identity(self, item: CheckRow) -> Hashable:
        finding, is_fix = item
        return finding.code, finding.where, is_fix

    def cells(self, item: CheckRow, columns: Sequence[Column]) -> Line:
        finding, is_fix = item
        symbol, style = LOOK[finding.severity]
        if is_fix:
            return ((f"    fix: {fmt.clean(finding.fix)}", theme.DIM),)
        return ((f"{symbol} {fmt.clean(finding.text)}", style),)
