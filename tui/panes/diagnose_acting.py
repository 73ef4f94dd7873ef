"""What the Diagnose pane does to processes: signals to one rank, and the end of a run; one thread each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from textual.message import Message

from ftdash.monitor import control, procs
from ftdash.monitor.control import RankSignal
from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.collect import MOVED_BY_SIGNAL, hook_stacks
from ftdash.monitor.diagnosis.model import ProcessEvidence, RankEvidence
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.tui.launching import in_thread

ANSWER_S = 5.0
STACKS_S = 3.0
LOOK_EVERY_S = 0.05
LARGEST_STACKS = 8_000_000  # bytes read of what the hook wrote

Post = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class Target:
    """The process of one rank, as the evidence knew it."""

    rank: int
    pid: int
    host: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Acted(Message):
    """What came of an action, in one line; `evidence` are stacks that the hook wrote on request."""

    def __init__(self, text: str, *, failed: bool = False, evidence: RankEvidence | None = None) -> None:
        super().__init__()
        self.text, self.failed, self.evidence = text, failed, evidence


def send(run: RunDir, target: Target, number: RankSignal, post: Post) -> None:
    """Signal one rank through its node's agent, or directly where no agent lives; answers with Acted."""

    def sending() -> None:
        try:
            if number is RankSignal.STACKS:
                post(_stacks_by_signal(run, target))
            else:
                post(Acted(signal_rank(run, target, number)))
        except (RunError, OSError) as error:
            post(Acted(" ".join(str(error).split()), failed=True))

    in_thread(sending)


def signal_rank(run: RunDir, target: Target, number: RankSignal) -> str:
    """What was done, in one line. Raises RunError when it was not done."""
    manifest = run.read_manifest()
    host = node_name()
    if target.host == host and not procs.agent_alive(run.path, manifest.agent_pids.get(host, 0)):
        return _signal_here(run, target, number)
    request = control.request_signal(run, target.rank, target.pid, number)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        if answer := next((text for text in control.answers(request).values() if text), ""):
            if answer.startswith("not sent"):
                raise RunError(answer)
            return answer
        time.sleep(LOOK_EVERY_S)
    if control.answers(request):
        raise RunError(f"not sent: {target.words} is not there any more")
    request.unlink(missing_ok=True)  # an agent that comes back later must not act on it
    raise RunError(f"not sent: no agent answered in {ANSWER_S:.0f} s; is {target.host} alive?")


def _signal_here(run: RunDir, target: Target, number: RankSignal) -> str:
    """Without an agent: only a process that still carries this run's mark and rank is touched."""
    mine = target.pid in procs.pids_of_run(run.path)
    if not mine or procfs.environment(target.pid).get("RANK", str(target.rank)) != str(target.rank):
        raise RunError(f"not sent: {target.words} is not a process of this run any more")
    if number is RankSignal.STACKS and not procs.catches(target.pid, signal.SIGUSR2):
        raise RunError(f"not sent: rank {target.rank} has no handler for SIGUSR2 and would end")
    os.kill(target.pid, signal.Signals[number])
    return f"{number} sent to rank {target.rank}, pid {target.pid}"


def _stacks_by_signal(run: RunDir, target: Target) -> Acted:
    """Ask the hook for its stacks and read what it appended. Raises RunError and OSError."""
    path = run.stacks / f"faulthandler-rank-{target.rank}.txt"
    said: list[str] = []
    threads = hook_stacks(
        path,
        lambda: said.append(signal_rank(run, target, RankSignal.STACKS)),
        patience_s=STACKS_S,
        limit=LARGEST_STACKS,
    )
    if threads is None:
        raise RunError(
            f"{said[0]}, but its hook wrote nothing in {STACKS_S:.0f} s: no stack was had that way"
        )
    if not threads:
        raise RunError(f"{said[0]}; what the hook wrote to {path} holds no stack")
    process = ProcessEvidence(
        pid=target.pid,
        host=target.host,
        t=time.time(),
        rank=target.rank,
        threads=threads,
        source="faulthandler",
        moved=MOVED_BY_SIGNAL,
    )
    evidence = RankEvidence(rank=target.rank, host=target.host, t=process.t, process=process)
    return Acted(f"stacks of {target.words} by its own hook", evidence=evidence)


def end(run: RunDir, post: Post, *, save: bool, grace_s: float) -> None:
    """End every process of a run; answers with Acted."""

    def ending() -> None:
        from ftdash.engine.launch.stop import stop

        try:
            left = stop(run, save=save, grace_s=grace_s)
            text = f"still alive: {', '.join(map(str, sorted(left)))}" if left else f"{run.run_id} has ended"
            post(Acted(text, failed=bool(left)))
        except (RunError, OSError) as error:
            post(Acted(" ".join(str(error).split()), failed=True))

    in_thread(ending)
