"""Checks of DeepSpeed configs: stages, offload, saving, unknown keys, leaf modules."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle, is_false, is_true
from ftdash.engine.check.documents import Document, Kind, Sourced, words
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check
from ftdash.engine.configs.deepspeed import moe_block_classes

# Fields of DeepSpeedZeroConfig (deepspeed/runtime/zero/config.py), which forbids all others.
ZERO_KEYS = words(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
    "cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size "
    "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
    "stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance "
    "stage3_max_reuse_distance gather_16bit_weights_on_model_save "
    "stage3_gather_16bit_weights_on_model_save module_granularity_threshold "
    "stage3_module_granularity_threshold use_all_reduce_for_fetch_params "
    "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 "
    "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "save_muon_momentum_buffer_in_memory leaf_module mics_shard_size mics_hierarchical_params_gather "
    "allgather_bucket_size_in_bytes"
)

_LEAVES = words("MixtralSparseMoeBlock Qwen2MoeSparseMoeBlock Qwen3MoeSparseMoeBlock")


# Switches from before offload had sections of its own; DeepSpeed still reads them.
_OLD_SWITCHES = {"offload_param": "cpu_offload_param", "offload_optimizer": "cpu_offload"}


def _stage(document: Document) -> int | None:
    found = document.get("zero_optimization", "stage")
    if found is None:
        return 0 if "zero_optimization" in document.data else None
    value = int(found.value) if str(found.value).isdigit() else found.value
    return value if isinstance(value, int) else None


def _device(document: Document, part: str) -> Sourced | None:
    old = document.get("zero_optimization", _OLD_SWITCHES[part])
    if old and is_true(old):
        return Sourced("cpu", old.where)
    found = document.get("zero_optimization", part, "device")
    return found if found and str(found.value) not in ("none", "auto") else None


@check
def offload_by_stage(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        stage = _stage(document)
        param, optimizer = _device(document, "offload_param"), _device(document, "offload_optimizer")
        if param and stage is not None and stage < 3:
            yield error(
                "offload-param-stage",
                param.where,
                f"offload_param to {param.value} at stage {stage}: parameters are offloaded at stage 3 only",
                'set "stage": 3, or remove offload_param',
            )
        if optimizer and stage == 0:
            yield error(
                "offload-optimizer-stage",
                optimizer.where,
                f"offload_optimizer to {optimizer.value} at stage 0: nothing is partitioned, nothing is "
                "offloaded",
                'set "stage": 1, 2 or 3',
            )
        elif optimizer and optimizer.value == "nvme" and stage is not None and stage < 3:
            yield error(
                "offload-optimizer-stage",
                optimizer.where,
                f"offload_optimizer to nvme at stage {stage}: only stage 3 writes optimizer state to disk",
                'set "stage": 3, or "device": "cpu"',
            )
        for part, found in (("offload_param", param), ("offload_optimizer", optimizer)):
            if found and found.value == "nvme" and not document.get("zero_optimization", part, "nvme_path"):
                yield error("nvme-path", found.where, f"{part} to nvme names no nvme_path", 'add "nvme_path"')
            pinned = document.get("zero_optimization", part, "pin_memory")
            if found and is_true(pinned) and pinned:
                yield note(
                    "pinned-host-memory",
                    pinned.where,
                    f"{part} pins host memory: blocks round up to powers of two, cannot be swapped, and "
                    "count "
                    "against ulimit -l",
                    "plan host memory up to twice the offloaded bytes",
                )


@check
def gather_on_save(bundle: Bundle) -> Iterator[Finding]:
    """Without the gather, save_model() leaves shards and no model (transformers#25817, #34524)."""
    for document in bundle.of(Kind.DEEPSPEED):
        if _stage(document) != 3:
            continue
        for key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
            found = document.get("zero_optimization", key)
            if found is not None:
                break
        fix = f'set "{key}": true, or convert after training: ftdash checkpoint convert'.replace(
            "fp16", "16bit"
        )
        if is_false(found) and found:
            yield warning(
                "gather-16bit-off",
                found.where,
                f"{key} is false: save_model() leaves shards and no model that loads",
                fix,
            )
        elif found is None:
            yield note(
                "gather-16bit-off",
                document.where("zero_optimization", "stage"),
                "stage3_gather_16bit_weights_on_model_save is not set and defaults to false: save_model() "
                "leaves "
                "shards and no model that loads",
                fix,
            )


@check
def flags_of_the_launcher(bundle: Bundle) -> Iterator[Finding]:
    """The same traps as flags of `accelerate launch --use_deepspeed`."""
    for document, shell, launch in bundle.launches():
        stage = shell.number(launch.option("--zero_stage"))
        if launch.launcher != "accelerate" or stage is None:
            continue
        where = document.at(launch.line)
        device = shell.expand(launch.option("--offload_param_device") or "none")
        if stage < 3 and device != "none":
            yield error(
                "offload-param-stage",
                where,
                f"--offload_param_device {device} at --zero_stage {stage}: parameters are offloaded "
                "at stage 3 only",
                "--zero_stage 3, or --offload_optimizer_device",
            )
        if (
            stage == 3
            and shell.expand(launch.option("--zero3_save_16bit_model") or "false").lower() != "true"
        ):
            yield warning(
                "gather-16bit-off",
                where,
                "--zero_stage 3 without --zero3_save_16bit_model true: save_model() leaves shards and no "
                "model that loads",
                "--zero3_save_16bit_model true, or convert after training: ftdash checkpoint convert",
            )


@check
def unknown_zero_keys(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        for key in document.section("zero_optimization"):
            if key not in ZERO_KEYS:
                near = difflib.get_close_matches(str(key), ZERO_KEYS, 1, 0.75)
                yield error(
                    "zero-unknown-key",
                    document.where("zero_optimization", str(key)),
                    f"zero_optimization has no key {key}: DeepSpeed refuses the config",
                    f"did you mean {near[0]}?" if near else "remove it",
                )
        if not isinstance(document.data.get("zero_optimization", {}), dict):
            yield error(
                "zero-unknown-key",
                document.where("zero_optimization"),
                "zero_optimization must be a mapping with a stage",
                '"zero_optimization": {"stage": 2}',
            )


@check
def moe_without_leaf_modules(bundle: Bundle) -> Iterator[Finding]:
    """A rank whose tokens miss an expert skips its gather; the others wait (DeepSpeed#4808, #4966)."""
    backend = bundle.backend
    if backend is None or backend.stage != 3 or bundle.model is None or not bundle.model[0].is_moe:
        return
    shape = bundle.model[0]
    named = any(
        document.get("zero_optimization", "leaf_module") for document in bundle.of(Kind.DEEPSPEED)
    ) or any(
        document.get("deepspeed_config", "deepspeed_moe_layer_cls_names")
        for document in bundle.of(Kind.ACCELERATE)
    )
    called = any(
        call.last in ("set_z3_leaf_modules", "set_z3_leaf_module") for _, _, call in bundle.script_calls()
    )
    if named or called:
        return
    names = moe_block_classes(shape)
    # DeepSpeed 0.19 makes these leaf modules by itself (zero/leaf_module_config.py).
    by_itself = names[0] in _LEAVES and bundle.older("deepspeed", "0.19") is None
    yield (note if by_itself else warning)(
        "moe-leaf-module",
        backend.where,
        f"ZeRO-3 on {shape.name}, a mixture of experts, and no leaf module: an expert without tokens on one "
        "rank "
        "can hang all of them",
        f'add "leaf_module": {{"classes": ["{names[0]}"]}} to zero_optimization',
    )


@check
def universal_checkpoint(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        elastic = document.get("zero_optimization", "elastic_checkpoint")
        if is_true(elastic) and elastic and _stage(document) == 3:
            yield warning(
                "elastic-checkpoint",
                elastic.where,
                "elastic_checkpoint no longer works at stage 3",
                'use a universal checkpoint: "checkpoint": {"load_universal": true}',
            )


@check
def settings_of_stage_three(bundle: Bundle) -> Iterator[Finding]:
    """ZeRO++'s partitions and quantised weights belong to gathered parameters (DeepSpeed's tutorial)."""
    for document in bundle.of(Kind.DEEPSPEED):
        stage = _stage(document)
        for key in ("zero_hpz_partition_size", "zero_quantized_weights", "mics_shard_size"):
            found = document.get("zero_optimization", key)
            if found and found.value not in (False, 0, 1, -1) and stage is not None and stage < 3:
                yield warning(
                    "stage-three-setting",
                    found.where,
                    f"{key} at stage {stage}: it takes effect at stage 3 only",
                    f'set "stage": 3, or remove {key}',
                )


@check
def one_bit_optimizers(bundle: Bundle) -> Iterator[Finding]:
    """They compress the gradients' average by themselves, which ZeRO-2 and 3 have already divided."""
    for document in bundle.of(Kind.DEEPSPEED):
        kind, stage = document.get("optimizer", "type"), _stage(document)
        if kind and str(kind.value).lower() in ("onebitadam", "onebitlamb", "zerooneadam") and stage:
            yield error(
                "one-bit-optimizer",
                kind.where,
                f"{kind.value} at ZeRO stage {stage}: 1-bit optimizers work on whole gradients, without ZeRO",
                'AdamW, or "stage": 0',
            )
