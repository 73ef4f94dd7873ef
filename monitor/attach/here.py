"""Records a job of this machine, from a process of its own, for as long as a screen watches it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ftdash.monitor.attach.watch import JobView
from ftdash.monitor.hostname import node_name
from ftdash.monitor.liveness import FINAL
from ftdash.monitor.procs import AGENT_ENV
from ftdash.monitor.rundir import Manifest, RunDir, new_run_id
from ftdash.monitor.state import RunPhase


@contextmanager
def recorded(
    view: JobView, command: Callable[[Path], Sequence[str]], root: str | None = None
) -> Iterator[RunDir]:
    """A run directory that `command` of its path fills meanwhile. Raises RunError."""
    first = view.ranks[0]
    run = RunDir.create(
        Manifest(
            run=new_run_id(f"attached-{first.pid}"),
            created=time.time(),
            command=[view.launcher or first.command],
            attached=True,
            state=RunPhase.RUNNING,
            world_size=view.job.world_size,
            hosts=[node_name()],
            started=time.time(),
        ),
        root,
    )
    for log in {view.log, *(rank.log for rank in view.ranks)} - {""}:
        (run.logs / f"{Path(log).stem}-{len(os.listdir(run.logs))}.log").symlink_to(log)
    with (run.logs / "attach.log").open("ab") as said:
        recorder = subprocess.Popen(
            list(command(run.path)),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, AGENT_ENV: str(run.path)},  # readers know a living agent by it
        )
    manifest = run.read_manifest()
    manifest.agent_pids[node_name()] = recorder.pid
    run.write_manifest(manifest)
    try:
        yield run
    finally:
        recorder.terminate()
        recorder.wait()
        manifest = run.read_manifest()
        if RunPhase(manifest.state) not in FINAL:
            manifest.state, manifest.reason = RunPhase.STOPPED, "no longer watched"
            manifest.ended = time.time()
            run.write_manifest(manifest)
