"""What moved between two dumps and what stood still, equal ranks on one line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ftdash.monitor.diagnosis import frames, motion
from ftdash.monitor.diagnosis.model import RankEvidence
from ftdash.tui import format as fmt
from ftdash.tui import theme
from ftdash.tui.widgets.grid import Column, Grid
from ftdash.tui.widgets.lines import Line
from ftdash.tui.widgets.stack import short_path


@dataclass(frozen=True, slots=True)
class Change:
    """Ranks of which the same can be said. `moved` is None for ranks that only one dump shows."""

    ranks: tuple[int, ...]
    moved: bool | None
    place: str
    words: str


def place_of(evidence: RankEvidence) -> str:
    """Where the main thread stands, in a few words: the wait or call, and the user's own line."""
    reading = frames.read_threads(evidence.threads)
    frame = frames.user_frame(reading)
    inner = reading.op or (reading.telling.short if reading.telling is not None else "no stack")
    if frame is None:
        return inner
    line = f"{short_path(frame.file)}:{frame.line}"
    return f"{inner}, {line}" if inner != frame.short else f"{frame.short}, {line}"


def compare(before: Mapping[int, RankEvidence], after: Mapping[int, RankEvidence]) -> list[Change]:
    """All ranks of either dump: first those that only one shows, then what moved, then what stood still."""
    found: dict[tuple[bool | None, str, str], list[int]] = {}
    for rank in sorted(before.keys() | after.keys()):
        found.setdefault(_change(before.get(rank), after.get(rank)), []).append(rank)
    changes = [Change(tuple(ranks), moved, place, words) for (moved, place, words), ranks in found.items()]
    order = {None: 0, True: 1, False: 2}
    return sorted(changes, key=lambda change: (order[change.moved], len(change.ranks), change.ranks))


def _change(old: RankEvidence | None, new: RankEvidence | None) -> tuple[bool | None, str, str]:
    if old is None or new is None:
        one = new or old
        assert one is not None
        return None, place_of(one), "only in the later dump" if old is None else "only in the earlier dump"
    measured = motion.measure(old, new)
    if measured.died:
        return True, place_of(old), "its process has ended"
    if old.pid != new.pid and old.pid and new.pid:
        return True, place_of(new), "another process"
    here, there = place_of(old), place_of(new)
    moved = measured.stack_changed or measured.beat_changed
    waits = frames.read_threads(new.threads).in_collective
    if not waits:  # inside a collective a core that is used up, or bytes of a heartbeat, are no progress
        moved = moved or measured.busy or measured.transfers or measured.children_move
    place = there if here == there else f"{here} {theme.GLYPHS.arrow} {there}"
    if not moved:
        return False, place, "stood still, spinning" if measured.busy else "stood still"
    said = ["its stack changed"] * measured.stack_changed
    said += ["its heartbeat advanced"] * measured.beat_changed
    said += ["it computes"] * measured.busy
    said += ["it reads or writes"] * measured.transfers
    said += ["its workers move"] * measured.children_move
    return True, place, ", ".join(said)


class MovedTable(Grid):
    """One line for all ranks of which the same can be said."""

    HELP = (
        "What differs between the last two dumps: stack, heartbeat, time on a core, bytes read and written. "
        "Ranks that stood still wait, ranks that moved work.\n"
        "c  goes back to the groups"
    )
    HINTS = "↑↓ rank  c groups"
    empty = "no two dumps to compare yet: d takes one"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "What moved"

    def show(self, before: Mapping[int, RankEvidence], after: Mapping[int, RankEvidence]) -> None:
        changes = compare(before, after)
        if not changes:
            self.border_title = "What moved"
            self.set_items([])
            return
        both = before.keys() & after.keys()
        still = sum(len(change.ranks) for change in changes if change.moved is False)
        times = [max((one.t for one in dump.values()), default=0.0) for dump in (before, after)]
        span = fmt.duration(times[1] - times[0])
        self.border_title = (
            f"What moved in {span}: {still:,} of {len(both):,} stood still"
            if both
            else "What moved: no rank is in both dumps"
        )
        self.set_items(changes)
        self.invalidate()

    def columns(self) -> Sequence[Column]:
        widest = max((len(fmt.ranks(change.ranks)) for change in self.items), default=6)
        words = max((len(change.words) for change in self.items), default=11)
        return [
            Column("mark", "", 1),
            Column("ranks", "ranks", max(6, min(16, widest))),
            Column("words", "between", max(7, min(34, words))),
            Column("place", "where", 20, grow=True),
        ]

    def identity(self, item: Change) -> Hashable:
        return item.ranks

    def cells(self, item: Change, columns: Sequence[Column]) -> Line:
        glyphs = theme.GLYPHS
        mark, style = {
            None: (glyphs.idle, theme.WARN),
            True: (glyphs.live, theme.OK),
            False: (glyphs.stalled, theme.BAD),
        }[item.moved]
        cells = {
            "mark": (mark, style),
            "ranks": (fmt.ranks(item.ranks), theme.TEXT),
            "words": (item.words, style),
            "place": (fmt.clean(item.place), theme.TEXT),
        }
        return tuple(cells[column.key] for column in columns)
