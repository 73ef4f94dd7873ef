"""The verdict at a glance: one sentence, then who, where, what to type, the fix; and how sure it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual.binding import Binding
from textual.geometry import Size

from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Culprit, Diagnosis, Verdict
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.lines import Line, LineWidget

CALM = (Kind.HEALTHY, Kind.SLOW)
UNKNOWING = (Kind.NO_EVIDENCE, Kind.ALL_OUTSIDE, Kind.NETWORK)
LABEL = 10  # cells of the left column
ROOMY = 100  # columns from which the title has room for words
LONGEST_SENTENCE = 3  # lines of the first sentence, unless all evidence is shown
MOST_PLACES = 3  # different places of culprits that are named one by one


@dataclass(frozen=True, slots=True)
class Fact:
    """One labelled line of the panel."""

    label: str
    text: str
    style: Style


def sureness(confidence: float) -> str:
    """A confidence of 0 to 1 as a word."""
    return "high" if confidence >= 0.8 else "fair" if confidence >= 0.5 else "low"


def wrap(text: str, style: Style, width: int, indent: str = "") -> list[Line]:
    """Words broken to `width` cells; lines after the first are indented."""
    lines: list[Line] = []
    current = ""
    for word in fmt.clean(text).split():
        if current and cell_len(current) + 1 + cell_len(word) > width:
            lines.append(((current, style),))
            current = indent + word
        else:
            current = f"{current} {word}" if current else word
        while cell_len(current) > width > len(indent) + 1:  # a path without blanks
            lines.append(((current[:width], style),))
            current = indent + current[width:]
    if current:
        lines.append(((current, style),))
    return lines


def place(culprits: Sequence[Culprit]) -> str:
    """Ranks, hosts and, of a single one, the pid."""
    ranks = fmt.ranks(culprit.rank for culprit in culprits)
    parts = [f"rank {ranks}" if len(culprits) == 1 else f"ranks {ranks}"]
    hosts = sorted({culprit.host for culprit in culprits if culprit.host})
    if hosts:
        parts.append(", ".join(hosts) if len(hosts) <= MOST_PLACES else f"{len(hosts)} hosts")
    if len(culprits) == 1 and culprits[0].pid:
        parts.append(f"pid {culprits[0].pid}")
    return f"  {theme.GLYPHS.dot}  ".join(parts)


def facts_of(verdict: Verdict, code: Mapping[int, str], *, alive: bool = True) -> list[Fact]:
    """What the panel says below its first sentence, most useful first. `code` are source lines by rank.

    Once the run has ended (`alive` False) no command is named that looks at a process of it.
    """
    folded: dict[tuple[str, str], list[Culprit]] = {}
    for culprit in verdict.culprits:
        folded.setdefault((culprit.frame, culprit.why), []).append(culprit)
    facts: list[Fact] = []
    for (frame, why), culprits in list(folded.items())[:MOST_PLACES]:
        facts.append(Fact("who", place(culprits), theme.BOLD))
        if frame:
            facts.append(Fact("where", frame, theme.BOLD))
        if text := code.get(culprits[0].rank, ""):
            facts.append(Fact("", text, theme.WARN))
        if why and why.casefold() not in verdict.reason.casefold() and not _same_words(why, verdict.reason):
            facts.append(Fact("why", why, theme.TEXT))
    if len(folded) > MOST_PLACES:
        facts.append(Fact("", f"and {len(folded) - MOST_PLACES} more places: see the groups", theme.DIM))
    pids = {str(culprit.pid) for culprit in verdict.culprits if culprit.pid}
    commands = [text for text in verdict.next if alive or pids.isdisjoint(text.split())]
    facts += labelled("type", commands, theme.ACCENT_BOLD)
    facts += labelled("fix", [verdict.fix] if verdict.fix else [], theme.OK)
    facts += labelled("against", verdict.against, theme.WARN)
    return facts + labelled("for", [text for text in verdict.evidence if text != verdict.reason], theme.DIM)


def labelled(label: str, texts: Sequence[str], style: Style) -> list[Fact]:
    """Several sentences under one label."""
    return [Fact("" if index else label, text, style) for index, text in enumerate(texts)]


def _same_words(short: str, sentence: str) -> bool:
    """Whether a reason only repeats the sentence: "it is outside of any collective"."""
    words = [word for word in short.casefold().split() if word not in ("it", "is", "its")]
    return all(word in sentence.casefold() for word in words)


class VerdictPanel(LineWidget):
    """The sentence first; then who, where, what to type; e shows everything."""

    HELP = (
        "The first sentence is the verdict; the stacks below are there for those who doubt it.\n"
        "e  shows all evidence, or the stacks again"
    )
    HINTS = "↑↓ scroll  e stacks"

    BINDINGS: ClassVar = [
        Binding("up", "scroll_lines(-1)", "Up", show=False),
        Binding("down", "scroll_lines(1)", "Down", show=False),
        Binding("pageup", "scroll_lines(-10)", "Page up", show=False),
        Binding("pagedown", "scroll_lines(10)", "Page down", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="verdict", classes="framed")
        self.border_title = "Verdict"
        self.diagnosis: Diagnosis | None = None
        self.sentence = "d takes the stacks of all ranks and names the one that holds the others up"
        self._facts: list[Fact] = []
        self.whole = False
        self.top = 0  # first line shown

    def say(self, sentence: str) -> None:
        """One sentence instead of a verdict."""
        self.diagnosis, self.sentence = None, sentence
        self._facts = []
        self.border_title, self.border_subtitle = "Verdict", ""
        self._drawn_anew()

    def show(
        self,
        diagnosis: Diagnosis,
        *,
        confirmed: bool,
        kept_at: float = 0.0,
        alive: bool = True,
        code: Mapping[int, str] | None = None,
        warnings: Iterable[Fact] = (),
    ) -> None:
        """`kept_at`: when an agent took the evidence by itself (UTC seconds), 0 when a person asked for it.

        `warnings` stand right below what to type: ranks that could not be looked at, and the remedy.
        """
        self.diagnosis = diagnosis
        verdict = diagnosis.verdict
        facts = facts_of(verdict, code or {}, alive=alive)
        cut = next((i for i, fact in enumerate(facts) if fact.label in ("against", "for")), len(facts))
        notices = labelled("note", diagnosis.notices, theme.DIM)
        self._facts = [*facts[:cut], *warnings, *facts[cut:], *notices]
        dot = f" {theme.GLYPHS.dot} "
        title = f"Verdict{dot}{verdict.kind}"
        if verdict.confidence:
            sure = f"{verdict.confidence:.0%}"
            roomy = self.size.width >= ROOMY
            title += f"{dot}sure: {sureness(verdict.confidence)}, {sure}" if roomy else f"{dot}{sure} sure"
        if kept_at:
            title += f"{dot}taken by itself {time.strftime('%H:%M:%S', time.localtime(kept_at))}"
        if not confirmed:
            title += f"{dot}first look, confirming{theme.GLYPHS.ellipsis}"
        self.border_title = title
        self._drawn_anew()

    def looking(self) -> None:
        """A new look is under way; the verdict there is stays readable meanwhile."""
        if self.diagnosis is None:
            self.say("taking the stacks of all ranks…")
        else:
            self.border_title = f"Verdict {theme.GLYPHS.dot} looking again{theme.GLYPHS.ellipsis}"

    def show_whole(self, whole: bool) -> None:
        """All of it, the first sentence uncut, to be scrolled; or what has room beside the stacks."""
        self.whole = self.can_focus = whole
        self._drawn_anew()

    def action_scroll_lines(self, by: int) -> None:
        most = max(0, len(self._all_lines(self.size.width)) - self.size.height)
        self.top = max(0, min(self.top + by, most))
        self._count_hidden()
        self.redraw()

    def _drawn_anew(self) -> None:
        self.top = 0
        self.refresh(layout=True)
        self._drawn_for = None
        self.call_after_refresh(self._count_hidden)

    def on_resize(self) -> None:
        self._count_hidden()

    def _count_hidden(self) -> None:
        """Say in the lower border how many lines have no room."""
        below = len(self._all_lines(self.size.width)) - self.size.height - self.top
        says = (
            f"{fmt.plural(below, 'more line')} below"
            if self.whole
            else f"e shows {fmt.plural(below, 'more line')}"
        )
        self.border_subtitle = says if below > 0 and self.size.height else ""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as there are to say; the stylesheet bounds them."""
        return max(2, len(self._all_lines(width)))

    def draw(self, width: int, height: int) -> list[Line]:
        return self._all_lines(width)[self.top :]

    def _all_lines(self, width: int) -> list[Line]:
        if self.diagnosis is None:
            return wrap(self.sentence, theme.DIM, width)
        verdict, glyphs = self.diagnosis.verdict, theme.GLYPHS
        if verdict.kind in CALM:
            mark, style = glyphs.fits, theme.OK
        elif verdict.kind in UNKNOWING:
            mark, style = glyphs.tight, theme.WARN
        else:
            mark, style = glyphs.no, theme.BAD
        lines = wrap(f"{mark} {verdict.reason or verdict.kind}", style, width, "  ")
        if len(lines) > LONGEST_SENTENCE and not self.whole:
            cut = lines[LONGEST_SENTENCE - 1][0][0]
            lines = [*lines[: LONGEST_SENTENCE - 1], ((cut[: width - 2] + glyphs.ellipsis, style),)]
        for fact in self._facts:
            label = (f"  {fact.label:<{LABEL - 2}}", theme.DIM)
            wrapped = wrap(fact.text, fact.style, max(10, width - LABEL))
            for index, line in enumerate(wrapped):
                lines.append((label if not index else (" " * LABEL, theme.DIM), *line))
        return lines
