"""Runs a plan made small through the real launcher, training script and configs, and checks what came out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from ftdash.engine.checkpoint import verify
from ftdash.engine.checkpoint.convert import ConvertError, Target, convert
from ftdash.engine.checkpoint.recognise import Checkpoint, CheckpointKind, inspect
from ftdash.engine.configs import Command, ConfigError, Launcher, Rendezvous, TrainArgs, generate
from ftdash.engine.configs.commands import own_path
from ftdash.engine.configs.refusals import FSDP2, ZERO_STAGE, refusal, uses_distributed_config
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.load import ModelError, load_config_file, resolve
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Method, Plan, PlanError, Strategy
from ftdash.engine.rehearse.result import Rehearsal
from ftdash.engine.rehearse.small import (
    MAX_PROCESSES,
    RehearsalError,
    build_model,
    hub_config,
    small_config,
    small_plan,
)
from ftdash.monitor.records import Meta, Step, to_float
from ftdash.monitor.rundir import RUN_DIR_ENV, RunDir

STEPS = 4
SAVE_STEPS = 2
TIMEOUT_S = 600.0

_ALWAYS_LEFT = (
    "memory: the real model's weights, activations and buffers (see ftdash plan)",
    "NCCL, GPU kernels, and the speed of any of it",
)


def rehearse(plan: Plan, *, work: Path, launcher: Launcher | None = None, resume: bool = True) -> Rehearsal:
    """Shrink, train, save, resume on another number of ranks, convert, load, generate.

    `work` is a new or empty folder that keeps everything. Raises RehearsalError in one line at the first
    thing that does not hold; its `proved` says what did until then.
    """
    started = time.monotonic()
    proved: list[str] = []
    try:
        stage, left = _prepare(plan, work, launcher)
        proved.append(_mesh_kept(plan, stage.plan))
        left += _prove(stage, proved, resume)
    except RehearsalError as error:
        error.proved = tuple(proved)
        raise
    except (ConvertError, ConfigError, ModelError, PlanError) as error:
        raise RehearsalError(str(error), tuple(proved)) from error
    return Rehearsal(stage.plan, str(work), tuple(proved), (*left, *_ALWAYS_LEFT), time.monotonic() - started)


def _prepare(plan: Plan, work: Path, launcher: Launcher | None) -> tuple[_Stage, list[str]]:
    if reason := refusal(plan, resolve(plan)):
        raise RehearsalError(reason)
    small, left = small_plan(plan)
    model = work / "model"
    build_model(small_config(hub_config(plan), tp=small.tp, ep=small.ep), model)
    return _Stage(replace(small, config=str(model)), load_config_file(model), work, launcher), left


def _prove(stage: _Stage, proved: list[str], resume: bool) -> list[str]:
    """Run every step, adding to `proved`; the result is what this plan cannot show."""
    proved += stage.train()
    checkpoint = stage.checkpoint()
    if checkpoint is None:
        proved += stage.loaded()
        return ["resuming: a model sharded at load time cannot resume, only the model is saved"]
    proved += stage.converted(checkpoint)
    proved += stage.loaded()
    if not resume:
        return ["resuming on another number of ranks: not asked for"]
    if stage.plan.cp > 1:
        return ["resuming on another number of ranks: gloo has one sequence-parallel group, of all ranks"]
    proved += stage.resumed(checkpoint)
    return []


def _mesh_kept(plan: Plan, small: Plan) -> str:
    before, after = Mesh.from_plan(plan), Mesh.from_plan(small)
    axes = [
        f"{name} {getattr(before, name)} as {getattr(after, name)}"
        for name in ("replicate", "shard", "cp", "tp", "ep")
        if getattr(before, name) > 1 and getattr(after, name) > 1
    ]
    return f"axes kept above 1: {', '.join(axes)}" if axes else "one rank, no axis to keep"


class _Stage:
    """One rehearsal's folders, and the runs in them."""

    def __init__(self, plan: Plan, shape: ModelShape, work: Path, launcher: Launcher | None) -> None:
        self.plan, self.shape, self.work, self.launcher = plan, shape, work, launcher
        self.model = work / "model"
        self.out = work / "out"

    @property
    def saves_checkpoints(self) -> bool:
        return not uses_distributed_config(self.plan)

    def train(self) -> list[str]:
        metas = self._run("train", self.plan, self.out, save=SAVE_STEPS if self.saves_checkpoints else 0)
        meta = metas[0]
        proved = [
            (
                f"{STEPS} steps on {meta.world_size} ranks as {meta.strategy or self.plan.strategy}: "
                f"{meta.distributed_type}, {meta.wrapped_class}"
            )
        ]
        if (self.plan.strategy in FSDP2 and self.plan.gpus > 1) or uses_distributed_config(self.plan):
            if not meta.dtensor_params:
                raise RehearsalError(f"no parameter is a DTensor in {meta.wrapped_class}: nothing is sharded")
            proved.append(f"{meta.dtensor_params} parameters are DTensors")
        if self.plan.method is not Method.FULL:
            proved.append(
                f"{meta.trainable_params:,} of {meta.total_params:,} parameters learn, all of them adapters"
            )
        return proved

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, which must be whole. None where the plan cannot have one."""
        if not self.saves_checkpoints:
            return None
        found = inspect(self.out / f"checkpoint-{STEPS}")
        if found is None:
            raise RehearsalError(f"no checkpoint in {self.out / f'checkpoint-{STEPS}'}")
        if not found.whole:
            raise RehearsalError(f"checkpoint-{STEPS} is half written: {found.problem}")
        return found

    def converted(self, checkpoint: Checkpoint) -> list[str]:
        """The checkpoint as a model, equal to what the run itself exported."""
        final = inspect(self.out / "final")
        if final is None:
            raise RehearsalError("the run exported no final model")
        if checkpoint.kind not in (CheckpointKind.DCP, CheckpointKind.DEEPSPEED):
            return [f"checkpoint-{STEPS} is {checkpoint.kind}: it needs no conversion"]
        target = Target.ADAPTER if self.plan.method is not Method.FULL else Target.FULL
        merged = convert(checkpoint, self.work / "converted", target)
        made = inspect(merged.path)
        if made is None or not made.whole:
            raise RehearsalError(f"the converted checkpoint is {made.problem if made else 'no checkpoint'}")
        result = verify.compare(made, final)
        if not result.same:
            raise RehearsalError(
                f"the converted checkpoint differs from the trained weights in {len(result.different)} "
                "tensors "
                f"(by up to {result.largest_difference:.3g}), {len(result.only_left + result.only_right)} "
                "unmatched"
            )
        return [
            (
                f"checkpoint-{STEPS} ({checkpoint.kind}) converts to {target}: {result.equal} tensors, bit "
                "for bit"
            )
        ]

    def resumed(self, checkpoint: Checkpoint) -> list[str]:
        """Resume from the earlier checkpoint on another number of ranks, where the format allows it."""
        earlier = inspect(self.out / f"checkpoint-{SAVE_STEPS}")
        if earlier is None or not earlier.whole:
            raise RehearsalError(f"checkpoint-{SAVE_STEPS} is missing or half written")
        plan, source, how = self.plan, earlier.path, ""
        if plan.gpus > 1:
            plan = _other_world(plan)
        universal = self.plan.strategy in ZERO_STAGE
        if universal:
            source = convert(earlier, self.work / "universal", Target.UNIVERSAL).path
            how = " through a universal checkpoint"
        metas = self._run("resume", plan, self.work / "resumed", resume=source, universal=universal)
        steps = self._steps("resume", 0)
        if [step.step for step in steps] != list(range(SAVE_STEPS + 1, STEPS + 1)):
            raise RehearsalError(
                f"the resumed run did steps {[step.step for step in steps]}, not {SAVE_STEPS + 1} to {STEPS}"
            )
        return [
            f"resumed at step {SAVE_STEPS} on {metas[0].world_size} ranks instead of {self.plan.gpus}{how}"
        ]

    def loaded(self) -> list[str]:
        final = self.out / "final"
        if self.plan.method is Method.FULL:
            return verify.loads(final)
        return [*verify.loads(final, self.model), verify.adapters_learned(final)]

    def _run(
        self,
        name: str,
        plan: Plan,
        out: Path,
        *,
        save: int = 0,
        resume: Path | None = None,
        universal: bool = False,
    ) -> list[Meta]:
        """One training run to its end; every rank's meta record. Raises RehearsalError with its last line."""
        folder = self.work / name
        run = RunDir(folder / "run")
        for part in (run.path, run.telemetry, run.logs, run.config):
            part.mkdir(parents=True, exist_ok=True)
        train = TrainArgs(
            model=str(self.model),
            output_dir=str(out),
            steps=STEPS,
            save_steps=save,
            resume=str(resume) if resume else None,
            device="cpu",
        )
        try:
            generated = generate(
                plan,
                shape=self.shape,
                train_args=train,
                config_dir=str(run.config),
                python=sys.executable,
                rendezvous=Rendezvous(address="localhost", port=_free_port()),
            )
        except ConfigError as error:
            raise RehearsalError(str(error)) from None
        for file, text in generated.files.items():
            (run.config / file).write_text(
                _load_universal(text) if universal and file.endswith(".json") else text
            )
        command = generated.command(self.launcher) if self.launcher else generated.preferred
        _execute(command, run, name)
        metas = [self._meta(run, rank) for rank in range(plan.gpus)]
        losses = [to_float(step.loss) for rank in range(plan.gpus) for step in self._steps(name, rank)]
        if not losses or not all(loss is not None and math.isfinite(loss) for loss in losses):
            raise RehearsalError(f"{name}: a loss is missing or not finite")
        return metas

    def _meta(self, run: RunDir, rank: int) -> Meta:
        for record in _records(run.rank_file(rank), Meta):
            if record.wrapped_class:
                return record
        raise RehearsalError(f"rank {rank} told nothing of itself: it never came to its first step")

    def _steps(self, name: str, rank: int) -> list[Step]:
        return _records(RunDir(self.work / name / "run").rank_file(rank), Step)


def _other_world(plan: Plan) -> Plan:
    """Another number of ranks: one replica less, or one data-parallel rank more."""
    if plan.strategy is Strategy.HSDP:
        mesh = Mesh.from_plan(plan)
        return replace(plan, strategy=Strategy.FSDP, replicate=None, gpus=mesh.shard * plan.cp)
    unit = plan.tp * plan.cp
    more = plan.gpus + unit
    return replace(plan, gpus=more if more <= MAX_PROCESSES else plan.gpus - unit)


def _load_universal(text: str) -> str:
    config = json.loads(text)
    if "zero_optimization" not in config:
        return text
    return json.dumps({**config, "checkpoint": {"load_universal": True}}, indent=2)


def _execute(command: Command, run: RunDir, name: str) -> None:
    environment = {
        **os.environ,
        "PATH": own_path(os.environ),
        RUN_DIR_ENV: str(run.path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = run.logs / "launcher.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command.nodes[0],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environment,
            cwd=run.path,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RehearsalError(
                f"{name}: not done after {TIMEOUT_S:.0f} s{left_lock()}; see {log}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise RehearsalError(f"{name} ended with {code}: {_last_error(log)}; see {log}")


def left_lock() -> str:
    """A hint where a compilation that was killed left its lock: torch waits for it without end, silently."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    lock = next((path for path in Path(cache).glob("**/lock") if path.is_file()), None)
    return f" (waiting for {lock}? remove it when nothing compiles)" if lock else ""


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if "error: " in line:
            return line[line.index("error: ") + 7 :]
    errors = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][:300]


def _records(path: Path, kind: type) -> list:
    from ftdash.monitor import records

    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            record = records.decoder.decode(line)
            if isinstance(record, kind):
                found.append(record)
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clear(work: Path) -> None:
    """Remove a rehearsal's folder."""
    shutil.rmtree(work, ignore_errors=True)
