"""The verdict in sentences: who, where, why, what to type next; and how sure it is."""

from __future__ import annotations

from rich.style import Style

from ftdash.monitor.diagnosis.model import Diagnosis
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget

CALM = ("healthy", "slow")


def sureness(confidence: float) -> str:
    """A confidence of 0 to 1 as a word."""
    return "high" if confidence >= 0.8 else "fair" if confidence >= 0.5 else "low"


def wrap(text: str, style: Style, width: int, indent: str = "") -> list[Line]:
    """Words broken to `width` cells; lines after the first are indented."""
    lines: list[Line] = []
    current = ""
    for word in fmt.clean(text).split():
        if current and len(current) + 1 + len(word) > width:
            lines.append(((current, style),))
            current = indent + word
        else:
            current = f"{current} {word}" if current else word
    if current:
        lines.append(((current, style),))
    return lines


class VerdictPanel(LineWidget):
    """The sentence first; then evidence, next step and fix."""

    HELP = "The first sentence is the verdict; the stacks below are there for those who doubt it."

    def __init__(self) -> None:
        super().__init__(id="verdict", classes="framed")
        self.border_title = "Verdict"
        self.diagnosis: Diagnosis | None = None
        self.sentence = "d takes the stacks of all ranks and names the one that holds the others up"

    def say(self, sentence: str) -> None:
        """One sentence instead of a verdict."""
        self.diagnosis, self.sentence = None, sentence
        self.border_title = "Verdict"
        self.redraw()

    def show(self, diagnosis: Diagnosis, *, confirmed: bool) -> None:
        self.diagnosis = diagnosis
        verdict = diagnosis.verdict
        title = f"Verdict  {fmt.clean(str(verdict.kind))}  sure: {sureness(verdict.confidence)}"
        self.border_title = title if confirmed else f"{title}  (first look; confirming…)"
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self.diagnosis is None:
            return wrap(self.sentence, theme.DIM, width)
        verdict = self.diagnosis.verdict
        calm = str(verdict.kind) in CALM
        mark = theme.GLYPHS.fits if calm else theme.GLYPHS.no
        lines = wrap(f"{mark} {verdict.reason or verdict.kind}", theme.OK if calm else theme.BAD, width, "  ")
        for culprit in verdict.culprits[:4]:
            where = f" on {culprit.host}" if culprit.host else ""
            words = f"rank {culprit.rank}{where}: {culprit.frame}"
            if culprit.why and culprit.why not in verdict.reason:
                words += f", {culprit.why}"
            lines += wrap(words, theme.BOLD, width, "  ")
        labelled = [("next: ", text, theme.ACCENT) for text in verdict.next[:2]]
        if verdict.fix:
            labelled.append(("fix: ", verdict.fix, theme.ACCENT))
        labelled += [("", text, theme.DIM) for text in verdict.evidence[:3]]
        labelled += [("against: ", text, theme.WARN) for text in verdict.against[:2]]
        labelled += [("", text, theme.DIM) for text in self.diagnosis.notices[:2]]
        for label, text, style in labelled:
            lines += wrap(f"{label}{text}", style, width, "  ")
        return lines
