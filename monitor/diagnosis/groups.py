"""Process groups that only some ranks have made: afterwards the names of later groups agree no more.

Every rank of the world has to make every group, in the same order, also those that it is no member of
(torch.distributed.new_group). Who made one more than the others stands elsewhere by the time of the
hang: the source tells.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from ftdash.monitor.diagnosis import guards, source
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import GROUP_FUNCTIONS
from ftdash.monitor.diagnosis.model import Frame, Verdict
from ftdash.monitor.diagnosis.ties import own_stack
from ftdash.monitor.diagnosis.views import View
from ftdash.monitor.diagnosis.words import confidence, describe, ranks_of

_MOST_CALLS = 4  # from the line that makes a group up to the condition

_COMPARE: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def made_by_some(views: Sequence[View], two: bool) -> Verdict | None:
    """Ranks stand in making a group, and an earlier group was made under a condition on the rank."""
    making = [view for view in views if view.op == "new_group"]
    if not making:
        return None
    stacks = {frame for view in views for frame in own_stack(view.reading)}
    for place in _calls_before(stacks):
        if any((frame.file, frame.line) == (place.file, place.line) for frame in stacks):
            continue
        at, test, holds = _rank_test_above(place, stacks)
        if test is None:
            continue
        condition = ast.unparse(test)
        makers = [view for view in views if _holds(test, view.rank, at.file) is holds]
        if not makers or len(makers) == len(views):
            continue
        odd = makers if 2 * len(makers) <= len(views) else [view for view in views if view not in makers]
        did = "has made" if odd is makers else "has not made"
        why = f"it {did} the group at {place}, under `{condition}`: every rank has to make every group"
        return Verdict(
            Kind.COLLECTIVE_MISMATCH,
            tuple(replace(view.culprit(why), frame=f"{place}; now in {view.shown_frame}") for view in odd),
            confidence(0.8, views, two=two),
            f"a group is made by some ranks only: rank {ranks_of(makers)} makes one more than the others",
            tuple(describe(view) for view in (odd[0], making[0])),
        )
    return None


def _rank_test_above(place: Frame, stacks: Collection[Frame]) -> tuple[Frame, ast.expr | None, bool]:
    """The condition on a rank around a line, or around the only line that calls its function."""
    for _ in range(_MOST_CALLS):
        test, holds = guards.rank_test(place)
        if test is not None:
            return place, test, holds
        callers = [
            Frame(function.name, file, call.lineno)
            for file in sorted({frame.file for frame in stacks})
            for function in _functions(file)
            for call in _calls_in(function)
            if source.called_name(call) == place.name
        ]
        if len(callers) != 1:
            break
        place = callers[0]
    return place, None, True


def _functions(file: str) -> list[ast.FunctionDef]:
    tree = source.tree(file)
    return [node for node in (ast.walk(tree) if tree else ()) if isinstance(node, ast.FunctionDef)]


def _calls_before(stacks: Collection[Frame]) -> Iterator[Frame]:
    """Where the user's files make groups: in functions that ranks are in, or that these call."""
    functions: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
    for file in sorted({frame.file for frame in stacks}):
        for node in _functions(file):
            functions.setdefault(node.name, []).append((file, node))
    called = {frame.short for frame in stacks}
    reached: set[str] = set()
    while new := called & functions.keys() - reached:
        reached |= new
        bodies = (node for name in new for _, node in functions[name])
        called = {source.called_name(node) for body in bodies for node in _calls_in(body)}
    for name in sorted(reached):
        for file, function in functions[name]:
            for call in filter(_needs_everybody, _calls_in(function)):
                yield Frame(name, file, call.lineno)


def _calls_in(function: ast.FunctionDef) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _needs_everybody(call: ast.Call) -> bool:
    """Whether a call makes a group, and not among its members alone."""
    local = any(word.arg == "use_local_synchronization" for word in call.keywords)
    return source.called_name(call) in GROUP_FUNCTIONS and not local


def _holds(test: ast.expr, rank: int, file: str) -> bool | None:
    """Whether a comparison of the rank with constants holds for one; None where it is anything else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    named = test.comparators[0]
    if isinstance(named, ast.Name):
        named = guards.meant(named.id, file) or named
    try:
        other = ast.literal_eval(named)
    except ValueError:
        return None
    if isinstance(test.ops[0], ast.In | ast.NotIn):
        if not isinstance(other, tuple | list | set):
            return None
        return (rank in other) is isinstance(test.ops[0], ast.In)
    compare = _COMPARE.get(type(test.ops[0]))
    return compare(rank, other) if compare is not None and isinstance(other, int) else None
