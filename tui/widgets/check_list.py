"""The checks before a launch: errors first, each with its fix."""

from __future__ import annotations

import textwrap
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

CheckRow = tuple[Finding, int, str, bool]  # the finding, its line's number, the text there, whether a fix


INDENT = 5  # the mark, the arrow, and a cell for the scroll bar


class CheckList(Grid):
    """What is wrong, and below it what to do, each wrapped to the width."""

    HELP = (
        "✗ cannot work, ▲ works and costs, · worth knowing; below each stands its fix.\n"
        "enter  makes a fix that is led by an arrow; f makes the first of them"
    )
    HINTS = "↑↓ finding  enter fix"
    HEADER = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.findings: tuple[Finding, ...] = ()
        self.border_title = "Checks"

    def fixable(self) -> Finding | None:
        """The worst finding whose fix can be made."""
        return next((finding for finding in self.findings if finding.change), None)

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
        self.findings = tuple(findings)
        self._wrap()

    def _wrap(self) -> None:
        room = max(16, self.size.width - INDENT)
        rows: list[CheckRow] = []
        for finding in self.findings:
            text = [(line, False) for line in textwrap.wrap(fmt.clean(finding.text), room)]
            text += [(line, True) for line in textwrap.wrap(f"fix: {fmt.clean(finding.fix)}", room)]
            rows += [(finding, number, line, is_fix) for number, (line, is_fix) in enumerate(text)]
        self.set_items(rows)

    def on_resize(self) -> None:
        super().on_resize()
        self._wrap()

    def columns(self) -> Sequence[Column]:
        return [Column("text", "", 10, grow=True)]

    def identity(self, item: CheckRow) -> Hashable:
        finding, number, _, _ = item
        return finding.code, finding.where, number

    def cells(self, item: CheckRow, columns: Sequence[Column]) -> Line:
        finding, number, text, is_fix = item
        symbol, style = LOOK[finding.severity]
        if not is_fix:
            return ((f"{' ' if number else symbol}   {text}", style),)
        mark, look = (theme.GLYPHS.arrow[-1], theme.ACCENT) if finding.change else (" ", theme.DIM)
        return ((f"  {mark if text.startswith('fix: ') else ' '} {text}", look),)
