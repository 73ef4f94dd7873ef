"""Runs for tests: run directories with written telemetry, and real runs of processes without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from ftdash.monitor import procs
from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Record, encode_line
from ftdash.monitor.rundir import Manifest, RunDir, new_run_id
from ftdash.monitor.state import RunState

LAUNCHER = Path(__file__).with_name("fake_launcher.py")


def make_run(root: Path, name: str = "made", **fields: object) -> RunDir:
    """A run directory without processes; `fields` go into the manifest."""
    manifest = Manifest(run=new_run_id(name), created=time.time(), **fields)  # type: ignore[arg-type]
    return RunDir.create(manifest, root)


def write(path: Path, *records: Record) -> None:
    with open(path, "ab") as handle:
        handle.write(b"".join(map(encode_line, records)))


def start_run(root: Path, ranks: int = 2, *args: str) -> RunDir:
    """A real run: agent, launcher and ranks as processes of this machine."""
    from ftdash.engine.launch.local import launch
    from ftdash.engine.launch.spec import LaunchSpec

    command = (sys.executable, str(LAUNCHER), str(ranks), *args)
    return launch(LaunchSpec(command=command, name="fake", runs=root))


def read(run: RunDir, now: float | None = None) -> RunState:
    """The whole run, history included."""
    reader = RunReader(run)
    try:
        state = reader.poll(now)
        while reader.behind:
            state = reader.poll(now)
        return state
    finally:
        reader.close()


def wait_for(run: RunDir, wanted: Callable[[RunState], bool], timeout_s: float = 60.0) -> RunState:
    """The first state for which `wanted` holds. Raises AssertionError with the last state otherwise."""
    reader = RunReader(run)
    try:
        deadline = time.monotonic() + timeout_s
        while not wanted(state := reader.poll()):
            assert time.monotonic() < deadline, f"still {state.state}, {state.ranks}, {state.notices}"
            time.sleep(0.05)
        return state
    finally:
        reader.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def agent_pid(run: RunDir) -> int:
    return next(iter(run.read_manifest().agent_pids.values()))


def processes_of(run: RunDir) -> set[int]:
    """Everything that belongs to the run, its agent included."""
    return procs.pids_of_run(run.path) | procs.pids_of_run(run.path, procs.AGENT_ENV)
