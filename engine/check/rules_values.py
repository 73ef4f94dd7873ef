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
    Kind.TRAINER: {
        (): words(
            "accelerator_config activation_offloading adam_beta1 adam_beta2 adam_epsilon "
            "adapter_name_or_path additional_target assistant_only_loss attn_implementation "
            "auto_find_batch_size average_tokens_across_devices bf16 bf16_full_eval "
            "bnb_4bit_quant_storage bnb_4bit_quant_type buffer_size chat_template_path "
            "completion_only_loss cutoff_len data_seed dataloader_drop_last dataloader_num_workers "
            "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset "
            "dataset_config dataset_dir dataset_mixture datasets dataset_kwargs dataset_name "
            "dataset_num_proc dataset_streaming "
            "dataset_test_split dataset_text_field dataset_train_split ddp_backend ddp_broadcast_buffers "
            "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout deepspeed "
            "disable_gradient_checkpointing do_eval do_predict do_train double_quantization dtype "
            "enable_liger_kernel eos_token eval_accumulation_steps eval_dataset eval_delay eval_on_start "
            "eval_packing eval_steps eval_strategy evaluation_strategy export_dir export_size "
            "finetuning_type flash_attn fp16 fp16_full_eval freeze_trainable_layers fsdp fsdp_config "
            "full_determinism gradient_accumulation_steps gradient_checkpointing "
            "gradient_checkpointing_kwargs greater_is_better group_by_length hub_model_id "
            "include_num_input_tokens_seen infer_backend infer_dtype interleave_probs label_names "
            "label_smoothing_factor learning_rate load_best_model_at_end load_in_4bit load_in_8bit "
            "logging_dir logging_first_step logging_steps logging_strategy lora_alpha lora_dropout "
            "lora_modules_to_save lora_r lora_rank lora_target lora_target_modules lora_target_parameters "
            "lora_task_type loraplus_lr_ratio loss_type lr_scheduler_kwargs lr_scheduler_type "
            "mask_history max_grad_norm max_length max_samples max_seq_length max_steps "
            "metric_for_best_model mix_strategy model_init_kwargs model_name_or_path model_revision "
            "neat_packing neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules "
            "output_dir overwrite_cache overwrite_output_dir packing packing_strategy pad_to_multiple_of "
            "pad_token padding_free parallelism_config per_device_eval_batch_size "
            "per_device_train_batch_size plot_loss pref_beta pref_loss preprocessing_num_workers "
            "pure_bf16 push_to_hub quantization_bit quantization_method ref_model remove_unused_columns "
            "report_to resume_from_checkpoint reward_model rope_scaling router_aux_loss_coef run_name "
            "save_on_each_node save_only_model save_steps save_strategy save_total_limit shift_attn "
            "shuffle_dataset stage streaming template tf32 tokenized_path torch_compile torch_dtype "
            "train_on_prompt truncation_mode trust_remote_code upcast_layernorm use_cache use_cpu "
            "use_dora use_liger_kernel use_peft use_reentrant_gc use_rslora use_unsloth val_size "
            "warmup_ratio warmup_steps weight_decay "
        ),
    },
    Kind.AXOLOTL: {
        (): words(
            "adam_beta1 adam_beta2 adam_epsilon adapter auto_resume_from_checkpoints base_model bf16 "
            "chat_template context_parallel_size dataloader_num_workers dataloader_pin_memory "
            "dataloader_prefetch_factor dataset_num_proc dataset_prepared_path dataset_processes datasets "
            "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout deepspeed dp_replicate_size "
            "dp_shard_size early_stopping_patience eval_batch_size eval_max_new_tokens "
            "eval_sample_packing eval_steps eval_strategy eval_table_size evals_per_epoch "
            "excess_length_strategy expert_parallel_size flash_attention flex_attention fp16 fsdp "
            "fsdp_config fsdp_version gradient_accumulation_steps gradient_checkpointing "
            "gradient_checkpointing_kwargs group_by_length learning_rate load_in_4bit load_in_8bit "
            "logging_steps lora_alpha lora_dropout lora_mlp_kernel lora_model_dir lora_modules_to_save "
            "lora_o_kernel lora_qkv_kernel lora_r lora_target_linear lora_target_modules "
            "lora_target_parameters loss_watchdog_patience loss_watchdog_threshold lr_scheduler "
            "max_grad_norm max_steps micro_batch_size model_type neftune_noise_alpha num_epochs optimizer "
            "output_dir pad_to_sequence_len peft_use_dora peft_use_rslora resume_from_checkpoint "
            "sample_packing save_only_model save_safetensors save_steps save_strategy save_total_limit "
            "saves_per_epoch sdp_attention sequence_len sequence_parallel_degree shuffle_merged_datasets "
            "special_tokens tensor_parallel_size test_datasets tf32 tokenizer_config tokenizer_type "
            "torch_compile torch_compile_backend train_on_inputs trust_remote_code unfrozen_parameters "
            "val_set_size wandb_entity wandb_log_model wandb_name wandb_project wandb_run_id wandb_watch "
            "warmup_ratio warmup_steps weight_decay xformers_attention "
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
# Files that many programs read, each with options of its own: only a slip of a letter or two is told there.
_NEAR = {Kind.TRAINER: 0.9, Kind.AXOLOTL: 0.9}
# DeepSpeed's models of these sections refuse keys that they do not have.
_CLOSED: dict[tuple[str, ...], frozenset[str]] = {
    ("fp16",): words(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads fp16_opt_level opt_level"
    ),
    ("bf16",): words(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
        "bf16_optimizer_states auto_cast"
    ),
    ("zero_optimization", "offload_optimizer"): words(
        "device nvme_path buffer_count pin_memory pipeline pipeline_read pipeline_write fast_init ratio "
        "super_offload cpuadam_cores_perc buffer_size"
    ),
    ("zero_optimization", "offload_param"): words(
        "device nvme_path buffer_count buffer_size max_in_cpu pin_memory"
    ),
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
                near = difflib.get_close_matches(
                    name, known - set(map(str, values)), 1, _NEAR.get(document.kind, 0.85)
                )
                if name in known or not near or _a_word_apart(name, near[0]):
                    continue
                yield warning(
                    "key-misspelt",
                    document.where(*section, name),
                    f"{name} is no key here: it takes no effect",
                    f"did you mean {near[0]}?",
                )


def _a_word_apart(one: str, other: str) -> bool:
    """Whether one name is the other with words before or behind it: an option of its own, not a slip."""
    long, short = sorted((one, other), key=len, reverse=True)
    return long.startswith(f"{short}_") or long.endswith(f"_{short}")


@check
def closed_sections(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        for part, known in _CLOSED.items():
            for key in document.section(*part):
                if key in known:
                    continue
                near = difflib.get_close_matches(str(key), known, 1, 0.75)
                yield error(
                    "zero-unknown-key",
                    document.where(*part, str(key)),
                    f"{part[-1]} has no key {key}: DeepSpeed refuses the config",
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


@check
def deepspeed_sections(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.DEEPSPEED):
        for keys in (("zero_optimization",), ("optimizer",), ("scheduler",), *_CLOSED):
            found = document.get(*keys)
            if found is not None and not isinstance(found.value, dict):
                yield error(
                    "section-shape",
                    found.where,
                    f"{'.'.join(keys)} is {str(found.value)[:40]}: it must be a mapping of keys to values",
                    '{"device": "cpu"}'
                    if "offload" in keys[-1]
                    else '{"enabled": true}, or what the section takes',
                )


def _passed_by(document: Document, name: str, owner: str, kind: str) -> Finding:
    return warning(
        "section-ignored",
        document.where(name),
        f"{name} counts under distributed_type {owner} only, and this one is {kind}",
        f"distributed_type: {owner}, or remove {name}",
    )
