"""The way back: a plan read from files that people already have, with what could not be read said aloud."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from ftdash.engine.configs import torchtitan
from ftdash.engine.configs.types import ConfigError
from ftdash.engine.configs.values import BadValue, mapping, preset, whole
from ftdash.engine.foreign import BrokenText, parse_json, parse_toml, parse_yaml
from ftdash.engine.plan import Plan


def plan_from_file(path: str | Path) -> tuple[Plan, list[str]]:
    """A plan from an accelerate YAML, DeepSpeed JSON, Axolotl YAML, torchtitan TOML, a plan or a run.json.

    The notes say what was assumed and what was left out. Raises ConfigError in one line naming the file.
    """
    fields, notes = fields_from_file(path)
    try:
        return Plan.from_dict(fields), notes
    except msgspec.ValidationError as error:
        raise ConfigError(f"--from {path}: {error}") from None


def fields_from_file(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The plan's fields that the file sets, without defaults, so that flags can fill in the others."""
    data = _read(Path(path))
    try:
        return _fields(data, path)
    except BadValue as error:
        raise ConfigError(f"--from {path}: {error}") from None


def _fields(data: dict[str, Any], path: str | Path) -> tuple[dict[str, Any], list[str]]:
    keys = set(map(str, data))
    known = set(Plan.__struct_fields__)
    if isinstance(data.get("plan"), dict):
        return _known(data["plan"], known), []
    if (
        "strategy" in keys
        and keys & known >= {"strategy"}
        and "distributed_type" not in keys
        and "base_model" not in keys
    ):
        return _known(data, known), []
    if "distributed_type" in keys or "compute_environment" in keys:
        return _accelerate(data, Path(path))
    if "base_model" in keys:
        return _axolotl(data, Path(path))
    if torchtitan.is_config(data):
        return torchtitan.fields(data)
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}:
        return _deepspeed(data)
    raise ConfigError(
        f"--from {path}: holds no plan: give a saved plan, run.json, accelerate YAML, DeepSpeed JSON, "
        "Axolotl YAML or torchtitan TOML"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--from {path}: not a text file") from None
    try:
        if path.suffix.lower() == ".toml":
            data = parse_toml(text)
        else:
            data = parse_json(text) if text.lstrip().startswith("{") else parse_yaml(text)
    except BrokenText as error:
        raise ConfigError(f"--from {path}: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--from {path}: holds no plan: it is not a mapping")
    return data


def _known(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in known}


def _accelerate(data: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    notes: list[str] = []
    if count := whole(data, "num_processes"):
        fields["gpus"] = count
    machines = whole(data, "num_machines") or 1
    if machines > 1 and "gpus" in fields:
        fields["gpus_per_node"] = fields["gpus"] // machines
    kind = str(data.get("distributed_type", "NO")).upper()
    mixed = data.get("mixed_precision")
    if mixed is not None or kind != "DEEPSPEED":  # a DeepSpeed file owns the precision
        names = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8"}
        fields["precision"] = names.get(str(mixed).lower(), "fp32")
    if kind == "FSDP":
        _accelerate_fsdp(data, fields, notes)
    elif kind == "DEEPSPEED":
        _accelerate_deepspeed(data, path, fields, notes)
    elif kind.startswith("MULTI_"):
        fields["strategy"] = "ddp"
    else:
        fields["strategy"] = "none"
        fields["gpus"] = 1
    sizes = {
        re.sub(r"^parallelism_config_|_size$", "", str(key)): value
        for key, value in mapping(data, "parallelism_config").items()
        if isinstance(value, int)
    }
    if sizes.get("dp_replicate", 1) > 1:
        fields["replicate"] = sizes["dp_replicate"]
        if fields.get("strategy") == "fsdp" and sizes.get("dp_shard", 1) > 1:
            fields["strategy"] = "hsdp"
    if (context := max(sizes.get("cp", 1), sizes.get("sp", 1))) > 1:
        fields["cp"] = context
    if sizes.get("tp", 1) > 1:
        fields["tp"] = sizes["tp"]
    notes.append(
        "an accelerate file says nothing of the model, batch, sequence length or optimizer: give "
        "them as flags"
    )
    return fields, notes


def _accelerate_fsdp(data: dict[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    section = _bare(data.get("fsdp_config"))
    _fsdp_fields(section, fields, notes, str(section.get("version", 1)))
    machines = whole(data, "num_machines") or 1
    if "HYBRID" in str(section.get("sharding_strategy", "")).upper() and machines > 1:
        fields["strategy"], fields["replicate"] = "hsdp", machines
        notes.append(f"HYBRID_SHARD read as {machines} replicas, one a machine")


def _fsdp_fields(section: dict[str, Any], fields: dict[str, Any], notes: list[str], version: str) -> None:
    if version == "2":
        reshard = str(section.get("reshard_after_forward", True)).lower()
        fields["strategy"] = "fsdp-no-reshard" if reshard == "false" else "fsdp"
    else:
        fields["strategy"] = "fsdp1"
        if "SHARD_GRAD_OP" in str(section.get("sharding_strategy", "")).upper():
            notes.append(
                "SHARD_GRAD_OP under FSDP1 is planned as full sharding; fsdp-no-reshard is its FSDP2 form"
            )
    checkpointing = section.get("activation_checkpointing")
    if checkpointing is not None:
        fields["checkpointing"] = "full" if str(checkpointing).lower() == "true" else "none"
    if str(section.get("offload_params", section.get("cpu_offload", False))).lower() == "true":
        fields["offload"] = "all"


def _accelerate_deepspeed(data: dict[str, Any], path: Path, fields: dict[str, Any], notes: list[str]) -> None:
    settings = mapping(data, "deepspeed_config")
    named = settings.get("deepspeed_config_file")
    if named:
        file = Path(str(named)) if Path(str(named)).is_absolute() else path.parent / str(named)
        if not file.is_file():
            raise ConfigError(f"--from {path}: its deepspeed_config_file {named} is not there")
        more, more_notes = _deepspeed(_read(file))
        fields |= {key: value for key, value in more.items() if key != "gpus" or "gpus" not in fields}
        notes += more_notes
        return
    fields["strategy"] = _by_stage(settings, "zero_stage", 2)
    fields["offload"] = _offload(
        str(settings.get("offload_optimizer_device")), str(settings.get("offload_param_device"))
    )
    if steps := whole(settings, "gradient_accumulation_steps"):
        fields["grad_accum"] = steps


def _deepspeed(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    notes: list[str] = []
    zero = mapping(data, "zero_optimization")
    fields["strategy"] = _by_stage(zero, "stage", 0)
    devices = [str(mapping(zero, part).get("device")) for part in ("offload_optimizer", "offload_param")]
    fields["offload"] = _offload(*devices)
    for name, precision in (("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")):
        enabled = mapping(data, name).get("enabled")
        if enabled is True:
            fields["precision"] = precision
        elif enabled == "auto":
            notes.append(f'{name} is "auto": the trainer decides, bf16-mixed unless a flag says otherwise')
    micro, accumulation = (
        whole(data, "train_micro_batch_size_per_gpu"),
        whole(data, "gradient_accumulation_steps"),
    )
    if micro:
        fields["micro_batch"] = micro
    if accumulation:
        fields["grad_accum"] = accumulation
    total = whole(data, "train_batch_size")
    if total and micro and accumulation:
        world, rest = divmod(total, micro * accumulation)
        if rest:
            raise BadValue(f"train_batch_size {total} is no multiple of {micro} x {accumulation}")
        fields["gpus"] = world
        notes.append(
            f"{world} GPUs, from train_batch_size {total} / micro-batch {micro} / accumulation {accumulation}"
        )
    kind = str(mapping(data, "optimizer").get("type", "")).lower()
    if kind in ("adam", "adamw", "onebitadam"):
        fields["optimizer"] = "adamw"
    elif kind:
        notes.append(f"optimizer {kind} is not planned: adamw stands in for it")
    if hpz := zero.get("zero_hpz_partition_size"):
        notes.append(f"ZeRO++ (zero_hpz_partition_size {hpz}) is not planned")
    return fields, notes


def _by_stage(section: dict[str, Any], key: str, default: int) -> str:
    """The strategy of a ZeRO stage; "auto" is left to accelerate, whose own default is 2. Raises BadValue."""
    value = section.get(key, default)
    stage = {"auto": "2"}.get(str(value), str(value))
    if stage not in ("0", "1", "2", "3") or isinstance(value, bool):
        raise BadValue(f"{key} is {str(value)[:60]!r}: one of 0, 1, 2, 3")
    return "ddp" if stage == "0" else f"zero{stage}"


def _offload(optimizer: str, param: str) -> str:
    if "nvme" in (optimizer, param):
        return "nvme"
    if param == "cpu":
        return "all"
    return "optimizer" if optimizer == "cpu" else "none"


def _axolotl(data: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    fields: dict[str, Any] = {}
    notes: list[str] = []
    if model := preset(str(data["base_model"]), "base_model", notes):
        fields["model"] = model
    for key, field in (
        ("micro_batch_size", "micro_batch"),
        ("gradient_accumulation_steps", "grad_accum"),
        ("sequence_len", "seq_len"),
        ("lora_r", "lora_rank"),
        ("tensor_parallel_size", "tp"),
        ("context_parallel_size", "cp"),
        ("expert_parallel_size", "ep"),
        ("dp_replicate_size", "replicate"),
    ):
        if value := whole(data, key):
            fields[field] = value
    adapter = data.get("adapter")
    fields["method"] = str(adapter) if adapter in ("lora", "qlora") else "full"
    if adapter == "lora" and data.get("load_in_4bit"):
        fields["method"] = "qlora"
    if data.get("load_in_8bit") and adapter:
        fields["method"], fields["quant"] = "qlora", "int8"
    if fields["method"] != "full":
        _axolotl_adapter(data, fields)
    _axolotl_strategy(data, path, fields, notes)
    _axolotl_precision(data, fields, notes)
    if data.get("gradient_checkpointing"):
        fields["checkpointing"] = "full"
        kwargs = data.get("gradient_checkpointing_kwargs")
        fields["reentrant"] = isinstance(kwargs, dict) and kwargs.get("use_reentrant") is True
    elif "checkpointing" not in fields:
        fields["checkpointing"] = "none"
    if not data.get("sample_packing"):
        notes.append("samples are padded, not packed: --batching longest --mean-len N counts what that costs")
    world = data.get("dp_shard_size")
    if isinstance(world, int) and world > 0:
        fields["gpus"] = world * fields.get("replicate", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    else:
        notes.append("the number of GPUs stands in the launch command: give --gpus")
    return fields, notes


def _axolotl_adapter(data: dict[str, Any], fields: dict[str, Any]) -> None:
    modules = data.get("lora_target_modules")
    if data.get("lora_target_linear"):
        fields["lora_targets"] = ("all-linear",)
    elif isinstance(modules, list) and modules:
        fields["lora_targets"] = tuple(map(str, modules))
    elif isinstance(modules, str):
        fields["lora_targets"] = (modules,)
    if saved := data.get("lora_modules_to_save"):
        fields["modules_to_save"] = tuple(map(str, saved if isinstance(saved, list) else [saved]))
    if "expert" in str(data.get("lora_target_parameters")):
        fields["expert_lora"] = "full"
    if data.get("peft_use_dora"):
        fields["dora"] = True


def _axolotl_strategy(data: dict[str, Any], path: Path, fields: dict[str, Any], notes: list[str]) -> None:
    if named := data.get("deepspeed"):
        file = path.parent / str(named)
        if file.is_file():
            more, more_notes = _deepspeed(_read(file))
            fields["strategy"], fields["offload"] = more["strategy"], more["offload"]
            notes += more_notes
        else:
            stage = re.search(r"zero[_-]?([123])", str(named).lower())
            fields["strategy"] = f"zero{stage.group(1)}" if stage else "zero3"
            notes.append(f"{named} is not there: {fields['strategy']} read from its name")
    elif data.get("fsdp") or data.get("fsdp_config"):
        section = _bare(data.get("fsdp_config"))
        version = str(data.get("fsdp_version") or section.get("version") or 1)
        flags = " ".join(map(str, data.get("fsdp") or []))
        _fsdp_fields(section, fields, notes, version)
        if version == "2" and fields.get("replicate", 1) > 1:
            fields["strategy"] = "hsdp"
        if "offload" in flags:
            fields["offload"] = "all"
    else:
        fields["strategy"] = "ddp"


def _axolotl_precision(data: dict[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    if str(data.get("bf16")).lower() in ("true", "auto", "full"):
        fields["precision"] = "bf16" if str(data.get("bf16")).lower() == "full" else "bf16-mixed"
    elif data.get("fp16"):
        fields["precision"] = "fp16-mixed"
    elif data.get("bf16") is False:
        fields["precision"] = "fp32"
    if data.get("flash_attention") or "flash" in str(data.get("attn_implementation")):
        fields["attention"] = "flash"
    named = str(data.get("optimizer", ""))
    optimizers = {
        "adamw_torch": "adamw-foreach",
        "adamw_torch_fused": "adamw",
        "adamw_bnb_8bit": "adamw-8bit",
        "adamw_8bit": "adamw-8bit",
        "adamw_torch_8bit": "adamw-8bit",
        "adamw_torch_4bit": "adamw-4bit",
        "paged_adamw_8bit": "paged-adamw-8bit",
        "adafactor": "adafactor",
        "sgd": "sgd",
        "lion": "lion",
        "muon": "muon",
    }
    if named in optimizers:
        fields["optimizer"] = optimizers[named]
    elif named:
        notes.append(f"optimizer {named} is not planned: adamw stands in for it")


def _bare(section: Any) -> dict[str, Any]:
    return (
        {str(key).removeprefix("fsdp_"): value for key, value in (section or {}).items()}
        if isinstance(section, dict)
        else {}
    )
