"""Turns a plan into the files and commands that start it, or refuses it with the reason."""

from __future__ import annotations

import json
from pathlib import PurePath

from ftdash.engine.configs.accelerate import accelerate_yaml
from ftdash.engine.configs.commands import (
    accelerate_command,
    deepspeed_command,
    python_command,
    torchrun_command,
)
from ftdash.engine.configs.deepspeed import NVME_PATH, deepspeed_json, zero_plus_plus_json
from ftdash.engine.configs.refusals import (
    FSDP2,
    ZERO_STAGE,
    refusal,
    uses_distributed_config,
)
from ftdash.engine.configs.script import script_argv
from ftdash.engine.configs.types import Command, ConfigError, Generated, Rendezvous, TrainArgs, nodes_of
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Method, Offload, Plan, Strategy

PLAN_FILE = "plan.json"


def generate(
    plan: Plan,
    *,
    shape: ModelShape,
    train_args: TrainArgs,
    config_dir: str = ".",
    python: str | None = None,
    rendezvous: Rendezvous | None = None,
    log_dir: str | None = None,
) -> Generated:
    """The files of `plan`, to be written to `config_dir`, and the commands that use them.

    `python` set: commands start this interpreter's own launchers instead of what PATH offers.
    `rendezvous`: where several nodes meet, and the port of launchers that cannot pick one.
    `log_dir`: each rank's output also goes to files there. Raises ConfigError with the reason when the
    plan cannot be launched.
    """
    if reason := refusal(plan, shape):
        raise ConfigError(reason)
    mesh = Mesh.from_plan(plan)
    build = _Build(plan, mesh, shape, train_args, config_dir, python, rendezvous, log_dir)
    if uses_distributed_config(plan):
        return build.distributed_config()
    if plan.strategy in ZERO_STAGE:
        return build.deepspeed()
    if plan.gpus == 1:
        return build.single()
    if plan.strategy is Strategy.DDP:
        return build.ddp()
    return build.fsdp()


class _Build:
    """One generation: the inputs that every backend's builder shares."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        shape: ModelShape,
        train: TrainArgs,
        config_dir: str,
        python: str | None,
        rendezvous: Rendezvous | None,
        log_dir: str | None,
    ) -> None:
        self.plan, self.mesh, self.shape, self.train = plan, mesh, shape, train
        self.config_dir = config_dir
        self.python, self.rendezvous, self.log_dir = python, rendezvous, log_dir
        self.files = {PLAN_FILE: json.dumps(plan.to_dict(), indent=2) + "\n"}
        self.notes = _common_notes(plan, shape)

    def path(self, name: str) -> str:
        return str(PurePath(self.config_dir) / name)

    def script(self, deepspeed_file: str | None = None) -> tuple[str, ...]:
        return script_argv(self.plan, self.mesh, self.train, deepspeed_file)

    def result(self, *commands: Command, not_rehearsed: tuple[str, ...] = ()) -> Generated:
        return Generated(self.files, commands, tuple(self.notes), not_rehearsed)

    def single(self) -> Generated:
        if self.plan.strategy not in (Strategy.NONE, Strategy.DDP):
            self.notes.append(f"One GPU: {self.plan.strategy} has nothing to shard, the run is a plain one.")
        return self.result(python_command(self.script(), self.python))

    def ddp(self) -> Generated:
        name = "ddp.yaml"
        self.files[name] = accelerate_yaml(self.plan, self.mesh, self.shape, rendezvous=self.rendezvous)
        return self.result(self._accelerate(name), self._torchrun())

    def fsdp(self) -> Generated:
        name = "fsdp1.yaml" if self.plan.strategy is Strategy.FSDP1 else f"{self.plan.strategy}.yaml"
        self.files[name] = accelerate_yaml(
            self.plan,
            self.mesh,
            self.shape,
            rendezvous=self.rendezvous,
            on_cpu=self.train.device == "cpu",
        )
        self.notes += _fsdp_notes(self.plan)
        return self.result(self._accelerate(name))

    def deepspeed(self) -> Generated:
        plan, stage = self.plan, ZERO_STAGE[self.plan.strategy]
        json_name, yaml_name = f"zero{stage}.json", f"zero{stage}.yaml"
        on_cpu = self.train.device == "cpu"
        self.files[json_name] = deepspeed_json(plan, self.shape, on_cpu=on_cpu)
        self.files[yaml_name] = accelerate_yaml(
            plan, self.mesh, self.shape, rendezvous=self.rendezvous, deepspeed_file=self.path(json_name)
        )
        not_rehearsed: list[str] = []
        if stage == 3:
            self.files["zero3-plusplus.json"] = zero_plus_plus_json(plan, self.shape)
            not_rehearsed.append("zero3-plusplus.json")
        if plan.offload is Offload.NVME:
            not_rehearsed.append(json_name)
        self.notes += _deepspeed_notes(plan)
        hostfile = None
        if nodes_of(plan) > 1:
            hostfile = self.path("hostfile")
            self.files["hostfile"] = _hostfile(plan, self.rendezvous or Rendezvous())
        commands = [self._accelerate(yaml_name)]
        if plan.cp == 1:
            commands.append(
                deepspeed_command(
                    plan,
                    self.script(self.path(json_name)),
                    python=self.python,
                    rendezvous=self.rendezvous,
                    log_dir=self.log_dir,
                    hostfile=hostfile,
                )
            )
        return self.result(*commands, not_rehearsed=tuple(not_rehearsed))

    def distributed_config(self) -> Generated:
        self.notes += _distributed_config_notes(self.plan)
        return self.result(self._torchrun())

    def _accelerate(self, name: str) -> Command:
        return accelerate_command(
            self.plan, self.path(name), self.script(), python=self.python, log_dir=self.log_dir
        )

    def _torchrun(self) -> Command:
        return torchrun_command(
            self.plan, self.script(), python=self.python, rendezvous=self.rendezvous, log_dir=self.log_dir
        )


def _hostfile(plan: Plan, rendezvous: Rendezvous) -> str:
    nodes = nodes_of(plan)
    names = rendezvous.hosts or (rendezvous.address, *(f"NODE{rank}" for rank in range(1, nodes)))
    return "".join(f"{name} slots={plan.gpus // nodes}\n" for name in names)


def _common_notes(plan: Plan, shape: ModelShape) -> list[str]:
    notes = []
    if nodes_of(plan) > 1:
        notes.append("Run one command on each node, with the same code, data and configs everywhere.")
    if plan.method is Method.QLORA and plan.quant_storage == "uint8":
        notes.append("uint8 storage cannot be sharded: every rank keeps the whole quantised base.")
    if shape.is_moe:
        notes.append("Router logits are switched on in training, so that the auxiliary loss is computed.")
    if shape.is_moe and plan.expert_lora != "none":
        notes.append("Merge the expert adapters before serving: serving engines do not apply them.")
    return notes


def _fsdp_notes(plan: Plan) -> list[str]:
    notes = ["Checkpoints are DCP shards: `ftdash checkpoint convert` merges them; any rank count resumes."]
    if plan.strategy is Strategy.HSDP:
        notes.append("Keep the shard axis inside a node: only the replicas' gradients then cross nodes.")
    if plan.strategy is Strategy.FSDP1:
        notes.append("torch has deprecated FSDP1: `ftdash configs --convert` turns such a file into FSDP2.")
        if plan.method is not Method.FULL:
            notes.append("The script sets PEFT's wrap policy, which puts adapters into units of their own.")
    if plan.strategy in FSDP2 and plan.cp > 1:
        notes.append("Context parallelism needs sdpa without a mask, and sequences padded to 2 x cp.")
    return notes


def _deepspeed_notes(plan: Plan) -> list[str]:
    notes = []
    if plan.strategy is Strategy.ZERO3:
        notes.append("Saving gathers 16-bit weights on rank 0: its host must hold the whole model.")
        notes.append("zero3-plusplus.json adds hpZ and quantised collectives; it was not rehearsed.")
    notes.append("Another GPU count resumes from a universal checkpoint only (`ftdash checkpoint convert`).")
    if plan.offload is Offload.NVME:
        notes.append(f"NVMe offload writes to {NVME_PATH}: set your own path; it was not rehearsed.")
    if plan.cp > 1:
        notes.append("Ulysses needs attention heads divisible by the sequence-parallel size.")
    return notes


def _distributed_config_notes(plan: Plan) -> list[str]:
    notes = [
        (
            "The model is sharded while it loads (transformers DistributedConfig): such a run cannot resume, "
            "so only the model is saved (save_only_model)."
        )
    ]
    if plan.tp > 1:
        notes.append("Tensor parallelism all-reduces activations in every layer: keep it on NVLink.")
        if plan.method is Method.LORA:
            notes.append("LoRA on a tensor-parallel base needs PEFT 0.21.1 and Transformers 5.17 or newer.")
    return notes
