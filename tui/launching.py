"""What the Launch pane does away from the screen: checks a spec, starts it, stops a run; one thread each."""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs
from textual.message import Message

from ftdash.engine.check.findings import Change, Finding
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.plan import Plan, PlanError
from ftdash.monitor.rundir import RunDir, RunError, list_runs, runs_root

if TYPE_CHECKING:
    from ftdash.engine.slurm.defaults import Site
    from ftdash.engine.slurm.options import SlurmOptions

LONGEST_FILE = 100_000  # characters compared of one file
RUNS_LOOKED_AT = 500  # newest runs among which the last one of a name is sought


@dataclass(frozen=True, slots=True)
class SlurmFields:
    """What is typed for a job under Slurm, as text; empty leaves the choice to the cluster."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    memory: str = ""
    cpus_per_task: str = ""
    constraint: str = ""
    exclude: str = ""
    reservation: str = ""
    container: str = ""
    container_runtime: str = ""
    modules: str = ""  # separated by blanks
    directives: str = ""  # further sbatch options, separated by blanks

    def options(self, nodes: int) -> SlurmOptions:
        """Raises LaunchError naming the option."""
        from ftdash.engine.slurm.options import ContainerRuntime, SlurmOptions

        runtime = self.container_runtime or ContainerRuntime.PYXIS
        if runtime not in list(ContainerRuntime):
            raise LaunchError(f"--container-runtime {runtime!r}: one of {', '.join(ContainerRuntime)}")
        if self.cpus_per_task and not self.cpus_per_task.isdecimal():
            raise LaunchError(f"--cpus-per-task {self.cpus_per_task!r}: must be a whole number")
        try:
            return SlurmOptions(
                nodes=nodes,
                partition=self.partition,
                account=self.account,
                qos=self.qos,
                time=self.time,
                memory=self.memory,
                cpus_per_task=int(self.cpus_per_task) if self.cpus_per_task else None,
                constraint=self.constraint,
                exclude=self.exclude,
                reservation=self.reservation,
                container=self.container,
                container_runtime=ContainerRuntime(runtime),
                modules=tuple(self.modules.split()),
                directives=tuple(shlex.split(self.directives)),
            )
        except ValueError as error:  # SlurmOptionError, or a quotation mark without its partner
            raise LaunchError(str(error)) from None

    @classmethod
    def of(cls, options: SlurmOptions) -> SlurmFields:
        """As they would have been typed."""
        return cls(
            partition=options.partition,
            account=options.account,
            qos=options.qos,
            time=options.time,
            memory=options.memory,
            cpus_per_task=str(options.cpus_per_task or ""),
            constraint=options.constraint,
            exclude=options.exclude,
            reservation=options.reservation,
            container=options.container,
            container_runtime=options.container_runtime if options.container else "",
            modules=" ".join(options.modules),
            directives=shlex.join(options.directives),
        )


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
    backend: str = "local"
    nodes: int = 1
    hosts: str = ""  # hosts file of the ssh backend
    slurm: SlurmFields = SlurmFields()
    switches: tuple[str, ...] = ()  # names of debug switches
    recipe: str = ""  # the recipe that the plan and data came from, for display
    save_steps: int = 0  # 0: the final model only
    resume: str = ""  # a checkpoint folder to go on from

    def spec(self, root: str | None) -> LaunchSpec:
        """Raises LaunchError for a command line that cannot be split, an option Slurm could not take, or
        switches that contradict each other."""
        from ftdash.engine.configs import ConfigError
        from ftdash.engine.configs.debug_switches import variables
        from ftdash.engine.launch.spec import Backend, Device

        try:
            command = tuple(shlex.split(self.command))
        except ValueError as error:
            raise LaunchError(f"own command: {error}") from None
        try:
            switched = variables(list(self.switches))
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        return LaunchSpec(
            plan=None if command else self.plan,
            command=command,
            data=self.data or None,
            steps=self.steps or None,
            out=Path(self.out).expanduser() if self.out else None,
            device=Device(self.device),
            backend=Backend(self.backend),
            nodes=1 if self.backend == Backend.LOCAL else self.nodes,
            slurm=self.slurm.options(self.nodes) if self.backend == Backend.SLURM else None,
            hosts=Path(self.hosts).expanduser() if self.hosts else None,
            name=self.name,
            runs=Path(root) if root else None,
            save_steps=self.save_steps,
            resume=Path(self.resume).expanduser() if self.resume else None,
            env=switched,
        )

    def changed(self, change: Change) -> Wanted:
        """With the fields of a finding's change set, in the plan, for Slurm, or here."""
        ours, slurms = ({field.name for field in fields(kind)} for kind in (Wanted, SlurmFields))
        known = ours | slurms
        plan = structs.replace(self.plan, **{name: value for name, value in change if name not in known})
        slurm = replace(self.slurm, **{name: str(value) for name, value in change if name in slurms - ours})
        here = {name: value for name, value in change if name in ours}
        return replace(self, **{"plan": plan, "slurm": slurm, **here})


def of_plan(wanted: Wanted, plan: Plan) -> Wanted:
    """The inputs with another plan; what belonged to the one before goes."""
    return replace(wanted, plan=plan, recipe="", command="", device="auto", name="", resume="")


def of_recipe(wanted: Wanted, name: str) -> Wanted:
    """The inputs with the plan and data of a recipe, or of `name:variant`. Raises RecipeError."""
    from ftdash.engine.recipes import load_recipe

    recipe = load_recipe(name)
    return replace(of_plan(wanted, recipe.plan), recipe=name, data=recipe.data)


def of_ended(wanted: Wanted, run: RunDir) -> Wanted:
    """The inputs of a run that has ended, to go on from its last whole checkpoint, asking for the same of
    Slurm or on the same hosts. Raises LaunchError and RunError.
    """
    from ftdash.engine.launch.restart import restarted

    spec = restarted(run)
    assert spec.plan is not None
    return replace(
        wanted,
        plan=spec.plan,
        recipe="",
        command="",
        data=spec.data or "",
        steps=spec.steps or wanted.steps,
        out=str(spec.out or ""),
        device=spec.device.value,
        name=spec.name,
        backend=spec.backend.value,
        nodes=spec.nodes,
        slurm=SlurmFields.of(spec.slurm) if spec.slurm is not None else wanted.slurm,
        hosts=str(spec.hosts or wanted.hosts),
        save_steps=spec.save_steps,
        resume=str(spec.resume or ""),
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


class LogsFound(Message):
    """The log files of a run, as they are to be offered."""

    def __init__(self, run: RunDir, files: list[Path]) -> None:
        super().__init__()
        self.run, self.files = run, files


class SiteSeen(Message):
    """What sinfo says of the partitions; `trouble` is Slurm's own line when it does not answer."""

    def __init__(self, site: Site | None, trouble: str = "") -> None:
        super().__init__()
        self.site, self.trouble = site, trouble


class Differed(Message):
    """The lines of a unified diff against the newest run of the same name; no run: none has that name."""

    def __init__(self, run: str, lines: tuple[str, ...], trouble: str = "") -> None:
        super().__init__()
        self.run, self.lines, self.trouble = run, lines, trouble


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
    """Of the launch itself, its plan and its files, worst first.

    Raises ConfigError, PlanError, DocumentError, ModelError or LaunchError in one line.
    """
    from ftdash.engine.check.registry import check_files
    from ftdash.engine.launch.preflight import preflight

    found = preflight(wanted.spec(None))
    with tempfile.TemporaryDirectory(prefix="ftdash-check-") as folder:
        base = Path(folder)
        paths: list[str | Path] = []
        if wanted.command:
            script = base / "command.sh"
            script.write_text(f"#!/bin/sh\n{wanted.command}\n")
            paths.append(script)
        else:
            paths += _written(wanted, base)
        told = {finding.code for finding in found}  # a taken port is an error here, and only a note to a file
        found += [finding for finding in check_files(paths) if finding.code not in told]
    return tuple(sorted(found, key=lambda finding: (finding.severity.order, not finding.change)))


def _written(wanted: Wanted, base: Path) -> list[str | Path]:
    """The plan and the files it becomes, written below `base`, and the checkpoint to go on from."""
    from ftdash.engine.configs import TrainArgs, generate
    from ftdash.engine.configs.generate import PLAN_FILE
    from ftdash.engine.configs.refusals import refusal
    from ftdash.engine.model.load import resolve

    paths: list[str | Path] = [Path(wanted.resume).expanduser()] if wanted.resume else []
    shape = resolve(wanted.plan)
    if not refusal(wanted.plan, shape):  # a refused plan has no files; the plan's own check says why
        arguments = TrainArgs(model=wanted.plan.model or "MODEL", output_dir=wanted.out or "out")
        for name, content in generate(wanted.plan, shape=shape, train_args=arguments).files.items():
            path = base / name
            path.write_text(content)
            if path.suffix in (".yaml", ".yml", ".json") and name != PLAN_FILE:
                paths.append(path)
    plan = base / "run.plan"
    sizes = {"max_steps": wanted.steps, "save_steps": wanted.save_steps}
    stored = {"plan": wanted.plan.to_dict(), "output_dir": wanted.out or str(runs_root()), **sizes}
    plan.write_bytes(msgspec.json.encode(stored))
    return [*paths, plan]


def start(wanted: Wanted, root: str | None, post: Post) -> None:
    """Launch; the answer is a Launched message."""
    from ftdash.engine.launch.start import start as begin

    def launching() -> None:
        try:
            post(Launched(begin(wanted.spec(root))))
        except (LaunchError, RunError, PlanError, OSError) as error:
            post(Launched(None, " ".join(str(error).split())))
        except Exception as error:
            post(Launched(None, f"launch failed: {type(error).__name__}: {error}"))

    in_thread(launching)


def look_at_site(post: Post) -> None:
    """Ask sinfo; answers with SiteSeen."""

    def looking_at_site() -> None:
        from ftdash.engine.slurm.client import SlurmError
        from ftdash.engine.slurm.defaults import ask_site

        try:
            post(SiteSeen(ask_site()))
        except SlurmError as error:
            post(SiteSeen(None, str(error)))

    in_thread(looking_at_site)


def differ(wanted: Wanted, root: str | None, post: Post) -> None:
    """Compare the wanted files with those of the newest run of the same name; answers with Differed."""

    def differing() -> None:
        try:
            post(difference(wanted, root))
        except Exception as error:  # as with the checks: a line, not the end of the screen
            post(Differed("", (), " ".join(str(error).split()) or type(error).__name__))

    in_thread(differing)


def difference(wanted: Wanted, root: str | None) -> Differed:
    """Raises ConfigError, PlanError or ModelError in one line."""
    import difflib

    from ftdash.engine.configs import TrainArgs, generate
    from ftdash.engine.model.load import resolve

    shape = resolve(wanted.plan)
    name = wanted.name or shape.name
    last = newest_named(name, root)
    if last is None:
        return Differed("", (), f"no run is named {name} yet")
    arguments = TrainArgs(model=wanted.plan.model or "MODEL", output_dir=wanted.out or "out")
    files = generate(wanted.plan, shape=shape, train_args=arguments).files
    lines: list[str] = []
    for file, content in sorted(files.items()):
        try:
            before = (last.config / file).read_text(errors="replace")[:LONGEST_FILE]
        except OSError:
            before = ""
        both = before.splitlines(), content[:LONGEST_FILE].splitlines()
        lines += difflib.unified_diff(*both, f"{last.run_id}/{file}", f"now/{file}", lineterm="", n=1)
    return Differed(last.run_id, tuple(lines))


def newest_named(name: str, root: str | None) -> RunDir | None:
    """The newest run whose manifest has this name."""
    for run in reversed(list_runs(root)[-RUNS_LOOKED_AT:]):
        try:
            if run.read_manifest().name == name:
                return run
        except RunError:
            continue
    return None


def stop(run: RunDir, post: Post, *, save: bool = False) -> None:
    """Stop every process of a run; the answer is a Stopped message."""

    def stopping() -> None:
        from ftdash.engine.launch import stop as backends

        try:
            left = backends.stop(run, save=save)
            post(Stopped(run, f"still alive: {', '.join(map(str, sorted(left)))}" if left else ""))
        except (RunError, OSError) as error:
            post(Stopped(run, " ".join(str(error).split())))

    in_thread(stopping)
