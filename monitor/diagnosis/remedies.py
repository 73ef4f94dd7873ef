"""Remedies that the frames of a hang show: what a rank is in, and what it runs that others skip."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ftdash.monitor.diagnosis import frames, guards, source
from ftdash.monitor.diagnosis.frames import Origin
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.knowledge import Phase
from ftdash.monitor.diagnosis.model import Frame, Verdict
from ftdash.monitor.diagnosis.views import View

_OUT_OF_STEP = frozenset({Kind.COLLECTIVE_MISMATCH, Kind.ORDER_MISMATCH, Kind.PHASE_MISMATCH})
_HELD_BY_ITSELF = frozenset({Kind.OUTSIDE, Kind.LOCK, Kind.STORAGE, Kind.DATA_LOADER})
_CALLS_REWARDS = frozenset({"_calculate_rewards", "_compute_rewards", "compute_rewards"})
_BUILDS = frozenset({"__init__", "prepare", "prepare_model", "initialize", "init_process_group"})
_GATHERS_WEIGHTS = frozenset(
    {
        "fetch_sub_module",
        "_fetch_sub_module_impl",
        "pre_sub_module_forward_function",
        "_pre_forward",
        "pre_forward",
        "_pre_forward_unshard",
        "pre_backward",
        "unshard",
        "_unshard",
        "wait_for_unshard",
        "foreach_all_gather",
        "_all_gather_flat_param",
    }
)
_EXPERTS = re.compile(r"expert|moe(?:_|$|[A-Z])|mixtureof", re.I)
_CAUGHT_MEMORY = re.compile(r"out of memory|OutOfMemory", re.I)


def shown_remedy(verdict: Verdict, views: Sequence[View]) -> str:
    """The remedy for what the culprits' frames, or their difference from the others', show; "" for none."""
    named = {culprit.rank for culprit in verdict.culprits}
    odd = [view for view in views if view.rank in named]
    if not odd:
        return ""
    if verdict.kind in _HELD_BY_ITSELF:
        return _of_a_reward(
            odd, "it holds all ranks up while it works, waits or retries: give its calls a timeout"
        )
    if verdict.kind not in _OUT_OF_STEP:
        return ""
    rest = [view for view in views if view.rank not in named and view.has_stack]
    return (
        _of_a_caught_error(verdict, odd)
        or _of_a_reward(
            [*odd, *rest], "every rank has to make its collectives, and an error in it is to be raised on all"
        )
        or _of_a_condition(verdict)
        or _of_a_signal(odd)
        or _of_a_group([*odd, *rest])
        or _of_a_constructor(odd, rest)
    )


def _of_a_caught_error(verdict: Verdict, odd: Sequence[View]) -> str:
    """A rank that goes on by itself after an error that only it met."""
    caught = any(view.reading.own and source.in_except_block(view.reading.own) for view in odd)
    if not caught and not any(map(_CAUGHT_MEMORY.search, verdict.evidence)):
        return ""
    return "do not retry on one rank alone: let the error end the job, or agree on the retry with all ranks"


def _of_a_reward(views: Sequence[View], advice: str) -> str:
    for view in views:
        if (function := reward_function(view)) is not None:
            return f"in the reward function {function.short} (rank {view.rank}, {function.file}): {advice}"
    return ""


def reward_function(view: View) -> Frame | None:
    """The user's function that a trainer calls for rewards, where a rank is in one."""
    main = frames.main_thread(view.evidence.threads)
    stack = main.frames if main is not None else []
    caller = next((number for number, frame in enumerate(stack) if frame.short in _CALLS_REWARDS), 0)
    return next((frame for frame in reversed(stack[:caller]) if frames.origin(frame) is Origin.OWN), None)


def _of_a_condition(verdict: Verdict) -> str:
    """The line was seen to run under a condition on the rank."""
    if not any(text.startswith("its line runs only ") for text in verdict.evidence):
        return ""
    return (
        "move the call out of the condition on the rank: every rank has to make it; only the writing may stay"
    )


def _of_a_signal(odd: Sequence[View]) -> str:
    own = [f for view in odd for f in (view.reading.own, *view.reading.callers) if f is not None]
    if not any(map(guards.handles_a_signal, own)):
        return ""
    return (
        "a signal handler runs between any two lines of one rank: let it set a flag only, and let all ranks "
        "decide together at the end of a step (all_reduce the flag)"
    )


def _of_a_group(views: Sequence[View]) -> str:
    if not any(view.op == "new_group" for view in views):
        return ""
    return (
        "new_group has to be called by every rank of the job, in the same order, also by those that are no "
        "members of the group"
    )


def _of_a_constructor(odd: Sequence[View], rest: Sequence[View]) -> str:
    """A rank that is back where the job starts, while the others train."""
    if not all(view.reading.context is Phase.INIT and view.reading.names & _BUILDS for view in odd):
        return ""
    if any(view.reading.context is Phase.INIT for view in rest):
        return ""
    return (
        "this rank alone starts anew (a retry, a restart, a model built again): end the job on all ranks and "
        "start it from the checkpoint, or let all ranks start anew together"
    )


def module_remedy(verdict: Verdict, views: Sequence[View]) -> str:
    """Sharded weights that some ranks gather and others do not: a module that not all of them run."""
    named = {culprit.rank for culprit in verdict.culprits}
    odd = [view for view in views if view.rank in named]
    rest = [view for view in views if view.rank not in named and view.has_stack]
    if verdict.kind not in _OUT_OF_STEP or not odd:
        return ""
    gathering = [view for view in (*odd, *rest) if view.reading.names & _GATHERS_WEIGHTS]
    in_model = (Phase.FORWARD, Phase.BACKWARD)
    if not gathering or not rest or not all(view.reading.step in in_model for view in (*odd, *rest)):
        return ""
    places = dict.fromkeys(str(view.shown_frame) for view in (odd[0], rest[0]) if view.shown_frame)
    if len(places) < 2:
        return ""
    where = " and ".join(places)
    if any(_EXPERTS.search(text) for view in gathering for text in _names(view)):
        return (
            f"ranks skip experts that get no tokens ({where}): let every rank run every expert (on an empty "
            "batch too), or under ZeRO-3 deepspeed.utils.set_z3_leaf_modules(model, [MoeBlock])"
        )
    return (
        f"the ranks are at different modules ({where}): with sharded weights every rank has to run every "
        "module in each step; run a branch that a batch does not need on a dummy input, times 0 in the loss"
    )


def _names(view: View) -> list[str]:
    """What a rank's own functions, and the file and source line that it shows, are called."""
    own = [frame for frame in (view.reading.own, *view.reading.callers) if frame is not None]
    return [*(frame.name for frame in own), view.text, *(source.statement(frame) for frame in own)]
