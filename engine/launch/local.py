"""Starts a run on this machine: checks, run directory, configs, then the node agent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ftdash.engine.configs import ConfigError, Generated, TrainArgs, generate
from ftdash.engine.configs.commands import own_path
from ftdash.engine.configs.script import model_source
from ftdash.engine.launch import checks
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.load import ModelError, resolve
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner import evaluate
from ftdash.monitor.agent.launcher import INJECT_ENV
from ftdash.monitor.procs import AGENT_ENV
from ftdash.monitor.redact import redact_command
from ftdash.monitor.rundir import RUN_DIR_ENV, Manifest, RunDir, RunError, new_run_id, runs_root, stored_env

TRAIN_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")
VERSIONED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")
DEFAULT_STEPS = 100
AGENT_START_S = 30.0

_agents: list[subprocess.Popen[bytes]] = []  # kept so that an ended agent is reaped by the next Popen


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch whose checks have passed: its run directory is written and nothing runs yet."""

    run: RunDir
    command: tuple[str, ...]
    env: dict[str, str]
    manifest: Manifest
    train: TrainArgs | None = None  # None for somebody's own command


def launch(spec: LaunchSpec) -> RunDir:
    """Check, write the run directory and start the agent, detached from this terminal.

    Raises LaunchError, in one line naming the flag or file, before any process was started, and RunError
    when the run directory cannot be written or the agent does not come up.
    """
    from ftdash.engine.launch.job import job_of, write_job  # which imports this module

    prepared = prepare(spec)
    if prepared.train is not None:
        write_job(prepared.run, job_of(prepared, spec, nodes=1))  # to go on from, once it has ended
    start_agent(prepared)
    return prepared.run


def prepare(spec: LaunchSpec) -> Prepared:
    """Everything short of starting: checks, run directory, config files. Raises as `launch` does.

    Also for runs on other machines, whose ports and GPUs cannot be looked at from here.
    """
    if spec.backend is Backend.LOCAL and spec.nodes > 1:
        raise LaunchError(f"--nodes {spec.nodes}: one machine is one node; use --backend slurm or ssh")
    root = runs_root(spec.runs)
    checks.writable(root, "--runs")
    _storable(spec.env)
    if spec.command:
        return _prepare_command(spec, root)
    if spec.plan is None:
        raise LaunchError("nothing to launch: give a plan's flags, or -- COMMAND")
    return _prepare_plan(spec, spec.plan, root)


def _storable(env: tuple[tuple[str, str], ...]) -> None:
    """What a launch adds to the environment is written to the run directory: nothing secret may be in it."""
    refused = sorted(dict(env).keys() - stored_env(dict(env)).keys())
    if refused:
        raise LaunchError(
            f"environment {refused[0]}: not one of the variables that a run directory may hold; export it "
            "where the ranks start"
        )


def start_agent(prepared: Prepared) -> None:
    """Start the agent in a session of its own and wait until it has taken the run over. Raises RunError."""
    run = prepared.run
    argv = [sys.executable, "-m", "ftdash.monitor.agent", "--run", str(run.path), "--detached", "--"]
    environment = {**prepared.env, AGENT_ENV: str(run.path)}
    environment.pop(RUN_DIR_ENV, None)
    with open(run.agent_log, "ab", buffering=0) as log:
        agent = subprocess.Popen(
            [*argv, *prepared.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    _agents.append(agent)
    deadline = time.monotonic() + AGENT_START_S
    while time.monotonic() < deadline:
        if run.read_manifest().agent_pids:
            return
        if agent.poll() is not None:
            words = run.agent_log.read_text(errors="replace").strip().splitlines()
            raise _not_started(run, words[-1] if words else f"exit code {agent.returncode}")
        time.sleep(0.02)
    agent.kill()
    raise _not_started(run, f"nothing for {AGENT_START_S:.0f} s, see {run.agent_log}")


def _not_started(run: RunDir, why: str) -> RunError:
    """The error to raise, once the manifest says the same."""
    manifest = run.read_manifest()
    manifest.state, manifest.reason = "failed", f"the agent did not start: {why}"
    run.write_manifest(manifest)
    return RunError(f"the agent of {run.run_id} did not start: {why}")


def _prepare_command(spec: LaunchSpec, root: Path) -> Prepared:
    """Somebody's own launcher: it runs as it is, in this folder, with this environment."""
    if spec.backend is Backend.LOCAL:
        checks.executable(spec.command)
        asked = checks.rendezvous_port(spec.command, os.environ)
        if asked is not None:
            checks.port_is_free(*asked)
    elif redact_command(spec.command, os.environ) != list(spec.command):
        raise LaunchError(
            f"--backend {spec.backend}: the command holds a secret, and other nodes read it from the run "
            "directory; let the script take it from its environment"
        )
    environment = {**os.environ, **dict(spec.env), INJECT_ENV: "1"}
    manifest = Manifest(
        backend=spec.backend,
        run=new_run_id(spec.name or Path(spec.command[0]).name),
        created=time.time(),
        name=spec.name,
        command=redact_command(spec.command, os.environ),
        plan=spec.plan.to_dict() if spec.plan else None,
        versions=_versions(),
        env=stored_env(environment),
        output_dir=str(spec.out.absolute()) if spec.out else "",
        directory=os.getcwd(),
        max_steps=spec.steps or 0,
    )
    return Prepared(_create(manifest, root), spec.command, environment, manifest)


def _prepare_plan(spec: LaunchSpec, plan: Plan, root: Path) -> Prepared:
    checks.packages(TRAIN_PACKAGES)
    try:
        mesh = Mesh.from_plan(plan)
        shape = resolve(plan)
        source = model_source(plan, shape)
    except (PlanError, ModelError, ConfigError) as error:
        raise LaunchError(str(error)) from None
    if spec.backend is Backend.LOCAL:
        device = checks.device(spec.device, plan.gpus)
    else:
        device = "cpu" if spec.device is Device.CPU else "cuda"
    if spec.data is None or spec.data.endswith((".jsonl", ".json")):
        checks.data_rows(data_file(spec.data), mesh.data_parallel)
    if spec.out is not None:
        checks.writable(spec.out)
    name = spec.name or shape.name
    run_id = new_run_id(name)
    run = RunDir(root / run_id)
    out = (spec.out or run.path / "out").absolute()
    steps = spec.steps or DEFAULT_STEPS
    train = TrainArgs(
        model=source,
        output_dir=str(out),
        data=str(Path(spec.data).absolute()) if spec.data and Path(spec.data).exists() else spec.data,
        steps=steps,
        device=device,
        save_steps=spec.save_steps,
        resume=str(spec.resume.absolute()) if spec.resume else None,
        extra=spec.train_args,
    )
    try:
        generated = generate(
            plan,
            shape=shape,
            train_args=train,
            config_dir=str(run.config),
            python=sys.executable,
            log_dir=str(run.logs),
        )
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    try:
        predicted = evaluate(plan).to_json()
    except PlanError as error:
        raise LaunchError(str(error)) from None
    command = generated.preferred.nodes[0]
    environment = {**_training_env(device, plan.gpus), **dict(spec.env)}
    manifest = Manifest(
        backend=spec.backend,
        run=run_id,
        created=time.time(),
        name=name,
        command=redact_command(command, os.environ),
        world_size=plan.gpus,
        plan=plan.to_dict(),
        predicted=predicted,
        versions=_versions(),
        env=stored_env(environment),
        output_dir=str(out),
        max_steps=steps,
    )
    created = _create(manifest, root)
    _write_configs(created, generated)
    return Prepared(created, command, environment, manifest, train)


def _create(manifest: Manifest, root: Path) -> RunDir:
    return RunDir.create(manifest, root)


def _write_configs(run: RunDir, generated: Generated) -> None:
    for name, text in generated.files.items():
        try:
            (run.config / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {run.config / name}: {error.strerror or error}") from error


def data_file(data: str | None) -> Path:
    """The local file behind `--data`; None is the set that ships."""
    from ftdash.engine.train.data import shipped_path

    return Path(data) if data is not None else shipped_path()


def _training_env(device: str, ranks: int) -> dict[str, str]:
    """This environment; on CPU the ranks share the cores instead of each taking all of them."""
    environment = {**os.environ, "PATH": own_path(os.environ)}
    if device == "cpu":
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    return environment


def _versions() -> dict[str, str]:
    """Installed versions, read without importing anything."""
    found = {}
    for name in ("ftdash", *VERSIONED):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
