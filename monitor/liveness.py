"""Says what a run and its ranks are doing, from the manifest, the processes, the heartbeats and the exits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from ftdash.monitor.rundir import Manifest
from ftdash.monitor.state import RankPhase, RunPhase
from ftdash.monitor.summary import RankSummary

# A rank without progress for ten of its own median steps is not merely slow: a straggler is found at 1.3
# times, and data hiccups stay below ten. The floor covers logging and callbacks of runs with tiny steps.
STALL_STEPS = 10
STALL_FLOOR_S = 30.0
# Loading, compiling, saving and evaluating have no rhythm of their own. Ten minutes is NCCL's default
# watchdog (torch.distributed.constants.default_pg_nccl_timeout): what waits longer is killed by it anyway.
PAUSE_S = 600.0
# A stopped process makes no progress whatever its step times are; a debugger's pause is shorter than this.
STOPPED_S = 5.0
START_S = 60.0  # a launcher on this machine has its agent up in well under a second
AGENT_SILENT_S = 15.0  # an agent writes every second

FINAL = frozenset((RunPhase.FINISHED, RunPhase.FAILED, RunPhase.STOPPED))
_PAUSES = {"start": RankPhase.STARTING, "save": RankPhase.SAVING, "eval": RankPhase.EVALUATING}
PAUSE_PHASES = frozenset(_PAUSES)  # they have no rhythm of their own
_PHASES = {
    **_PAUSES,
    "data": RankPhase.DATA,
    "sync": RankPhase.COMMUNICATION,
    "end": RankPhase.FINISHED,
}


class Signs(msgspec.Struct, frozen=True, gc=False):
    """A rank's signs of life at one moment. Ages are seconds."""

    beat_age_s: float | None  # None: no hook was ever heard
    phase: str
    step: int
    process_state: str
    gone: bool  # its process is known to have ended
    exit_code: int | None
    stall_after_s: float


def stall_after_s(rank: RankSummary, phase: str, beat_age_s: float | None = None) -> float:
    """How long this rank may show no progress before it counts as stalled, by its own step times.

    Of a rank that showed progress within the floor, the floor: that it has not stalled is known without more.
    """
    if phase in _PAUSES:
        return PAUSE_S
    if beat_age_s is not None and beat_age_s <= STALL_FLOOR_S:
        return STALL_FLOOR_S
    step_s = rank.median_step_s()
    if step_s is None:
        return PAUSE_S  # the first step compiles, allocates and warms up
    return max(STALL_FLOOR_S, STALL_STEPS * step_s)


def rank_phase(signs: Signs, run: RunPhase) -> RankPhase:
    """What one rank is doing; the run's own final state decides for ranks whose end nobody saw."""
    if signs.exit_code is not None:
        return RankPhase.FINISHED if signs.exit_code == 0 else RankPhase.DEAD
    if run is RunPhase.FINISHED:
        return RankPhase.FINISHED
    if run in FINAL or signs.gone:
        return RankPhase.DEAD
    if signs.process_state == "T":
        return RankPhase.STALLED
    if signs.beat_age_s is None:
        return RankPhase.ALIVE if signs.process_state else RankPhase.STARTING
    if signs.phase == "end":
        return RankPhase.FINISHED
    if signs.beat_age_s > signs.stall_after_s:
        return RankPhase.STALLED
    return _PHASES.get(signs.phase, RankPhase.COMPUTE)


def is_stalled(living: Sequence[Signs]) -> bool:
    """True when no living rank shows progress: collectives make all ranks wait for the one that hangs."""
    heard = [signs for signs in living if signs.beat_age_s is not None and signs.phase != "end"]
    if not heard or heard[0].beat_age_s <= STOPPED_S:  # type: ignore[operator]
        return False
    if any(signs.process_state == "T" for signs in heard):
        return all(signs.beat_age_s > STOPPED_S for signs in heard)  # type: ignore[operator]
    if any(signs.phase in _PAUSES for signs in heard):
        return all(signs.beat_age_s > PAUSE_S for signs in heard)  # type: ignore[operator]
    return all(signs.beat_age_s > signs.stall_after_s for signs in heard)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run is doing, and why one may believe it."""

    phase: RunPhase
    reason: str = ""


def run_phase(
    manifest: Manifest,
    ranks: Sequence[Signs],
    *,
    agents: Collection[str],
    processes: int | None,
    launcher_code: int | None,
    now: float,
) -> Outcome:
    """The state of the run now.

    `agents` are the hosts with a living agent; `processes` counts this machine's processes of the run and is
    None when they could not or need not be counted; `launcher_code` is the launcher's exit code where known;
    `now` is UTC seconds.
    """
    stored = RunPhase(manifest.state)
    if stored in FINAL:
        return Outcome(stored, manifest.reason)
    if manifest.attached and not agents and processes == 0:
        return Outcome(RunPhase.STOPPED, "no longer watched")
    if not agents and manifest.agent_pids and processes == 0:
        return outcome_without_agent(launcher_code)
    unseen = not agents and not manifest.agent_pids
    if unseen and manifest.backend == "local" and now - manifest.created > START_S:
        return Outcome(RunPhase.FAILED, "it was prepared, and no agent ever started it")
    living = [signs for signs in ranks if not signs.gone]
    if is_stalled(living):
        longest = min(signs.beat_age_s or 0.0 for signs in living if signs.beat_age_s is not None)
        return Outcome(RunPhase.STALLED, f"no rank has made progress for {longest:.0f} s")
    if stored is RunPhase.STARTING:
        return Outcome(RunPhase.STARTING)
    heard = [signs for signs in ranks if signs.beat_age_s is not None]
    stepping = any(signs.step > 0 or signs.phase not in ("", "start") for signs in heard)
    if stepping or (not heard and manifest.plan is None):
        return Outcome(RunPhase.RUNNING)
    return Outcome(RunPhase.STARTING)


def outcome_without_agent(launcher_code: int | None) -> Outcome:
    """How a run ended that no agent saw end, by its launcher's exit code."""
    if launcher_code is None:
        return Outcome(
            RunPhase.FAILED, "every process of the run is gone, the agent too, and nothing tells how it ended"
        )
    if launcher_code == 0:
        return Outcome(RunPhase.FINISHED)
    from ftdash.monitor.procs import signal_name

    return Outcome(
        RunPhase.FAILED, f"launcher ended with {signal_name(launcher_code)} while no agent was there"
    )
