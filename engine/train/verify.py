"""What really runs, read off the prepared trainer or model, held against what was asked for.

Exit code 0 and a falling loss prove nothing: accelerate turns FSDP on a CPU into DDP, and a launcher that
starts one process where two were asked for says nothing either. These checks run on every rank before the
first step.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftdash.engine.train.options import (
    FSDP2_STRATEGIES,
    ZERO_STAGES,
    Options,
    TrainError,
    TrainStrategy,
    Variant,
)


class Fallback(TrainError):
    """A library runs something else than what was asked for."""


@dataclass(frozen=True, slots=True)
class Reality:
    """What one rank found. Parameters are counted over all ranks; `dtensor_params` counts tensors."""

    distributed_type: str
    world_size: int
    backend: str
    wrapped_class: str
    dtensor_params: int
    sharded_params: int  # tensors of which this rank holds less than the whole
    unsharded_trainable: int  # trainable tensors that are no DTensors
    unsharded_packed: int  # 4-bit weights that are no DTensors
    zero_stage: int
    total_params: int
    trainable_params: int
    adapter_params: int
    quantized_layers: int
    mesh: dict[str, int]

    def meta(self) -> dict[str, Any]:
        """The fields of a meta record."""
        fields = asdict(self)
        for name in ("sharded_params", "unsharded_trainable", "unsharded_packed", "mesh"):
            fields.pop(name)
        return fields


def asked_strategy(options: Options, deepspeed: str | None = None) -> TrainStrategy:
    """The strategy asked for; `auto` is what the launcher's environment (or the DeepSpeed file) says."""
    if options.strategy is not TrainStrategy.AUTO:
        return options.strategy
    environ = os.environ
    if options.tp > 1:
        return TrainStrategy.TP
    if options.ep > 1:
        return TrainStrategy.EP
    if deepspeed or environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return _asked_stage(deepspeed or environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        if environ.get("FSDP_VERSION", "1") != "2":
            return TrainStrategy.FSDP1
        if int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")) > 1:
            return TrainStrategy.HSDP
        reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        return TrainStrategy.FSDP_NO_RESHARD if reshard == "false" else TrainStrategy.FSDP
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        return TrainStrategy.DDP
    return TrainStrategy.NONE


def _asked_stage(path: str | None) -> TrainStrategy:
    """The ZeRO stage of a DeepSpeed file, or of accelerate's environment without one."""
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    if path:
        try:
            stage = int(json.loads(Path(path).read_text())["zero_optimization"]["stage"])
        except OSError as error:
            raise TrainError(f"--deepspeed {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError):
            raise TrainError(f"--deepspeed {path}: no zero_optimization stage in it") from None
    for strategy, number in ZERO_STAGES.items():
        if number == stage:
            return strategy
    raise TrainError(f"DeepSpeed stage {stage}: name a stage from 1 to 3")


def observe(wrapped: Any, model: Any, distributed_type: str, zero_stage: int = 0) -> Reality:
    """Read a prepared model. `wrapped` is what is called in training, `model` the one inside."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    ready = dist.is_available() and dist.is_initialized()
    total = trainable = adapters = dtensors = sharded = unsharded = unsharded_packed = 0
    mesh: dict[str, int] = {}
    packed = _packed_weights(model)
    for name, parameter in model.named_parameters():
        size = packed.get(id(parameter)) or _true_size(parameter)
        is_dtensor = isinstance(parameter, DTensor)
        total += size
        dtensors += is_dtensor
        if is_dtensor:
            local = parameter.to_local().numel()
            sharded += local < parameter.numel()
            names = parameter.device_mesh.mesh_dim_names or ("ranks",)
            mesh.update(zip(names, parameter.device_mesh.shape, strict=True))
        elif int(getattr(parameter, "ds_numel", 0) or 0) > parameter.numel():
            sharded += 1
        unsharded_packed += id(parameter) in packed and not is_dtensor
        if parameter.requires_grad:
            trainable += size
            adapters += size if "lora_" in name else 0
            unsharded += not is_dtensor
    return Reality(
        distributed_type=distributed_type,
        world_size=dist.get_world_size() if ready else 1,
        backend=dist.get_backend() if ready else "",
        wrapped_class=type(wrapped).__name__,
        dtensor_params=dtensors,
        sharded_params=sharded,
        unsharded_trainable=unsharded,
        unsharded_packed=unsharded_packed,
        zero_stage=zero_stage,
        total_params=total,
        trainable_params=trainable,
        adapter_params=adapters,
        quantized_layers=len(packed),
        mesh=mesh,
    )


def _packed_weights(model: Any) -> dict[int, int]:
    """The 4-bit weights by identity, with the number of values that each stands for.

    Found by bitsandbytes' module class: under FSDP2 the weight itself is a DTensor that no longer says so.
    """
    return {
        id(module.weight): module.in_features * module.out_features
        for module in model.modules()
        if type(module).__name__.endswith("Linear4bit") and hasattr(module, "quant_state")
    }


def _true_size(parameter: Any) -> int:
    """Elements over all ranks, also of a parameter that ZeRO-3 has partitioned."""
    return int(getattr(parameter, "ds_numel", 0) or 0) or int(parameter.numel())


def check(options: Options, asked: TrainStrategy, found: Reality, mesh: dict[str, int] | None = None) -> None:
    """Raise Fallback, naming what was asked for and what runs, when the two differ.

    `mesh` are the sizes that the plain loop's mesh must have; None under a trainer.
    """
    if mesh is not None:
        problem = _mesh_problem(mesh, found) or _variant_problem(options, found)
    else:
        problem = _strategy_problem(options, asked, found) or _variant_problem(options, found)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if found.world_size != launched:
        problem = f"the launcher started {launched} processes, this group has {found.world_size}"
    if problem:
        raise Fallback(f"asked for {asked}, but {problem}")


def _strategy_problem(options: Options, asked: TrainStrategy, found: Reality) -> str:
    kind, world = found.distributed_type, found.world_size
    if asked is TrainStrategy.NONE:
        return "" if world == 1 else f"{world} processes run ({kind})"
    if world < 2:
        return f"only one process runs ({kind}): start it with accelerate launch or torchrun"
    if asked is TrainStrategy.DDP:
        if kind not in ("MULTI_CPU", "MULTI_GPU") or found.wrapped_class != "DistributedDataParallel":
            return f"{kind} runs, with {found.wrapped_class}"
        return ""
    if asked in FSDP2_STRATEGIES:
        return _fsdp2_problem(options, asked, found)
    if asked is TrainStrategy.FSDP1:
        if kind != "FSDP" or found.wrapped_class != "FullyShardedDataParallel":
            return f"{kind} runs, with {found.wrapped_class}"
        return ""
    if asked in ZERO_STAGES:
        if kind != "DEEPSPEED" or found.wrapped_class != "DeepSpeedEngine":
            return f"{kind} runs, with {found.wrapped_class}"
        if found.zero_stage != ZERO_STAGES[asked]:
            return f"the DeepSpeed config is of stage {found.zero_stage}"
        if asked is TrainStrategy.ZERO3 and not found.sharded_params:
            return "no parameter is partitioned"
        return ""
    return f"{kind} runs: the trainer cannot carry it"


def _fsdp2_problem(options: Options, asked: TrainStrategy, found: Reality) -> str:
    if found.distributed_type != "FSDP":
        return f"{found.distributed_type} runs, with {found.wrapped_class}"
    if not found.wrapped_class.startswith("FSDP") or not found.dtensor_params:
        return f"the model is a {found.wrapped_class} with {found.dtensor_params} DTensor parameters (FSDP1?)"
    if found.unsharded_trainable or not found.sharded_params:
        return f"{found.unsharded_trainable} trainable tensors are not sharded"
    if found.unsharded_packed and options.quant_storage == "bf16":
        return f"{found.unsharded_packed} quantised weights are not sharded"
    replicas = found.mesh.get("dp_replicate", 1)
    if asked is TrainStrategy.HSDP and replicas < 2:
        return f"the mesh {found.mesh} has no replicas: plain FSDP"
    if options.replicate > 1 and replicas != options.replicate:
        return f"{replicas} replicas run, not {options.replicate}"
    if asked is not TrainStrategy.HSDP and replicas > 1:
        return f"the mesh {found.mesh} replicates: HSDP"
    return ""


def _mesh_problem(mesh: dict[str, int], found: Reality) -> str:
    """Tensor and expert parallelism: the meshes must have the sizes asked for, and tensors must be split."""
    missing = {name: size for name, size in mesh.items() if found.mesh.get(name, 1) != size}
    if missing:
        return f"the parameters' meshes are {found.mesh}, not {mesh}"
    if not found.sharded_params:
        return f"no parameter is sharded ({found.wrapped_class})"
    return ""


def _variant_problem(options: Options, found: Reality) -> str:
    if options.variant is Variant.FULL:
        if found.adapter_params:
            return f"full training was asked for and {found.adapter_params} adapter parameters learn"
        return ""
    if not found.adapter_params or found.adapter_params != found.trainable_params:
        return (
            f"{options.variant} runs with {found.adapter_params} adapter parameters "
            f"of {found.trainable_params} that learn"
        )
    if options.variant is Variant.QLORA and not found.quantized_layers:
        return "no layer is quantised"
    return ""
