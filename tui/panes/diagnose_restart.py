"""Starts a run again once its processes are gone: here with debug switches, under Slurm without a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from ftdash.monitor.rundir import Manifest, RunDir, RunError
from ftdash.tui.launching import in_thread
from ftdash.tui.panes.diagnose_acting import Acted, Post

if TYPE_CHECKING:
    from ftdash.engine.launch.spec import LaunchSpec


class Restarted(Message):
    """The run has ended and goes on as `run`."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run


def restart(run: RunDir, switches: Sequence[str], post: Post) -> None:
    """End a run of this machine and start it again with the switches; answers as `_again` does."""
    from ftdash.engine.launch.start import start

    def prepare() -> Callable[[], RunDir]:
        return partial(start, spec_of(run, switches))

    in_thread(lambda: _again(run, prepare, post))


def exclude(run: RunDir, nodes: Sequence[str], post: Post) -> None:
    """End a run under Slurm and submit it again without `nodes`; answers as `_again` does."""
    from ftdash.engine.slurm.submit import resubmit

    in_thread(lambda: _again(run, lambda: partial(resubmit, run, exclude=nodes), post))


def _again(run: RunDir, prepare: Callable[[], Callable[[], RunDir]], post: Post) -> None:
    """Prepare while the run lives, end it, start anew; posts Restarted, or Acted with the trouble."""
    from ftdash.engine.launch.spec import LaunchError
    from ftdash.engine.launch.stop import stop

    try:
        start = prepare()
        if left := stop(run):
            raise RunError(f"still alive: {', '.join(map(str, sorted(left)))}; not started again")
        post(Restarted(start()))
    except (LaunchError, RunError, OSError) as error:
        post(Acted(" ".join(str(error).split()), failed=True))


def spec_of(run: RunDir, switches: Sequence[str]) -> LaunchSpec:
    """The same launch with the switches set: a plan from its last whole checkpoint, a command anew.

    What can be checked while the run still lives is checked here. Raises LaunchError and RunError.
    """
    from ftdash.engine.configs.debug_switches import variables
    from ftdash.engine.configs.types import ConfigError
    from ftdash.engine.launch.restart import restarted
    from ftdash.engine.launch.spec import Backend

    manifest = run.read_manifest()
    if manifest.backend != Backend.LOCAL:
        raise RunError(
            f"the run belongs to {manifest.backend}; only one of this machine is started again here"
        )
    spec = restarted(run) if manifest.plan is not None else _own_command(manifest, run)
    try:
        switched = dict(variables(list(switches)))
    except ConfigError as error:
        raise RunError(str(error)) from None
    return replace(spec, env=tuple({**dict(spec.env), **switched}.items()))


def _own_command(manifest: Manifest, run: RunDir) -> LaunchSpec:
    """Somebody's own launcher command, in the folder where it was started. Raises RunError."""
    from ftdash.engine.launch.spec import LaunchSpec
    from ftdash.monitor.redact import HIDDEN

    if not manifest.command:
        raise RunError("run.json holds no command to start again")
    if any(HIDDEN in word for word in manifest.command):
        raise RunError("the command held a secret, which is not stored: start it again by hand")
    command = list(manifest.command)
    if command[:2] != ["env", "-C"]:
        if not manifest.directory:
            raise RunError("run.json does not say in which folder it was started: start it again by hand")
        if not Path(manifest.directory).is_dir():
            raise RunError(f"{manifest.directory}, where it was started, is gone")
        command = ["env", "-C", manifest.directory, *command]
    return LaunchSpec(
        command=tuple(command),
        steps=manifest.max_steps or None,
        out=Path(manifest.output_dir) if manifest.output_dir else None,
        name=manifest.name or Path((command[3:] or command)[0]).name,  # their launcher's, not env
        runs=run.path.parent,
    )
