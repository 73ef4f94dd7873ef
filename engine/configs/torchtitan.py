"""What a torchtitan job file (TOML) says of a run, as fields of a plan."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from ftdash.engine.configs.values import BadValue, mapping, preset, whole
from ftdash.engine.model.shape import ModelShape

REST = -1  # data_parallel_shard_degree: whatever the other degrees leave of the world
DEGREES = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
}


def is_config(data: dict[str, Any]) -> bool:
    """Whether the mapping has torchtitan's sections."""
    return isinstance(data.get("parallelism"), dict) or (
        isinstance(data.get("model"), dict) and "flavor" in data["model"]
    )


def degrees(data: dict[str, Any]) -> dict[str, int]:
    """Sizes of the mesh axes, 1 where the file is silent; only `shard` may be REST. Raises BadValue."""
    sizes = {}
    for key, axis in DEGREES.items():
        value = mapping(data, "parallelism").get(key, REST if axis == "shard" else 1)
        if type(value) is not int or (value < 1 and (axis, value) != ("shard", REST)):
            raise BadValue(f"{key} is {str(value)[:60]!r}: must be a whole number from 1")
        sizes[axis] = value
    return sizes


def fields(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The plan's fields that the file sets, and what was assumed or left out. Raises BadValue."""
    found: dict[str, Any] = {"method": "full"}
    notes: list[str] = []
    if name := _model(data, notes):
        found["model"] = name
    sizes = degrees(data)
    found |= {axis: sizes[axis] for axis in ("tp", "cp", "pp", "ep") if sizes[axis] > 1}
    _data_parallel(mapping(data, "parallelism"), sizes, found, notes)
    _training(mapping(data, "training"), sizes, found, notes)
    mode = mapping(data, "activation_checkpoint").get("mode", "selective")
    found["checkpointing"] = mode if mode in ("none", "selective", "full") else "selective"
    if "optimizer" in data and str(mapping(data, "optimizer").get("name", "AdamW")).lower() != "adamw":
        notes.append(f"optimizer {mapping(data, 'optimizer')['name']} is not planned: adamw stands in for it")
    compiled = mapping(data, "compile")
    if compiled.get("enable") and "model" in compiled.get("components", ["model"]):
        found["compile"] = True
    if any(key in data for key in ("quantize", "float8")):
        notes.append("quantised compute (float8, mx) is not read: give --precision")
    notes.append("torchtitan trains with its own trainer: what is planned here is launched there")
    return found, notes


def preset_of(data: dict[str, Any]) -> ModelShape | None:
    """The preset of the named family and flavor, by its tokenizer's folder where that is a model's name."""
    from ftdash.engine.model.load import ModelError, load_preset

    model = mapping(data, "model")
    spelled = re.sub(r"^(llama)(\d)", r"\1-\2", str(model.get("name", "")).replace("_", "-"))
    folder = PurePath(str(model.get("hf_assets_path") or model.get("tokenizer_path") or "")).name
    for name in (folder, f"{spelled}-{model.get('flavor', '')}".lower()):
        try:
            return load_preset(name)
        except ModelError:
            continue
    return None


def _model(data: dict[str, Any], notes: list[str]) -> str | None:
    shape = preset_of(data)
    if shape is not None:
        return shape.name
    model = mapping(data, "model")
    return preset(f"{model.get('name', '')} {model.get('flavor', '')}".strip(), "model", notes)


def _data_parallel(
    parallelism: dict[str, Any], sizes: dict[str, int], found: dict[str, Any], notes: list[str]
) -> None:
    replicate, shard = sizes["replicate"], sizes["shard"]
    never = parallelism.get("fsdp_reshard_after_forward") == "never"
    if shard == 1:
        found["strategy"] = "ddp" if replicate > 1 else "none"
    elif replicate > 1:
        found["strategy"], found["replicate"] = "hsdp", replicate
    else:
        found["strategy"] = "fsdp-no-reshard" if never else "fsdp"
    if shard == REST:
        notes.append("data_parallel_shard_degree -1 takes what is left of the world: give --gpus")
    else:
        found["gpus"] = replicate * shard * sizes["tp"] * sizes["cp"] * sizes["pp"]


def _training(
    training: dict[str, Any], sizes: dict[str, int], found: dict[str, Any], notes: list[str]
) -> None:
    names = (("batch_size", "micro_batch"), ("local_batch_size", "micro_batch"), ("seq_len", "seq_len"))
    for key, field in names:
        if value := whole(training, key):
            found[field] = value
    total = training.get("global_batch_size", REST)
    if type(total) is int and total > 0:
        ranks = sizes["replicate"] * sizes["shard"]
        micro = found.get("micro_batch", 1)
        if sizes["shard"] == REST:
            notes.append(f"global_batch_size {total}: give --grad-accum once the number of GPUs is known")
        elif total % (micro * ranks):
            raise BadValue(f"global_batch_size {total} is no multiple of {micro} x {ranks} ranks")
        else:
            found["grad_accum"] = total // (micro * ranks)
    low = training.get("mixed_precision_param", "bfloat16") == "bfloat16"
    found["precision"] = "bf16-mixed" if low else "fp32"
    reduce = training.get("mixed_precision_reduce", "float32")
    found["reduce_dtype"] = "bf16" if reduce == "bfloat16" else "fp32"
    if training.get("enable_cpu_offload"):
        found["offload"] = "all"
