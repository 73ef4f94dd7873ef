"""`ftdash attach`: watch a job that somebody else started, without touching it."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from ftdash.monitor.attach.here import recorded
from ftdash.monitor.attach.record import Recorder
from ftdash.monitor.attach.watch import Attached, JobView, RankView, Watcher
from ftdash.monitor.logs.memory import LoggedMemory
from ftdash.monitor.logs.progress import ProgressFollower
from ftdash.monitor.nvml import sample_gpus, sampler
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.wording import gib
from ftdash.tui.cli import UserError
from ftdash.tui.commands.run_json import print_json

FIRST_SPAN_S = 0.3  # between the two looks that rates need
RECORD_S = 1.0  # as an agent samples
LAST_RANK_S = 10.0  # without a rank on this node: a launcher may be starting it again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, action="append", metavar="P", help="only the job of this process")
    parser.add_argument("--slurm", metavar="JOB", help="a Slurm job on all its nodes, through srun --overlap")
    parser.add_argument("--stacks", metavar="DIR", help="with --slurm: write every rank's stack there")
    parser.add_argument(
        "--log", type=Path, action="append", default=[], metavar="FILE", help="where the job's output goes"
    )
    parser.add_argument("--once", action="store_true", help="print what is seen now and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between looks (2)")
    parser.add_argument("--runs", metavar="DIR", help="where run directories live ($FTDASH_HOME/runs)")
    parser.add_argument("--json", action="store_true", help="JSON on stdout; one object a look")
    # what one node of a Slurm job is asked for
    parser.add_argument("--of-job", default="", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if not 0.2 <= args.interval <= 3600:
        raise UserError(f"--interval {args.interval:g}: seconds from 0.2 to 3600")
    for pid in args.pid or ():
        if pid < 1:
            raise UserError(f"--pid {pid}: a process id is a positive number")
    if args.slurm is not None:
        return _run_slurm(args)
    if args.stacks is not None:
        raise UserError("--stacks goes with --slurm; on this machine: ftdash diagnose --pid P")
    watcher = Watcher(args.pid, sample_gpus, slurm_job=args.of_job, logs=args.log)
    if args.record is not None:
        return _record(args, watcher)
    seen = watcher.look()
    if seen.jobs and _on_screen(args):
        return _show_here(args, seen)
    time.sleep(FIRST_SPAN_S)
    while True:
        seen = watcher.look()
        if args.json:
            print_json(attached_json(seen))
        else:
            print("\n".join(attached_lines(seen)), flush=True)
        if args.once or not seen.jobs:
            return 0
        time.sleep(args.interval)


def _on_screen(args: argparse.Namespace) -> bool:
    return not (args.json or args.once) and sys.stdout.isatty() and sys.stdin.isatty()


def _show_here(args: argparse.Namespace, seen: Attached) -> int:
    """The app on the newest job of this machine, or on that of --pid."""
    from ftdash.tui.app import open_app

    view = seen.jobs[-1]
    pids = args.pid or ([view.ranks[0].pid] if len(seen.jobs) > 1 else [])

    def command(run: Path) -> list[str]:
        words = [*(f"--pid={pid}" for pid in pids), *(f"--log={path}" for path in args.log)]
        return [sys.executable, "-m", "ftdash.tui.cli", "attach", f"--record={run}", *words]

    _leave_on(signal.SIGTERM, signal.SIGHUP)
    with recorded(view, command, args.runs) as run:
        return open_app([], run=run, pane="monitor")


def _record(args: argparse.Namespace, watcher: Watcher) -> int:
    """On one node of a job: into its run directory, every second, until no rank of it is left here."""
    _leave_on(signal.SIGTERM)
    recorder = Recorder(RunDir(args.record))
    shown, last_seen = 0.0, time.monotonic()
    while time.monotonic() - last_seen < LAST_RANK_S:
        seen = watcher.look()
        recorder.write(seen)
        now = time.monotonic()
        if seen.jobs:
            last_seen = now
        if args.json and now - shown >= args.interval:
            shown = now
            print_json(attached_json(seen))
        time.sleep(RECORD_S)
    recorder.close()
    return 0


def _leave_on(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, lambda *_: sys.exit(0))


def _run_slurm(args: argparse.Namespace) -> int:
    from ftdash.engine.slurm import attach
    from ftdash.engine.slurm.client import SlurmError

    if not re.fullmatch(r"\d+(_\d+)?", args.slurm):
        raise UserError(f"--slurm {args.slurm}: a job id, as squeue shows it")
    try:
        job = attach.find(args.slurm)
        if args.stacks is not None:
            count = attach.dump(job.id, Path(args.stacks))
            print(f"stacks of {count} ranks in {args.stacks}; ftdash diagnose --stacks {args.stacks}")
            return 0
        if args.once:
            _show_slurm(args, attach.look(job))
            return 0
        on_screen = _on_screen(args)
        _leave_on(signal.SIGTERM, signal.SIGHUP)  # not without ending the watchers
        recording = attach.record(job, root=args.runs, interval_s=args.interval, heard=not on_screen)
    except (SlurmError, RunError) as error:
        raise UserError(f"--slurm {args.slurm}: {error}") from None
    try:
        if on_screen:
            from ftdash.tui.app import open_app

            return open_app([], run=recording.run, pane="monitor")
        sys.stderr.write(f"ftdash: watching as {recording.run.run_id}; ftdash diagnose works on it\n")
        for jobs in recording.looks():
            _show_slurm(args, jobs)
        return 0
    finally:
        recording.close()


def _show_slurm(args: argparse.Namespace, jobs: list[dict[str, Any]]) -> None:
    if args.json:
        print_json({"t": time.time(), "jobs": jobs})
    else:
        print("\n".join(slurm_lines(args.slurm, jobs)), flush=True)


def slurm_lines(job_id: str, jobs: list[dict[str, Any]]) -> list[str]:
    """The job's ranks as lines for a person."""
    if not jobs:
        return [f"job {job_id}: no training process of yours on its nodes"]
    lines = []
    for job in jobs:
        step = f"step {job['step']:,}" if job["step"] is not None else "no step in its log"
        loss = f" · loss {job['loss']:g}" if job["loss"] is not None else ""
        log = f" · log {job['log']}" if job["log"] else ""
        lines.append(f"job {job_id}: {len(job['ranks'])} of {job['world_size']} ranks · {step}{loss}{log}")
        for rank in job["ranks"]:
            cpu = f"{rank['cpu']:.0f}%" if rank["cpu"] is not None else "-"
            util = f"{rank['gpu_util']}%" if rank["gpu_util"] is not None else "n/a"
            used = gib(rank["memory_used"]) if rank["memory_used"] is not None else "n/a"
            gpu = f"  GPU {rank['gpu_index']} {used}, {util}" if rank["gpu_index"] is not None else ""
            rate = _bytes_s(rank["read_bytes_s"], rank["write_bytes_s"])
            lines.append(
                f"  rank {rank['rank']:>3}  {rank['host']}  pid {rank['pid']}  {rank['state']}  "
                f"{gib(rank['rss'])}  CPU {cpu}{gpu}{rate}"
            )
    return lines


def _bytes_s(read: float | None, written: float | None) -> str:
    if read is None or written is None:
        return ""
    return f"  reads {read / 1e6:.1f}, writes {written / 1e6:.1f} MB/s"


def attached_json(seen: Attached) -> dict[str, Any]:
    """Jobs with their ranks; the keys of ranks are those of `status --json` where they mean the same."""
    return {
        "t": seen.t,
        "jobs": [_job_json(view) for view in seen.jobs],
        "gpu_reason": sampler().reason if not seen.gpus else "",
        "notices": list(seen.notices),
    }


def _job_json(view: JobView) -> dict[str, Any]:
    job = view.job
    return {
        "launcher_pid": job.launcher_pid,
        "launcher": view.launcher,
        "world_size": job.world_size,
        "slurm_job_id": job.slurm_job_id,
        "run_dir": job.run_dir,
        "log": view.log,
        "log_why": view.log_why,
        **_progress_json(view.progress),
        "first_failure": view.first_failure,
        "gpu_fault": view.gpu_fault,
        "ranks": [_rank_json(rank) for rank in view.ranks],
    }


def _progress_json(progress: ProgressFollower | None) -> dict[str, Any]:
    latest = progress.latest if progress else None
    return {
        "step": latest.step if latest else None,
        "max_steps": latest.max_steps if latest else None,
        "loss": latest.loss if latest else None,
        "grad_norm": latest.grad_norm if latest else None,
        "lr": latest.lr if latest else None,
        "tokens_per_s": progress.tokens_per_s() if progress else None,
        "step_s": latest.step_s if latest else None,
        "log_format": latest.source if latest else "",
        "hidden_nan": progress.hidden_nan if progress else False,
        "logged_memory": msgspec.to_builtins(progress.memory) if progress and progress.memory else None,
    }


def _rank_json(rank: RankView) -> dict[str, Any]:
    gpu = rank.gpu
    latest = rank.progress.latest if rank.progress else None
    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "host": rank.host,
        "pid": rank.pid,
        "command": rank.command,
        "state": rank.state,
        "step": latest.step if latest else None,
        "loss": latest.loss if latest else None,
        "tokens_per_s": rank.progress.tokens_per_s() if rank.progress else None,
        "memory_used": gpu.memory_used if gpu else rank.rss,
        "memory_total": gpu.memory_total if gpu else None,
        "rss": rank.rss,
        "cpu": rank.cpu,
        "read_bytes_s": rank.read_bytes_s,
        "write_bytes_s": rank.write_bytes_s,
        "threads": rank.threads,
        "descendants": list(rank.descendants),
        "gpu_index": gpu.index if gpu else None,
        "gpu_uuid": gpu.uuid if gpu else None,
        "gpu_util": gpu.util if gpu else None,
        "gpu_why": rank.gpu_why,
        "log": rank.log,
    }


def attached_lines(seen: Attached) -> list[str]:
    """The jobs as lines for a person."""
    if not seen.jobs:
        return ["no training process of yours on this machine"]
    lines: list[str] = []
    for view in seen.jobs:
        lines.append(_job_line(view))
        if view.first_failure:
            lines.append(f"  first failure: {view.first_failure}")
        if view.gpu_fault:
            lines.append(f"  GPU: {view.gpu_fault}")
        if view.progress and view.progress.memory:
            lines.append(f"  memory: {_memory_words(view.progress.memory)}")
        lines += [_rank_line(rank) for rank in view.ranks]
    return [*lines, *(f"note: {notice}" for notice in seen.notices)]


def _job_line(view: JobView) -> str:
    latest = view.progress.latest if view.progress else None
    parts = [f"{len(view.ranks)} of {view.job.world_size} ranks here"]
    if latest and latest.step is not None:
        parts.append(f"step {latest.step:,}" + (f" of {latest.max_steps:,}" if latest.max_steps else ""))
    if latest and latest.loss is not None:
        parts.append(f"loss {latest.loss:g}")
    if view.progress and (rate := view.progress.tokens_per_s()):
        parts.append(f"{rate:,.0f} tokens/s")
    parts.append(f"log {view.log}" if view.log else view.log_why)
    return " · ".join([*parts, view.launcher or view.ranks[0].command])


def _memory_words(memory: LoggedMemory) -> str:
    """What the log says of torch's allocator and of the host."""
    named = (
        ("allocated", memory.allocated),
        ("peak", memory.max_allocated),
        ("reserved", memory.reserved),
        ("reserved at most", memory.max_reserved),
        ("host", memory.host_used),
    )
    said = [f"{name} {gib(size)}" for name, size in named if size is not None]
    return f"{', '.join(said)}, as {memory.source} last logged"


def _rank_line(rank: RankView) -> str:
    cpu = f"{rank.cpu:.0f}%" if rank.cpu is not None else "-"
    device = "CPU"
    if rank.gpu is not None:
        used = gib(rank.gpu.memory_used) if rank.gpu.memory_used is not None else "n/a"
        util = f"{rank.gpu.util}%" if rank.gpu.util is not None else "n/a"
        device = f"GPU {rank.gpu.index} {used}, {util}"
    elif rank.gpu_why:
        device = rank.gpu_why
    return f"  rank {rank.rank:>3}  pid {rank.pid}  {rank.state}  {gib(rank.rss)}  CPU {cpu}  {device}"
