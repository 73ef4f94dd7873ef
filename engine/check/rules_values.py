"""Checks of the files themselves: keys said twice or misspelt, values that the reader does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind, words
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check

_DEVICES = words("none cpu nvme auto")
_STAGES = words("0 1 2 3 auto")
# What accelerate's launcher and DeepSpeed's config model take, in any case of letters
# (accelerate/utils/dataclasses.py; deepspeed/runtime/zero/config.py and offload_config.py).
_CHOICES: dict[Kind, dict[tuple[str, ...], frozenset[str]]] = {
    Kind.ACCELERATE: {
        ("distributed_type",): words(
            "NO MULTI_CPU MULTI_GPU DEEPSPEED FSDP MEGATRON_LM XLA MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA "
            "MULTI_HPU MULTI_XPU MULTI_NEURON TP TPU DATA_PARALLEL MODEL_PARALLEL False"
        ),
        ("mixed_precision",): words("no fp16 bf16 fp8 False"),
        ("deepspeed_config", "zero_stage"): _STAGES,
        ("deepspeed_config", "offload_optimizer_device"): _DEVICES,
        ("deepspeed_config", "offload_param_device"): _DEVICES,
        ("deepspeed_config", "deepspeed_multinode_launcher"): words(
            "pdsh standard openmpi mvapich mpich nossh slurm"
        ),
    },
    Kind.DEEPSPEED: {
        ("zero_optimization", "stage"): _STAGES,
        ("zero_optimization", "offload_optimizer", "device"): _DEVICES,
        ("zero_optimization", "offload_param", "device"): _DEVICES,
    },
}
# Keys whose readers drop what they do not know: a misspelt one is a setting that never takes effect.
_DROPPED: dict[Kind, dict[tuple[str, ...], frozenset[str]]] = {
    Kind.ACCELERATE: {
        ("deepspeed_config",): words(
            "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
            "offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps "
            "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile "
            "deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher "
            "deepspeed_moe_layer_cls_names"
        ),
        ("parallelism_config",): words(
            "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
            "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_cp_backend "
            "parallelism_config_cp_comm_strategy parallelism_config_sp_size parallelism_config_sp_backend "
            "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
            "parallelism_config_sp_attn_implementation dp_replicate_size dp_shard_size tp_size cp_size "
            "sp_size cp_backend sp_backend cp_comm_strategy"
        ),
    },
    Kind.DEEPSPEED: {
        (): words(
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
            "managed_gradient_accumulation optimizer scheduler zero_optimization "
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print "
            "wall_clock_breakdown memory_breakdown "
            "gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op "
            "communication_data_type seq_parallel_communication_data_type sparse_gradients fp16 bf16 "
            "bfloat16 amp torch_autocast activation_checkpointing checkpoint data_types dump_state "
            "disable_allgather flops_profiler tensorboard wandb csv_monitor comet monitor_config "
            "comms_logger autotuning elasticity aio compression_training data_efficiency curriculum_learning "
            "progressive_layer_drop eigenvalue pipeline tensor_parallel sequence_parallel_size "
            "expert_parallel hybrid_engine nebula compile dataloader_drop_last log_level weight_quantization "
            "use_data_before_expert_parallelism vocabulary_size sparse_attention zenflow timers "
            "graph_harvesting keep_in_fp32_modules disable_python_gc"
        ),
    },
    Kind.TORCHTITAN: {
        ("parallelism",): words(
            "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
            "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel "
            "pipeline_parallel_degree pipeline_parallel_split_points module_fqns_per_model_part "
            "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
            "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
            "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap "
            "context_parallel_degree context_parallel_rotate_method context_parallel_load_balancer "
            "expert_parallel_degree expert_tensor_parallel_degree expert_parallel_comm_backend "
            "enable_compiled_autograd spmd_backend"
        ),
    },
}
# DeepSpeed's offload models refuse keys that they do not have.
_OFFLOAD = {
    "offload_optimizer": words(
        "device nvme_path buffer_count pin_memory pipeline pipeline_read pipeline_write fast_init ratio "
        "super_offload cpuadam_cores_perc buffer_size"
    ),
    "offload_param": words("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
}
# What DeepSpeed and the trainer compare with numbers as it stands in the file.
_NUMBERS = (
    ("zero_optimization", "stage"),
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("gradient_clipping",),
)


@check
def files(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.documents:
        # DeepSpeed refuses JSON with a key twice; YAML readers keep the last one without a word.
        report = error if document.kind is Kind.DEEPSPEED else warning
        for twice in document.repeated:
            yield report("repeated-key", twice.where, str(twice.value), "remove one of the two")
    for where, reason in bundle.broken:
        yield error("file-broken", where, reason, "mend the file")
    for where, reference in bundle.missing:
        yield warning(
            "file-not-found", where, f"{reference} was not found beside this file or here", "correct the path"
        )


@check
def unknown_values(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.documents:
        for keys, known in _CHOICES.get(document.kind, {}).items():
            found = document.get(*keys)
            if found is None or isinstance(found.value, dict | list):
                continue
            if str(found.value).lower() not in {name.lower() for name in known}:
                yield unknown_value(found.where, ".".join(keys), found.value, known)


def unknown_value(where: str, key: str, value: object, known: Iterable[str]) -> Finding:
    """A value that the reader of a config refuses."""
    valid = sorted(name for name in known if name not in ("False", "auto"))
    near = difflib.get_close_matches(str(value).lower(), [name.lower() for name in valid], 1, 0.6)
    suggestion = next((name for name in valid if near and name.lower() == near[0]), "")
    return error(
        "value-unknown",
        where,
        f"{key} is {str(value)[:60]}: one of {', '.join(valid)}",
        f"did you mean {suggestion}?" if suggestion else "use one of them",
    )


@check
def misspelt_keys(bundle: Bundle) -> Iterator[Finding]:
    """Only keys close to a known one: readers of other versions know others."""
    for document in bundle.documents:
        for section, known in _DROPPED.get(document.kind, {}).items():
            values = document.section(*section) if section else document.data
            for key in values:
                name = str(key)
                near = difflib.get_close_matches(name, known - set(map(str, values)), 1, 0.85)
                if name in known or not near:
                    continue
                yield warning(
                    "key-misspelt",
                    document.where(*section, name),
                    f"{name} is no key here: it takes no effect",
                    f"did you mean {near[0]}?",
                )


@check
def offload_keys(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        for part, known in _OFFLOAD.items():
            for key in document.section("zero_optimization", part):
                if key in known:
                    continue
                near = difflib.get_close_matches(str(key), known, 1, 0.75)
                yield error(
                    "zero-unknown-key",
                    document.where("zero_optimization", part, str(key)),
                    f"{part} has no key {key}: DeepSpeed refuses the config",
                    f"did you mean {near[0]}?" if near else "remove it",
                )


@check
def numbers_in_quotes(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        for keys in _NUMBERS:
            if keys in document.as_text and (found := document.get(*keys)):
                yield error(
                    "number-as-text",
                    found.where,
                    f'{".".join(keys)} is "{found.value}", a text: it is compared with numbers as it is',
                    f"write {found.value} without quotes",
                )


@check
def sections(bundle: Bundle) -> Iterator[Finding]:
    """accelerate reads the section of its distributed_type, and passes by the others."""
    for document in bundle.of(Kind.ACCELERATE):
        kind = document.distributed_type
        for name, owner in (
            ("fsdp_config", "FSDP"),
            ("deepspeed_config", "DEEPSPEED"),
            ("megatron_lm_config", "MEGATRON_LM"),
            ("parallelism_config", ""),
        ):
            found = document.get(name)
            if found is None or not found.value:
                continue
            if not isinstance(found.value, dict):
                yield error(
                    "section-shape",
                    found.where,
                    f"{name} must be a mapping of keys to values",
                    f"write its keys below {name}:, indented, without dashes",
                )
            elif owner and kind != owner and "distributed_type" in document.data:
                yield _passed_by(document, name, owner, kind)


def _passed_by(document: Document, name: str, owner: str, kind: str) -> Finding:
    return warning(
        "section-ignored",
        document.where(name),
        f"{name} counts under distributed_type {owner} only, and this one is {kind}",
        f"distributed_type: {owner}, or remove {name}",
    )
