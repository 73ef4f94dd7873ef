"""Whether a rank computes without an end: in a loop that only tries again, far beyond what its steps take.

Work and an endless loop look alike: both burn a core. What tells them apart is the run's own pace, and a loop
in which no turn builds on an earlier one. Without the run's telemetry nobody is suspected of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import lru_cache

from ftdash.monitor.diagnosis import frames, source
from ftdash.monitor.diagnosis.model import Beat, Frame, RankEvidence, Thread
from ftdash.monitor.diagnosis.motion import Motion

# A rank without progress for 10 of its median steps has stalled (ftdash.monitor.liveness); twice that, and
# more than any pause that it made before, is no hiccup of data or logging.
_TIMES_USUAL = 20
_TIMES_LONGEST = 3
_FLOOR_S = 10.0

_ENDLESS_ITERATORS = frozenset({"count", "cycle", "repeat"})
_TRAINS = frozenset({"backward", "step", "zero_grad"})
_REGEX = re.compile(r"\bre\.\w+\(|(?:pattern|regex|_re|\bre_\w+|_rx|\bRE_?\w*|_RE)\.(?:\w+)\(", re.I)
_REGEX_MODULE = re.compile(r"(?:^|/)re(?:/__init__)?\.py$")
_HELPERS_BELOW = 3  # own functions that a turn of the loop may be in


def beyond_its_pace(evidence: RankEvidence) -> bool:
    """Whether the rank's last sign of progress is longer ago than its own steps can explain."""
    beat = evidence.beat
    if beat is None or not beat.usual_s or beat.t <= 0:
        return False
    return evidence.t - beat.t > max(_FLOOR_S, _TIMES_USUAL * beat.usual_s, _TIMES_LONGEST * beat.longest_s)


def words(evidence: RankEvidence) -> str:
    """How long the rank has been at it, and what its steps took."""
    beat = evidence.beat or Beat()
    return (
        f"it has computed for {evidence.t - beat.t:.0f} s where its steps took {_seconds(beat.usual_s)} s: "
        "an endless loop, or very slow work"
    )


def _seconds(value: float) -> str:
    return f"{value:.1g}" if value < 1 else f"{value:.0f}"


def computes_in_vain(before: Sequence[Thread], after: Sequence[Thread], motion: Motion) -> bool:
    """Whether a process was busy at one place that only tries again, at both looks."""
    return motion.counted and motion.busy and not motion.transfers and tries_for_ever(before, after)


def tries_for_ever(before: Sequence[Thread], after: Sequence[Thread]) -> bool:
    """Whether the main thread was at both looks in one loop that only tries again, or one search of text."""
    first, second = frames.read_threads(before), frames.read_threads(after)
    if first.own is None or second.own is None or first.in_collective or second.in_collective:
        return False
    if first.own == second.own and _searches_text(before, after, second):
        return True
    return bool(_loops_around(first) & _loops_around(second))


def _loops_around(reading: frames.Reading) -> frozenset[tuple[str, int]]:
    """File and line of the loops that only try again around the user's innermost lines, within one step."""
    found = set()
    for frame in (reading.own, *reading.callers[:_HELPERS_BELOW]):
        if frame is None:
            break
        if loop := _loop_of(frame):
            found.add(loop)
        if source.calls(frame) & _TRAINS:
            break
    return frozenset(found)


def _searches_text(before: Sequence[Thread], after: Sequence[Thread], reading: frames.Reading) -> bool:
    """A regular expression that backtracks holds the interpreter all the time, at one line."""
    for threads in (before, after):
        main = frames.main_thread(threads)
        if main is None or not main.owns_gil:
            return False
    if reading.blocked_by is not None:
        return bool(_REGEX_MODULE.search(reading.blocked_by.file))
    return reading.telling == reading.own and bool(_REGEX.search(source.line_text(reading.own)))


@lru_cache(maxsize=4096)
def _loop_of(frame: Frame) -> tuple[str, int] | None:
    """File and line of the loop around a line, where it only tries again."""
    loop = source.innermost_loop(frame)
    return (frame.file, loop.lineno) if loop is not None and _only_tries_again(loop) else None


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
    if calls & (_TRAINS | source.TAKES) or not acts <= source.POLL_CALLS or not (calls - source.POLL_CALLS):
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
