"""A diagnosis as text for a terminal, and as Markdown for an issue."""

from __future__ import annotations

from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Diagnosis, Group
from ftdash.monitor.diagnosis.words import rank_list

_SHOWN_FRAMES = 6


def _headline(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    sure = f" ({verdict.confidence:.0%} sure)" if verdict.confidence else ""
    if verdict.culprits:
        return f"{verdict.kind}: rank {rank_list(c.rank for c in verdict.culprits)}{sure}"
    titles = {
        Kind.SLOW: "slow, not stuck",
        Kind.HEALTHY: "healthy: nobody is stuck",
        Kind.ALL_OUTSIDE: "nobody differs: all wait outside of any collective",
        Kind.NETWORK: "nobody differs: network or hardware",
        Kind.NO_EVIDENCE: "no evidence",
        Kind.FROM_OUTSIDE: "ended from outside: no rank failed",
    }
    return f"{titles.get(Kind(verdict.kind), verdict.kind)}{sure}"


def _group_title(group: Group) -> str:
    parts = [f"ranks {rank_list(group.ranks)}"]
    if group.phase:
        parts.append(group.phase)
    if group.collective:
        parts.append(f"in {group.collective}")
    return ", ".join(parts)


def as_text(diagnosis: Diagnosis) -> str:
    """Plain lines, without colour or markup."""
    verdict = diagnosis.verdict
    lines = [_headline(diagnosis), f"  {verdict.reason}" if verdict.reason else ""]
    for culprit in verdict.culprits:
        where = f" on {culprit.host}" if culprit.host else ""
        pid = f", pid {culprit.pid}" if culprit.pid else ""
        lines.append(f"  rank {culprit.rank}{where}{pid}: {culprit.why}")
        if culprit.frame:
            lines.append(f"    at {culprit.frame}")
    for title, items in (
        ("for", verdict.evidence),
        ("against", verdict.against),
        ("next", verdict.next),
        ("fix", (verdict.fix,) if verdict.fix else ()),
        ("notice", diagnosis.notices),
    ):
        lines += [f"{title}: {item}" for item in items]
    for group in diagnosis.groups:
        lines += ["", _group_title(group)]
        lines += [f"    {frame}" for frame in group.frames[:_SHOWN_FRAMES]]
    return "\n".join(_shown(line) for position, line in enumerate(lines) if line or position > 1) + "\n"


def _shown(text: str) -> str:
    """A line without what a terminal would obey: text of logs may hold escape sequences."""
    return "".join(sign if sign.isprintable() else "�" for sign in text.expandtabs())


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def as_markdown(diagnosis: Diagnosis) -> str:
    """A report to paste into an issue."""
    verdict = diagnosis.verdict
    lines = [f"### {_headline(diagnosis)}", "", verdict.reason, ""]
    if verdict.culprits:
        lines += ["| rank | host | pid | frame | why |", "|---|---|---|---|---|"]
        for c in verdict.culprits:
            cells = (str(c.rank), c.host, str(c.pid or ""), _code(c.frame) if c.frame else "", c.why)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    for title, items in (
        ("Evidence", verdict.evidence),
        ("Against", verdict.against),
        ("Next", verdict.next),
    ):
        if items:
            lines += [f"**{title}**", "", *(f"- {item}" for item in items), ""]
    if verdict.fix:
        lines += [f"**Fix**: {verdict.fix}", ""]
    for group in diagnosis.groups:
        lines += [
            f"<details><summary>{_group_title(group)}</summary>",
            "",
            "```",
            *group.frames,
            "```",
            "",
            "</details>",
            "",
        ]
    return "\n".join(map(_shown, "\n".join(lines).rstrip().splitlines())) + "\n"
