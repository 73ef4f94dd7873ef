"""What Slurm knows of a run that its agents cannot say: still queued, or ended without a last word."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from ftdash.engine.slurm import client
from ftdash.engine.slurm.queue import MIN_INTERVAL_S
from ftdash.engine.slurm.submitted import job_id
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.reader import RunReader
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase, RunState

# Agents write the end of a run a moment before or after Slurm does.
LAST_WORD_S = 20.0
REQUEUED_WITHIN_S = 600.0
STOPPED_STATES = ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")


class JobWatch:
    """Adds Slurm's view to a run's states. `add` never blocks once the first answer is there."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._job: client.Job | None = None
        self._asked = False
        self._error = ""
        self._due = 0.0
        self._busy = threading.Lock()

    def add(self, state: RunState, *, wait: bool = False) -> RunState:
        """The state with what the controller last said, asked for anew every ten seconds at most."""
        # a run that saved and stopped before its limit waits in the queue again
        if state.state in FINAL and state.now - state.manifest.ended > REQUEUED_WITHIN_S:
            return state
        if time.monotonic() >= self._due and self._busy.acquire(blocking=False):
            self._due = time.monotonic() + MIN_INTERVAL_S
            if wait:
                self._ask()
            else:
                threading.Thread(target=self._ask, name="slurm-job", daemon=True).start()
        return self._with_job(state)

    def _ask(self) -> None:
        try:
            number = job_id(self.run)
            self._job = client.job(number) if number else None
            self._asked, self._error = True, ""
        except client.SlurmError as error:
            self._error = str(error)
        finally:
            self._busy.release()

    def _with_job(self, state: RunState) -> RunState:
        notices = state.notices
        if self._error:
            notices += (f"Slurm: {self._error}",)
        if not self._asked:
            return replace(state, notices=notices)
        job = self._job
        if job is not None and not job.is_over:
            waits = job.state in ("PENDING", "CONFIGURING", "REQUEUED")
            if state.state in FINAL and not waits:
                return state
            phase = RunPhase.STARTING if waits else state.state
            return replace(state, state=phase, notices=(*notices, describe(job)))
        if state.state in FINAL:
            return state
        heard = any(
            rank.heartbeat_age_s is not None and rank.heartbeat_age_s < LAST_WORD_S for rank in state.ranks
        )
        if heard:
            return replace(state, notices=notices)
        return self._settled(state, job)

    def _settled(self, state: RunState, job: client.Job | None) -> RunState:
        """The job is over and its agents have not said so: the end as Slurm tells it, for good."""
        stored = self.run.read_manifest()
        if RunPhase(stored.state) not in FINAL:
            stored.state = end_of(job)
            stored.reason = f"Slurm: {describe(job)}" if job else "Slurm no longer knows the job"
            stored.exit_code = job.exit_code if job else None
            stored.ended = float(job.ends) if job and job.elapsed_s is not None else time.time()
            self.run.write_manifest(stored)
        return replace(state, manifest=stored, state=RunPhase(stored.state))


def end_of(job: client.Job | None) -> RunPhase:
    """The state of a run whose job is over."""
    if job is None:
        return RunPhase.FAILED
    if job.state in STOPPED_STATES:
        return RunPhase.STOPPED
    return RunPhase.FINISHED if job.state == "COMPLETED" else RunPhase.FAILED


class JobReader(RunReader):
    """A run's reader that also knows the run's job. Only the first poll waits for the controller, if any."""

    def __init__(self, run: RunDir, points: int = 600, *, patient: bool = True) -> None:
        super().__init__(run, points)
        self._jobs = JobWatch(run)
        self._first = patient

    def poll(self, now: float | None = None) -> RunState:
        state = super().poll(now)
        first, self._first = self._first, False
        return self._jobs.add(state, wait=first)


def describe(job: client.Job) -> str:
    """One line: where the job stands and why, with the expected start of one that waits."""
    words = [f"job {job.shown_id or job.id} {job.state.lower().replace('_', ' ')}"]
    if job.is_over and job.exit_code:
        code = job.exit_code
        words.append(f"with exit code {code}" if code > 0 else f"by signal {-code}")
    if job.elapsed_s is not None:
        words.append(f"after {job.elapsed_s:,} s")
    if job.reason:
        words.append(f"({job.reason})")
    if job.state == "PENDING" and job.started:
        words.append(f"expected to start {time.strftime('%d %b %H:%M', time.localtime(job.started))}")
    if job.nodes:
        words.append(f"on {job.nodes}")
    if job.restarts:
        words.append(f"restart {job.restarts}")
    return " ".join(words)


def stop_job(run: RunDir, *, grace_s: float, timeout_s: float = 60.0) -> None:
    """End the run's job after its agents have had their say; waits until it is over. Raises SlurmError."""
    number = job_id(run)
    if not number:
        return
    job = client.job(number)
    if job is not None and not job.is_over:
        client.call("scancel", "--full", number)
    deadline = time.monotonic() + grace_s + timeout_s
    while job is not None and not job.is_over and time.monotonic() < deadline:
        time.sleep(0.5)
        job = client.job(number)
    stored = run.read_manifest()
    if RunPhase(stored.state) not in FINAL:
        stored.state, stored.reason, stored.ended = RunPhase.STOPPED, "stopped on request", time.time()
        run.write_manifest(stored)
