"""What speaks against a launch before it is started, as findings, each with the change that mends it."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

from ftdash.engine.check.findings import Change, Finding, error, note, warning
from ftdash.engine.configs.refusals import refusal, uses_distributed_config
from ftdash.engine.configs.remedies import flags
from ftdash.engine.hardware import HardwareError
from ftdash.engine.launch import checks
from ftdash.engine.launch.local import data_file
from ftdash.engine.launch.spec import Backend, Device, LaunchError, LaunchSpec
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.load import ModelError
from ftdash.engine.plan import Plan, PlanError
from ftdash.engine.planner.result import Verdict

LONG_RUN = 200  # steps; a shorter run is cheaper to repeat than to save
SAVES = 5  # checkpoints that a long run is offered


def preflight(spec: LaunchSpec) -> list[Finding]:
    """Findings of the launch itself; those of its plan and files are the checks' own."""
    job = _job(spec) if spec.backend is Backend.SLURM else ()
    if spec.command:
        return [*_command(spec), *job]
    if spec.plan is None or refusal(spec.plan):
        return []
    return [*_places(spec, spec.plan), *_memory(spec, spec.plan), *job, *_saving(spec, spec.plan)]


def _job(spec: LaunchSpec) -> Iterator[Finding]:
    from ftdash.engine.slurm.preflight import job_findings

    return job_findings(spec)


def _command(spec: LaunchSpec) -> Iterator[Finding]:
    if spec.backend is not Backend.LOCAL:
        return
    yield from _refused("launcher", "command", lambda: checks.executable(spec.command))
    asked = checks.rendezvous_port(spec.command, os.environ)
    if asked is None:
        return
    port, flag = asked
    free = _free_port()
    change: Change = (("command", shlex.join(_with_port(spec.command, port, free))),)
    yield from _refused(
        "port-taken",
        "command",
        lambda: checks.port_is_free(port, flag),
        f"a free port: {free}",
        change if flag in checks.PORT_FLAGS or flag == checks.STATIC_FLAG else (),
    )


def _with_port(command: tuple[str, ...], port: int, free: int) -> list[str]:
    """The command on another port: the flag that names it, or one put behind the launcher."""
    words = list(command)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in checks.PORT_FLAGS and equals and value == str(port):
            words[index] = f"{name}={free}"
            return words
        if name in checks.PORT_FLAGS and words[index + 1 : index + 2] == [str(port)]:
            words[index + 1] = str(free)
            return words
    after = next(index for index, word in enumerate(words) if checks.is_launcher(word)) + 1
    accelerate = words[after : after + 1] == ["launch"]
    flag = "--main_process_port" if accelerate else "--master_port"
    words[after + accelerate : after + accelerate] = [flag, str(free)]
    return words


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _places(spec: LaunchSpec, plan: Plan) -> Iterator[Finding]:
    """Device, data and output folder; what a run elsewhere finds cannot be seen from here."""
    if spec.backend is Backend.LOCAL:
        yield from _refused(
            "device", "device", lambda: _try_device(spec, plan), "--device cpu", (("device", "cpu"),)
        )
    if spec.data is None or spec.data.endswith((".jsonl", ".json")):
        ranks = Mesh.from_plan(plan).data_parallel
        yield from _refused(
            "data", "data", lambda: checks.data_rows(data_file(spec.data), ranks), "name another file"
        )
    if spec.out is not None:
        out = spec.out
        yield from _refused(
            "output", "out", lambda: checks.writable(out), "below the run directory", (("out", ""),)
        )


def _try_device(spec: LaunchSpec, plan: Plan) -> None:
    checks.device(spec.device, plan.gpus)


def _refused(
    code: str, where: str, hold: Callable[[], None], fix: str = "correct it", change: Change = ()
) -> Iterator[Finding]:
    try:
        hold()
    except LaunchError as refused:
        yield error(code, where, str(refused), fix, change)


def _memory(spec: LaunchSpec, plan: Plan) -> Iterator[Finding]:
    """The plan's verdict, where GPUs will run it, with the first advice that makes it fit."""
    from ftdash.engine.planner import evaluate

    if spec.device is Device.CPU or (spec.backend is Backend.LOCAL and not checks.gpu_count()):
        return
    try:
        found = evaluate(plan)
    except (PlanError, ModelError, HardwareError):
        return
    if found.verdict is not Verdict.DOES_NOT_FIT:
        return
    memory = found.memory
    better = next((one for one in found.advice if one.plan is not None and one.saves_bytes > 0), None)
    yield warning(
        "does-not-fit",
        "plan",
        f"{memory.device / 1e9:.1f} of {memory.capacity / 1e9:.1f} GB a GPU at {memory.peak_phase}",
        better.text if better else "a smaller batch, more GPUs, or another strategy: see Plan",
        _difference(plan, better.plan) if better and better.plan else (),
    )


def _difference(before: Plan, after: Plan) -> Change:
    names = Plan.__struct_fields__
    return tuple(
        (name, getattr(after, name)) for name in names if getattr(after, name) != getattr(before, name)
    )


def _saving(spec: LaunchSpec, plan: Plan) -> Iterator[Finding]:
    steps = spec.steps or 0
    if spec.save_steps or steps < LONG_RUN or uses_distributed_config(plan):
        return
    every = max(1, steps // SAVES)
    change = (("save_steps", every),)
    yield note(
        "no-checkpoints",
        "save_steps",
        f"{steps:,} steps and no checkpoint on the way: a crash loses all of them",
        flags(change),
        change,
    )
