"""Which of two sides of ranks has gone another way: by majority, else by what the user's source says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from ftdash.monitor.diagnosis import frames, guards, source
from ftdash.monitor.diagnosis.frames import Reading
from ftdash.monitor.diagnosis.knowledge import PHASE_ORDER, Phase
from ftdash.monitor.diagnosis.model import Frame
from ftdash.monitor.diagnosis.views import View


def odd_ones(views: Sequence[View], key: Callable[[View], Hashable]) -> tuple[list[View], bool]:
    """Views whose key differs from the most frequent one; with a tie: all of them, and True."""
    counts = Counter(key(view) for view in views).most_common()
    if len(counts) < 2:
        return [], False
    if counts[0][1] == counts[1][1]:
        return list(views), True
    return [view for view in views if key(view) != counts[0][0]], False


# What tells that only some ranks are sent to a line, the stronger sign first.
_HINTS = (guards.handles_a_signal, source.in_except_block, guards.rank_condition)


def break_tie(views: Sequence[View], key: Callable[[View], Hashable]) -> list[View]:
    """With no majority: the side that only some ranks are sent to, else the one that is behind."""
    sides: dict[Hashable, list[View]] = {}
    for view in views:
        sides.setdefault(key(view), []).append(view)
    groups = list(sides.values())
    for hint in _HINTS:
        marked = [
            group
            for group in groups
            if all(any(map(hint, _apart(view, _other(view, groups)))) for view in group)
        ]
        if len(marked) == 1:
            return marked[0]
    if len(groups) != 2:
        return list(views)
    stacks = [own_stack(group[0].reading) for group in groups]
    if stacks[0] == stacks[1]:
        stacks = [_whole_stack(group[0]) for group in groups]  # what parts them is the library's source
    parted = _first_apart(*stacks)
    if parted is None and (past := _past_the_loop(groups)):
        return past
    if parted is None:
        behind, ahead = groups
    else:
        behind, ahead = groups if parted[0].line < parted[1].line else groups[::-1]
        if behind is groups[1]:
            stacks, parted = stacks[::-1], parted[::-1]
        inside, beyond = (stack[stack.index(line) + 1 :] for stack, line in zip(stacks, parted, strict=True))
        if (
            source.may_be_left(parted[0], parted[1].line)
            or any(map(source.may_be_skipped, inside))
            or any(map(source.in_every_turn, inside))
            or source.only_first_depends(parted[1], parted[0])
        ):
            return ahead
        if source.in_a_loop_before(parted[0], parted[1].line):
            return ahead
        if any(map(source.under_data, beyond)) and not any(map(source.under_data, inside)):
            return ahead
        if _left_backward(behind[0], ahead[0]) and not source.only_first_depends(parted[0], parted[1]):
            return ahead
    phases = [_phase_number(group[0]) for group in groups]
    if parted is None and phases[0] != phases[1]:
        return groups[0] if phases[0] < phases[1] else groups[1]
    return behind if parted is not None else list(views)


def _left_backward(view: View, other: View) -> bool:
    """Whether one is in a collective of its backward and the other past it: its graph held no such call."""
    steps = (view.reading.step, other.reading.step)
    return steps[0] is Phase.BACKWARD and steps[1] is not Phase.BACKWARD


def singled_out(odd: list[View], views: Sequence[View], key: Callable[[View], Hashable]) -> list[View]:
    """Of ranks that differ in several ways, those whose line only some are sent to; all where none is.

    One that stands with the majority and came there by such a line of its own, before the odd ones', has
    skipped what they wait in: it is named instead.
    """
    rest = [view for view in views if view not in odd]
    if sent := _sent_there(odd, rest[0]):
        return sent if len({key(view) for view in odd}) > 1 else odd
    ways = Counter(tuple(own_stack(view.reading)) for view in rest).most_common(2)
    if len(ways) < 2 or ways[0][1] == ways[1][1]:
        return odd
    usual = next(view for view in rest if tuple(own_stack(view.reading)) == ways[0][0])
    before = [view for view in rest if all(_stands_before(view, other) for other in odd)]
    return _sent_there(before, usual) or [v for v in before if _by_its_data(v, [usual, *odd])] or odd


def _sent_there(views: Sequence[View], usual: View) -> list[View]:
    """The ranks that an except block, else a rank condition, has sent another way than the usual one."""
    for hint in _HINTS:
        if sent := [view for view in views if any(map(hint, _apart(view, usual)))]:
            return sent
    return []


def _by_its_data(view: View, others: Sequence[View]) -> bool:
    """Whether a condition on more than the step has led a rank to where none of the others stands."""
    parted = [where_they_part(view.reading, other.reading) for other in others]
    return all(lines is not None and source.depends_on_data(*lines) for lines in parted)


def _stands_before(view: View, other: View) -> bool:
    """Whether a rank is at an earlier line than another one where the two part."""
    parted = where_they_part(view.reading, other.reading)
    return parted is not None and parted[0].line < parted[1].line


def own_stack(reading: Reading) -> list[Frame]:
    """The user's own lines, outermost first."""
    return [*reversed(reading.callers), *([reading.own] if reading.own else [])]


def where_they_part(one: Reading, two: Reading) -> tuple[Frame, Frame] | None:
    """The outermost function of the user's in which two ranks stand at different lines; each one's line."""
    return _first_apart(own_stack(one), own_stack(two))


def _first_apart(one: Sequence[Frame], two: Sequence[Frame]) -> tuple[Frame, Frame] | None:
    for first, second in zip(one, two, strict=False):
        if (first.name, first.file) != (second.name, second.file):
            return None
        if first.line != second.line:
            return first, second
    return None


def _whole_stack(view: View) -> list[Frame]:
    """The lines of the user and of the libraries, outermost first."""
    main = frames.main_thread(view.evidence.threads)
    kept = main.frames if main is not None else ()
    return [frame for frame in reversed(kept) if frames.origin(frame) is not frames.Origin.NATIVE]


def _past_the_loop(groups: Sequence[list[View]]) -> list[View]:
    """Of two sides in functions that one line calls, the one in no loop: it had fewer turns."""
    stacks = [own_stack(group[0].reading) for group in groups]
    below = [
        next((stack[n] for n, f in enumerate(stack) if f not in other), None)
        for stack, other in zip(stacks, reversed(stacks), strict=True)
    ]
    shared = bool(set(stacks[0]) & set(stacks[1]))
    if not shared or any(frame is None for frame in below):
        return []
    free = [
        group for group, frame in zip(groups, below, strict=True) if frame and not source.in_a_loop(frame)
    ]
    return free[0] if len(free) == 1 else []


def _other(view: View, groups: Sequence[list[View]]) -> View:
    """A rank of another side."""
    return next(group[0] for group in groups if view not in group)


def _apart(view: View, other: View) -> list[Frame]:
    """The user's lines of a rank from where it parts with another one; its innermost if they share none."""
    stack = own_stack(view.reading)
    parted = where_they_part(view.reading, other.reading)
    return stack[stack.index(parted[0]) :] if parted else stack[-1:]


def _phase_number(view: View) -> int:
    return PHASE_ORDER[view.reading.phase]
