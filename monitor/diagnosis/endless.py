"""Whether a rank computes without an end: in a loop that only tries again, far beyond what its steps take.

Work and an endless loop look alike: both burn a core. What tells them apart is the run's own pace, and a loop
in which no turn builds on an earlier one. Without the run's telemetry nobody is suspected of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ftdash.monitor.diagnosis import frames, loops, source
from ftdash.monitor.diagnosis.model import Beat, ProcessEvidence, RankEvidence, Thread
from ftdash.monitor.diagnosis.motion import Motion

# A rank without progress for 10 of its median steps has stalled (ftdash.monitor.liveness); twice that, and
# more than any pause that it made before, is no hiccup of data or logging.
_TIMES_USUAL = 20
_TIMES_LONGEST = 3
_FLOOR_S = 10.0
DOUBTFUL_S = 25.0  # where what the rank does could be work of its own kind
_GROWTH_BYTES = 1 << 20

_REGEX = re.compile(r"\bre\.\w+\(|(?:pattern|regex|_re|\bre_\w+|_rx|\bRE_?\w*|_RE)\.(?:\w+)\(", re.I)
_REGEX_MODULE = re.compile(r"(?:^|/)re(?:/__init__)?\.py$")
_HELPERS_BELOW = 3  # own functions that a turn of the loop may be in


def beyond_its_pace(evidence: RankEvidence, at_least_s: float = _FLOOR_S) -> bool:
    """Whether the rank's last sign of progress is longer ago than its own steps can explain."""
    beat = evidence.beat
    if beat is None or not beat.usual_s or beat.t <= 0:
        return False
    explained_s = max(at_least_s, _TIMES_USUAL * beat.usual_s, _TIMES_LONGEST * beat.longest_s)
    return evidence.t - beat.t > explained_s


def words(evidence: RankEvidence) -> str:
    """How long the rank has been at it, and what its steps took."""
    return f"it has computed for {late_words(evidence)}: an endless loop, or very slow work"


def late_words(evidence: RankEvidence) -> str:
    beat = evidence.beat or Beat()
    return f"{evidence.t - beat.t:.0f} s where its steps took {_seconds(beat.usual_s)} s"


def _seconds(value: float) -> str:
    return f"{value:.1g}" if value < 1 else f"{value:.0f}"


def computes_in_vain(before: Sequence[Thread], after: Sequence[Thread], motion: Motion) -> bool:
    """Whether a process was busy at one place that only tries again, at both looks."""
    return motion.counted and motion.busy and not motion.transfers and tries_for_ever(before, after)


def stands_still(before: Sequence[Thread], after: Sequence[Thread], motion: Motion) -> bool:
    """Whether a process was busy at both looks in one loop that may turn without coming nearer to its end.

    A buffer that is filled grows, and a file that is read moves bytes: neither stands still.
    """
    if not (motion.counted and motion.busy) or motion.transfers or motion.grown_bytes > _GROWTH_BYTES:
        return False
    found = []
    for reading in (frames.read_threads(before), frames.read_threads(after)):
        near = [frame for frame in (reading.own, *reading.callers[:1]) if frame is not None]
        if reading.in_collective:
            return False
        found.append({loop for frame in near if (loop := loops.that_may_stand_still(frame))})
    return bool(found[0] & found[1])


def started_anew(before: Sequence[ProcessEvidence], after: Sequence[ProcessEvidence]) -> bool:
    """Whether all worker processes have ended and others have taken their place."""
    return bool(before and after) and {child.pid for child in before}.isdisjoint(child.pid for child in after)


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
        if loop := loops.that_only_try_again(frame):
            found.add(loop)
        if source.calls(frame) & loops.TRAINS:
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
