"""The agent's loop: one thread that waits for ranks to end, samples, serves requests, and writes run.json."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ftdash.monitor import control, exits, procs
from ftdash.monitor.agent import launcher
from ftdash.monitor.agent.end import SAVE_WAIT_S, Ending
from ftdash.monitor.agent.evidence import HangWatch
from ftdash.monitor.agent.sample import GpuWatch, NodeFile, RankSampler, node_sample
from ftdash.monitor.agent.watch import RankWatch, Watched, adopt_orphans
from ftdash.monitor.control import Action, Request
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.nvml import sample_gpus
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Event, Exit
from ftdash.monitor.rundir import NODES_ENV, RankExit, RunDir, RunError
from ftdash.monitor.state import RunPhase
from ftdash.monitor.wording import plural

SAMPLE_S = 1.0
CONTROL_S = 0.25
CONTROL_SHARED_S = 1.0  # with several nodes each look is a directory read on a shared file system
DISCOVER_S = 5.0  # once all ranks of the node are known; until then as often as requests are looked for
OTHERS_WAIT_S = 15.0  # for the agents of the other nodes to write how their ranks ended
LEFTOVER_WAIT_S = 10.0  # for helpers that outlive launcher and ranks


class Tree(NamedTuple):
    """What the agent stands over: the shell that waits for the launcher, or nothing when it adopted a run."""

    shell_pid: int
    adopted: bool


class Place(NamedTuple):
    """Where in its run a node stands, as its launcher was told."""

    node_rank: int
    nodes: str


class Agent:
    """One node's agent of one run. `run_to_end` returns the launcher's exit code."""

    def __init__(self, run: RunDir, *, detached: bool, node_rank: int = 0) -> None:
        self.run = run
        self.host = node_name()
        self.detached = detached
        self.leads = node_rank == 0  # the one writer of run.json
        self.nodes = int(os.environ.get(NODES_ENV) or 1)
        self._control_s = CONTROL_S if self.nodes == 1 else CONTROL_SHARED_S
        self.manifest = run.read_manifest()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch = RankWatch(run, self._wake_read)
        self._file = NodeFile(run.node_file(self.host))
        self._sampler = RankSampler(run)
        self._hangs = HangWatch(run, self.host, alone=self.nodes == 1)
        self._links: dict[Path, str] = {}  # made by us: looked up once, not again and again on a shared disk
        self._signals: list[int] = []
        self._ending: Ending | None = None
        self._stop_reason = ""
        self._save_until: float | None = None
        self._unwritten = False
        self._tree = Tree(0, False)
        self._leave = False

    def run_to_end(self, command: Sequence[str] | None) -> int:
        """Start `command`, or adopt the run's processes without one, and stay until all of them are gone."""
        adopt_orphans()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._heard)
        if command is None:
            # the manifest knows the leading node's launcher only
            self._tree = Tree(launcher.waiting_shell(self.run) or self._stored_launcher(), True)
        else:
            self._forget_earlier_start()
            self._tree = Tree(launcher.start(self.run, command), False)
            self.manifest.launcher_pid = self._tree.shell_pid
            self.manifest.started = time.time()
        self.manifest.agent_pids[self.host] = os.getpid()
        self.manifest.slurm_job_id = os.environ.get("SLURM_JOB_ID", self.manifest.slurm_job_id)
        if self.host not in self.manifest.hosts:
            self.manifest.hosts.append(self.host)
        self._write_manifest()
        gpus = GpuWatch(sample_gpus, SAMPLE_S)
        try:
            self._loop(gpus)
            return self._finish() if not self._leave else 0
        finally:
            gpus.close()
            self._file.close()

    def _stored_launcher(self) -> int:
        return self.manifest.launcher_pid if self.nodes == 1 else 0

    def _forget_earlier_start(self) -> None:
        """A requeued job starts again in its old run directory: how it ended before is no longer true."""
        self.run.exit_marker.unlink(missing_ok=True)
        manifest = self.manifest
        manifest.state, manifest.reason, manifest.exits = RunPhase.STARTING, "", []
        manifest.exit_code = manifest.first_failing_rank = None
        manifest.ended = 0.0
        manifest.agent_pids.clear()

    def _heard(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _loop(self, gpus: GpuWatch) -> None:
        next_sample = next_discovery = next_control = 0.0
        gone_since: float | None = None
        while not self._leave:
            now = time.monotonic()
            if now >= next_control:
                next_control = now + self._control_s
                self._serve()
                self._press_ending()
            if now >= next_discovery:
                self._discover()
                next_discovery = now + (DISCOVER_S if self._knows_all_ranks() else CONTROL_S)
            if now >= next_sample:
                next_sample = now + SAMPLE_S
                self._sample(gpus)
            ended = self._watch.wait(min(next_sample, next_control, next_discovery) - time.monotonic())
            for watched in ended:
                self._record_exit(watched)
                next_discovery = 0.0  # a launcher may start it again
            self._pass_signals_on()
            if self._shell_lives() or self._watch.living():
                gone_since = None
                continue
            if not self._leftovers():
                return
            gone_since = gone_since or time.monotonic()
            if self._ending is None and time.monotonic() - gone_since > LEFTOVER_WAIT_S:
                left = sorted(self._leftovers())
                self._event("warning", "leftovers", f"processes outlive the run: {', '.join(map(str, left))}")
                return
            if self._ending is not None and self._ending.overdue:
                return

    def _shell_lives(self) -> bool:
        shell = self._tree.shell_pid
        return shell not in self._watch.reaped and procs.alive(shell)

    def _roots(self) -> set[int]:
        if self._tree.adopted:
            return procs.pids_of_run(self.run.path)
        return {os.getpid()}  # the shell, and as subreaper every orphan

    def _discover(self) -> None:
        self._watch.discover(self._roots() - {0})
        self._watch.seen.pop(os.getpid(), None)
        self._watch.forget_dead()
        self._link_logs()
        if self.manifest.state == RunPhase.STARTING and self._watch.ranks:
            self.manifest.state = RunPhase.RUNNING
            first = next(iter(self._watch.ranks.values())).process
            self.manifest.world_size = first.world_size or self.manifest.world_size
            self._write_manifest()

    def _knows_all_ranks(self) -> bool:
        living = self._watch.living()
        if not living:
            return False
        expected = procs.environ(living[0].process.pid).get("LOCAL_WORLD_SIZE", "")
        return expected.isdigit() and len(living) >= int(expected)

    def _leftovers(self) -> set[int]:
        found = procs.pids_of_run(self.run.path)
        found.update(pid for pid, start in self._watch.seen.items() if procs.alive(pid, start))
        return found

    def _sample(self, gpus: GpuWatch) -> None:
        newest = gpus.take()
        if newest:
            self._sampler.devices = newest
        living = self._watch.living()
        samples = self._sampler.sample(living)
        told = self._hangs.look(samples, time.monotonic()) if self._ending is None else []
        self._file.write([node_sample(self.host), *newest, *samples, *told])
        if self._unwritten:
            self._write_manifest()

    def _link_logs(self) -> None:
        """logs/rank-R.stdout.log points at where the launcher puts that rank's output."""
        for watched in self._watch.living():
            for fd, stream in ((1, "stdout"), (2, "stderr")):
                link = self.run.rank_log(watched.process.rank, stream)
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{watched.process.pid}/fd/{fd}")
                    inside = os.path.relpath(target, self.run.logs)
                    if inside.startswith("..") or self._links.get(link) == inside:
                        continue
                    link.unlink(missing_ok=True)
                    link.symlink_to(inside)
                    self._links[link] = inside

    def _record_exit(self, watched: Watched) -> None:
        process = watched.process
        text = "" if watched.code == 0 else exits.last_error_line(self.run, process.rank)
        self._file.write(
            [
                Exit(
                    t=watched.ended,
                    rank=process.rank,
                    pid=process.pid,
                    code=watched.code,
                    host=self.host,
                    text=text,
                )
            ]
        )

    def _event(self, severity: str, code: str, text: str) -> None:
        self._file.write([Event(t=time.time(), severity=severity, code=code, text=text)])

    def _serve(self) -> None:
        for path, request in control.pending(self.run, self.host, os.getuid()):
            answer = ""
            if request.action is Action.DUMP:
                self._dump(request)
            elif request.action is Action.SIGNAL:
                answer = self._signal_rank(request)
            elif request.action is Action.STOP:
                self._stop("stopped on request", request.grace_s)
            else:
                self._save_and_stop()
            with contextlib.suppress(OSError):
                control.mark_served(path, self.host, answer)
        if self._save_until is not None and time.monotonic() > self._save_until and self._ending is None:
            self._event(
                "error", "save-timeout", f"no checkpoint within {SAVE_WAIT_S:.0f} s: stopping without it"
            )
            self._stop("stopped on request, without a checkpoint", grace_s=20.0)

    def _signal_rank(self, request: Request) -> str:
        """Signal one rank of this node, if it still is the process that was meant; what came of it."""
        found = [w.process for w in self._watch.living() if w.process.rank in (request.ranks or ())]
        if not found or request.signal is None:
            return ""
        rank, pid = found[0].rank, found[0].pid
        if pid != request.pid:
            return f"not sent: rank {rank} is pid {pid} now, not {request.pid}"
        number = signal.Signals[request.signal]
        if request.signal is control.RankSignal.STACKS and not procs.catches(pid, number):
            return f"not sent: rank {rank} has no handler for {request.signal} and would end"
        try:
            os.kill(pid, number)
        except OSError as error:
            return f"not sent: {error.strerror or error}"
        text = f"{request.signal} sent to rank {rank}, pid {pid}"
        self._event("note", "signal", f"{text}, on request")
        return text

    def _save_and_stop(self) -> None:
        """Ranks with ftdash's training script look for this file at the end of each step."""
        self._stop_reason = "saved and stopped on request"
        self._save_until = time.monotonic() + SAVE_WAIT_S
        with contextlib.suppress(OSError):
            (self.run.control / "save-and-stop").touch(mode=0o600)

    def _stop(self, reason: str, grace_s: float) -> None:
        if self._ending is None:
            self._stop_reason = reason
            self._ending = Ending(self.run, grace_s)
            self._press_ending()

    def _press_ending(self) -> None:
        if self._ending is not None:
            self._discover()
            self._ending.step(self._watch.seen)

    def _dump(self, request: Request) -> None:
        """In a thread: a dump takes seconds, and a rank that ends meanwhile must still be seen."""
        ranks = [
            (watched.process.rank, watched.process.pid)
            for watched in self._watch.living()
            if request.ranks is None or watched.process.rank in request.ranks
        ]

        def work() -> None:
            from ftdash.monitor.diagnosis.collect import dump_ranks, save_ranks

            folder = self.run.stacks / request.stamp
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                save_ranks(folder, dump_ranks(ranks, native=request.native))
            except OSError as error:
                self._event("error", "dump-failed", f"stack dump {request.stamp}: {error.strerror or error}")

        threading.Thread(target=work, name="dump", daemon=True).start()

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                continue  # the terminal is gone; training stays
            if self.detached:
                # once all is over, how it ended is still to be written: a job's end signals agents too
                going_on = self._shell_lives() or self._watch.living()
                if number in (signal.SIGTERM, signal.SIGINT) and going_on:
                    self._event(
                        "warning",
                        "agent-ended",
                        f"the agent was ended by {name}; training goes on without it",
                    )
                    self._leave = True
                continue
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop_reason = self._stop_reason or f"stopped by {name}"
                procs.send(launcher.launcher_pids(self._tree.shell_pid), number)
            else:
                # torchrun does not hand these on, and they kill a process that has no handler for them.
                ready = [w.process.pid for w in self._watch.living() if procs.catches(w.process.pid, number)]
                procs.send(ready, number)
                self._event("note", "signal", f"{name} passed on to {plural(len(ready), 'rank')}")

    def _finish(self) -> int:
        """Write how it ended, for this node and, on the leading one, for the run."""
        self._watch.reap()
        code = exits.launcher_exit(self.run)
        if code is None:
            code = self._watch.reaped.get(self._tree.shell_pid)
        ended = time.time()
        self._file.write([Exit(t=ended, rank=None, pid=self._tree.shell_pid, code=code, host=self.host)])
        if not self.leads:
            return code if code is not None else 1
        manifest = self.manifest
        manifest.ended = ended
        manifest.exit_code = code
        manifest.exits = [
            RankExit(rank, watched.code, watched.ended, self.host)
            for rank, watched in sorted(self._watch.ranks.items())
            if watched.code is not None
        ]
        manifest = exits.complete(self.run, manifest, self._exits_elsewhere())
        ranks_failed = any(end.code != 0 for end in manifest.exits)
        if self._stop_reason:
            manifest.state, manifest.reason = RunPhase.STOPPED, self._stop_reason
            manifest.first_failing_rank = None
        elif code == 0 and not ranks_failed:
            manifest.state = RunPhase.FINISHED
        else:
            manifest.state = RunPhase.FAILED
            manifest.reason = exits.reason(self.run, manifest)
        self.manifest = manifest
        self._write_manifest(last=True)
        return code if code is not None else 1

    def _exits_elsewhere(self) -> list[RankExit]:
        """How the ranks of the other nodes ended, once their agents have said so or have had time to."""
        if self.nodes == 1:
            return []
        reader = RunReader(self.run)
        deadline = time.monotonic() + OTHERS_WAIT_S
        try:
            while True:
                known = reader.known_exits()
                if len(reader.summary.launcher_exits) >= self.nodes or time.monotonic() > deadline:
                    self.manifest.hosts = sorted({*self.manifest.hosts, *reader.hosts()})
                    return [end for end in known if end.host != self.host]
                time.sleep(0.2)
        finally:
            reader.close()

    def _write_manifest(self, last: bool = False) -> None:
        """On a full disk the old file's own blocks are written over; that is not atomic, but it is told."""
        if not self.leads:
            return
        self._unwritten = False
        try:
            self.run.write_manifest(self.manifest)
        except OSError as error:
            self._unwritten = True
            if last and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                data = msgspec.json.encode(self.manifest)
                with contextlib.suppress(OSError), open(self.run.manifest_path, "r+b") as handle:
                    handle.write(data)
                    handle.truncate()


def adoptable(run: RunDir) -> Place:
    """Where an agent of this node takes the run over. Raises RunError when there is nothing to adopt."""
    run.check_owner()
    manifest = run.read_manifest()
    if manifest.state in FINAL:
        raise RunError(f"run {manifest.run} is {manifest.state}: nothing to adopt")
    agents = procs.pids_of_run(run.path, procs.AGENT_ENV) - {os.getpid()}
    if living := sorted(pid for pid in agents if node_name(procs.environ(pid)) == node_name()):
        raise RunError(f"run {manifest.run} has a living agent (pid {living[0]}): nothing to adopt")
    told = procs.environ(launcher.waiting_shell(run))
    if manifest.backend != "local" and not told:
        raise RunError(f"run {manifest.run} has no launcher on {node_name()}: nothing to adopt")
    rank = told.get("NODE_RANK", "")
    return Place(int(rank) if rank.isdigit() else 0, told.get(NODES_ENV, ""))
