"""What the Launch pane does away from the screen: checks a spec, starts it, stops a run; one thread each."""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from textual.message import Message

from ftdash.engine.check.findings import Finding
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.plan import Plan, PlanError
from ftdash.monitor.rundir import RunDir, RunError


@dataclass(frozen=True, slots=True)
class Wanted:
    """The inputs of the Launch pane. `command` set: somebody's own launcher command instead of the plan."""

    plan: Plan
    data: str = ""
    steps: int = 400
    out: str = ""
    device: str = "auto"
    name: str = ""
    command: str = ""

    def spec(self, runs_root: str | None) -> LaunchSpec:
        """Raises LaunchError for a command line that cannot be split."""
        from ftdash.engine.launch.spec import Device

        try:
            command = tuple(shlex.split(self.command))
        except ValueError as error:
            raise LaunchError(f"own command: {error}") from None
        return LaunchSpec(
            plan=None if command else self.plan,
            command=command,
            data=self.data or None,
            steps=self.steps or None,
            out=Path(self.out).expanduser() if self.out else None,
            device=Device(self.device),
            name=self.name,
            runs=Path(runs_root) if runs_root else None,
        )


class Checked(Message):
    """What the checks found, or why they could not be made."""

    def __init__(self, findings: tuple[Finding, ...], trouble: str = "") -> None:
        super().__init__()
        self.findings, self.trouble = findings, trouble


class Launched(Message):
    """A run was started, or refused in one line."""

    def __init__(self, run: RunDir | None, trouble: str = "") -> None:
        super().__init__()
        self.run, self.trouble = run, trouble


class Stopped(Message):
    """A run has ended; `trouble` is one line when something of it would not."""

    def __init__(self, run: RunDir, trouble: str = "") -> None:
        super().__init__()
        self.run, self.trouble = run, trouble


Post = Callable[[Message], object]


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` beside the screen; quitting does not wait for it."""
    threading.Thread(target=work, name=work.__name__, daemon=True).start()


def check(wanted: Wanted, post: Post) -> None:
    """Write the plan's files to a scratch folder and check them together with the plan."""

    def checking() -> None:
        try:
            post(Checked(findings_of(wanted)))
        except Exception as error:  # a check's fault is a line in the list, not the end of the screen
            post(Checked((), f"{type(error).__name__}: {error}" if not str(error) else str(error)))

    in_thread(checking)


def findings_of(wanted: Wanted) -> tuple[Finding, ...]:
    """Raises ConfigError, PlanError, DocumentError or ModelError in one line."""
    from ftdash.engine.check.registry import check_files
    from ftdash.engine.configs import TrainArgs, generate
    from ftdash.engine.model.load import resolve

    with tempfile.TemporaryDirectory(prefix="ftdash-check-") as folder:
        base = Path(folder)
        paths: list[str | Path] = []
        if not wanted.command:
            arguments = TrainArgs(model=wanted.plan.model or "MODEL", output_dir=wanted.out or "out")
            generated = generate(wanted.plan, shape=resolve(wanted.plan), train_args=arguments)
            for name, content in generated.files.items():
                path = base / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
                if path.suffix in (".yaml", ".yml", ".json"):
                    paths.append(path)
            plan = base / "run.plan"
            plan.write_bytes(msgspec.json.encode(wanted.plan.to_dict()))
            paths.append(plan)
        else:
            script = base / "command.sh"
            script.write_text(f"#!/bin/sh\n{wanted.command}\n")
            paths.append(script)
        return tuple(check_files(paths))


def start(wanted: Wanted, runs_root: str | None, post: Post) -> None:
    """Launch; the answer is a Launched message."""

    def launching() -> None:
        from ftdash.engine.launch.local import launch

        try:
            post(Launched(launch(wanted.spec(runs_root))))
        except (LaunchError, RunError, PlanError, OSError) as error:
            post(Launched(None, " ".join(str(error).split())))
        except Exception as error:
            post(Launched(None, f"launch failed: {type(error).__name__}: {error}"))

    in_thread(launching)


def stop(run: RunDir, post: Post, *, save: bool = False) -> None:
    """Stop every process of a run; the answer is a Stopped message."""

    def stopping() -> None:
        from ftdash.monitor.stop import stop_run

        try:
            left = stop_run(run, save=save)
            post(Stopped(run, f"still alive: {', '.join(map(str, sorted(left)))}" if left else ""))
        except (RunError, OSError) as error:
            post(Stopped(run, " ".join(str(error).split())))

    in_thread(stopping)
