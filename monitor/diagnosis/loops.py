"""What one turn of a loop in the user's source does for the loop's end: nothing, or perhaps nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ftdash.monitor.diagnosis import source
from ftdash.monitor.diagnosis.model import Frame

TRAINS = frozenset({"backward", "step", "zero_grad"})
_ENDLESS_ITERATORS = frozenset({"count", "cycle", "repeat"})
_OTHER_WORK = ("train", "eval", "valid", "save", "generate", "write", "send", "put", "submit")


@lru_cache(maxsize=4096)
def that_only_try_again(frame: Frame) -> tuple[str, int] | None:
    """File and line of the innermost loop around a line, where it only tries again."""
    loop = source.innermost_loop(frame)
    return (frame.file, loop.lineno) if loop is not None and _only_tries_again(loop) else None


@lru_cache(maxsize=4096)
def that_may_stand_still(frame: Frame) -> tuple[str, int] | None:
    """File and line of the outermost loop around a line that may turn without coming nearer to its end."""
    path = source.around(frame)
    effects = [
        node.value for node, _ in path if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    for node, field in path:
        if isinstance(node, ast.While) and field == "body" and _may_stand_still(node):
            # In a call for its effect, which may well take its time, unless it is the loop's own gathering.
            asked = _asked_by(node)
            return (frame.file, node.lineno) if all(_touches(call, asked) for call in effects) else None
    return None


def _only_tries_again(loop: source.Loop) -> bool:
    """Whether no turn of the loop builds on an earlier one: luck alone ends it.

    Nothing is counted towards the end, kept, handed on or written; a count of the tries is none of it.
    """
    if isinstance(loop, ast.AsyncFor) or (isinstance(loop, ast.For) and not _never_ends(loop.iter)):
        return False
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Delete) for node in nodes):
        return False
    kept = [node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript)]
    if any(isinstance(node.ctx, ast.Store) for node in kept):
        return False
    calls = {source.called_name(node) for node in nodes if isinstance(node, ast.Call)}
    acts = {
        source.called_name(n.value)
        for n in nodes
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
    }
    if calls & (TRAINS | source.TAKES) or not acts <= source.POLL_CALLS or not (calls - source.POLL_CALLS):
        return False
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return not any(_carried(name, loop, nodes) for name in stored)


def _never_ends(iterated: ast.expr) -> bool:
    """Whether a `for` goes through an iterator of itertools that has no end."""
    return isinstance(iterated, ast.Call) and source.called_name(iterated) in _ENDLESS_ITERATORS


def _carried(name: str, loop: source.Loop, nodes: Sequence[ast.AST]) -> bool:
    """Whether a turn reads what an earlier one has left in a name. A count that nothing reads is not read."""
    used = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    read = [node.lineno for node in used if isinstance(node.ctx, ast.Load)]
    if any(isinstance(node, ast.AugAssign) and node.target in used for node in nodes):
        asked = ast.walk(loop.test) if isinstance(loop, ast.While) else ()
        return bool(read) or any(isinstance(node, ast.Name) and node.id == name for node in asked)
    simple = [node for node in nodes if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    stores = {node for node in used if isinstance(node.ctx, ast.Store)}
    # The statement that first sets it: what it reads there, or before, an earlier turn has left.
    ends = [node.end_lineno or 0 for node in simple if stores & set(ast.walk(node))]
    first = min(ends) if ends else min(node.lineno for node in stores)
    return any(line <= first for line in read)


def _may_stand_still(loop: ast.While) -> bool:
    """Whether a turn can pass without touching what the loop's end depends on, nor doing anything else.

    A packing loop that skips what does not fit: `if n > room: continue` before `room -= n`. So can a
    generator that finds nothing to yield.
    """
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Await | ast.Delete) for node in nodes):
        return False
    calls = {source.called_name(node).lower() for node in nodes if isinstance(node, ast.Call)}
    if calls & (TRAINS | source.TAKES) or any(word in call for call in calls for word in _OTHER_WORK):
        return False
    asked = _asked_by(loop)
    if not any(_touches(node, asked) for node in nodes):
        return False
    return any(_without_a_touch(loop.body, asked))


def _asked_by(loop: ast.While) -> set[str]:
    return {text for test in source.conditions(loop) for text in _named(test)}


def _named(test: ast.expr) -> set[str]:
    """The names and attributes that a condition looks at, without functions and what they belong to."""
    skipped: set[ast.AST] = set()
    found = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            skipped.add(node.func)
            if isinstance(node.func, ast.Attribute):
                found.add(ast.unparse(node.func.value))
        if isinstance(node, ast.Attribute):
            skipped.add(node.value)
        if isinstance(node, ast.Name | ast.Attribute) and node not in skipped:
            found.add(ast.unparse(node))
    return found - {"self"}


def _touches(node: ast.AST, asked: set[str]) -> bool:
    """Whether a node sets something asked, calls a method of it or hands it on, or yields."""
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return any(ast.unparse(part) in asked for part in (*owner, *node.args))
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node.value) in asked
    set_here = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    return set_here and ast.unparse(node) in asked


class _Ways(NamedTuple):
    """How control can leave some statements without a touch: at their end, by `continue`, by `break`."""

    falls: bool
    continues: bool = False
    breaks: bool = False


def _without_a_touch(body: Sequence[ast.stmt], asked: set[str]) -> tuple[bool, bool]:
    """Whether a turn can come to its end, or to a `continue`, without touching anything asked."""
    ways = _ways(body, asked)
    return ways.falls, ways.continues


def _ways(body: Sequence[ast.stmt], asked: set[str]) -> _Ways:
    continues = breaks = False
    for statement in body:
        here = _ways_of(statement, asked)
        continues, breaks = continues or here.continues, breaks or here.breaks
        if not here.falls:
            return _Ways(False, continues, breaks)
    return _Ways(True, continues, breaks)


def _ways_of(statement: ast.stmt, asked: set[str]) -> _Ways:
    if isinstance(statement, ast.Continue):
        return _Ways(False, continues=True)
    if isinstance(statement, ast.Break):
        return _Ways(False, breaks=True)
    if isinstance(statement, ast.Return | ast.Raise):
        return _Ways(False)
    if isinstance(statement, ast.If):
        return _either(_ways(statement.body, asked), _ways(statement.orelse, asked))
    if isinstance(statement, ast.Try):
        ways = _ways([*statement.body, *statement.orelse], asked)
        for handler in statement.handlers:
            ways = _either(ways, _ways(handler.body, asked))
        return ways
    if isinstance(statement, ast.With):
        return _ways(statement.body, asked)
    if isinstance(statement, ast.For | ast.While):
        inside = _ways(statement.body, asked)
        return _Ways(any(inside))
    return _Ways(not _does_something(statement, asked))


def _either(one: _Ways, other: _Ways) -> _Ways:
    return _Ways(*(a or b for a, b in zip(one, other, strict=True)))


def _does_something(statement: ast.stmt, asked: set[str]) -> bool:
    """Whether a plain statement touches what is asked, keeps something, or is a call for its effect."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return source.called_name(statement.value) not in source.POLL_CALLS
    if isinstance(statement, ast.Assign) and not all(
        isinstance(target, ast.Name | ast.Tuple) for target in statement.targets
    ):
        return True
    return any(_touches(node, asked) for node in ast.walk(statement))
