"""Starts a run of this machine again with debug switches set, once its processes are gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
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
    """End the run and start it again, in a thread; answers with Restarted, or with Acted and the trouble."""

    def restarting() -> None:
        from ftdash.engine.launch.spec import LaunchError
        from ftdash.engine.launch.start import start
        from ftdash.engine.launch.stop import stop

        try:
            spec = spec_of(run, switches)
            if left := stop(run):
                raise RunError(f"still alive: {', '.join(map(str, sorted(left)))}; not started again")
            post(Restarted(start(spec)))
        except (LaunchError, RunError, OSError) as error:
            post(Acted(" ".join(str(error).split()), failed=True))

    in_thread(restarting)


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
        try:
            folder = os.readlink(f"/proc/{manifest.launcher_pid}/cwd")
        except OSError:
            raise RunError(
                "its launcher is gone, and with it the folder it ran in: start it by hand"
            ) from None
        command = ["env", "-C", folder, *command]
    return LaunchSpec(
        command=tuple(command),
        steps=manifest.max_steps or None,
        out=Path(manifest.output_dir) if manifest.output_dir else None,
        name=manifest.name,
        runs=run.path.parent,
    )
