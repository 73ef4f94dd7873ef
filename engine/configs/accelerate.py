"""The accelerate config file of a plan, as commented YAML: DDP, FSDP2, FSDP1, N-D meshes, DeepSpeed."""

from __future__ import annotations

from ftdash.engine.configs.refusals import FSDP2, ZERO_STAGE
from ftdash.engine.configs.types import ConfigError, Rendezvous, nodes_of
from ftdash.engine.mesh import Mesh
from ftdash.engine.model.shape import ModelShape
from ftdash.engine.plan import Checkpointing, Method, Offload, Plan, Precision, Strategy

_MIXED = {
    Precision.BF16_MIXED: "bf16",
    Precision.FP16_MIXED: "fp16",
    # The whole model is already in this dtype: autocast would only add copies.
    Precision.BF16: "no",
    Precision.FP32: "no",
}

Line = tuple[str, object, str]  # key, value, comment


def accelerate_yaml(
    plan: Plan,
    mesh: Mesh,
    shape: ModelShape,
    *,
    node_rank: int = 0,
    rendezvous: Rendezvous | None = None,
    deepspeed_file: str | None = None,
    on_cpu: bool = False,
) -> str:
    """The config file for `accelerate launch` on the node `node_rank`.

    `deepspeed_file` is the DeepSpeed JSON's path as the launcher will see it, required under ZeRO.
    `on_cpu` leaves out what FSDP1 can only do with an accelerator.
    """
    nodes = nodes_of(plan)
    head: list[Line] = [
        ("compute_environment", "LOCAL_MACHINE", ""),
        ("distributed_type", _distributed_type(plan), ""),
    ]
    # A DeepSpeed file owns the precision: naming it here as well is refused by accelerate.
    if plan.strategy not in ZERO_STAGE:
        head.append(("mixed_precision", _MIXED[plan.precision], _precision_comment(plan)))
    head += [
        ("num_machines", nodes, ""),
        ("num_processes", plan.gpus, "over all nodes" if nodes > 1 else ""),
        ("machine_rank", node_rank, "0 on the first node, counting up" if nodes > 1 else ""),
    ]
    if nodes > 1:
        meeting = rendezvous or Rendezvous()
        head += [
            ("main_process_ip", meeting.address, "the first node, as the others reach it"),
            ("main_process_port", meeting.port, "free on the first node, the same in every file"),
        ]
    else:
        head.append(("main_process_port", 0, "any free port, so that two jobs can share a node"))
    head += [
        ("rdzv_backend", "static", ""),
        ("same_network", True, ""),
        ("main_training_function", "main", ""),
        ("use_cpu", False, ""),
    ]
    sections: list[tuple[str, list[Line]]] = []
    if plan.strategy in FSDP2:
        sections.append(("fsdp_config", _fsdp2(plan, shape)))
    elif plan.strategy is Strategy.FSDP1:
        sections.append(("fsdp_config", _fsdp1(plan, shape, on_cpu)))
    elif plan.strategy in ZERO_STAGE:
        sections.append(("deepspeed_config", _deepspeed(plan, nodes, deepspeed_file)))
    if axes := _parallelism(plan, mesh):
        sections.append(("parallelism_config", axes))
    title = f"# {_title(plan, mesh)}, {shape.name}: written by ftdash. Start it with accelerate launch."
    lines = [title, *(_line(entry) for entry in head)]
    for name, entries in sections:
        lines.append(f"{name}:")
        lines.extend("  " + _line(entry) for entry in entries)
    return "\n".join(lines) + "\n"


def _title(plan: Plan, mesh: Mesh) -> str:
    replicas = "data parallel" if mesh.shard == 1 else "replicate"
    axes = [(replicas, mesh.replicate), ("shard", mesh.shard), ("cp", mesh.cp)]
    spread = " x ".join(f"{name} {size}" for name, size in axes if size > 1) or "one rank"
    return f"{plan.strategy} ({spread})"


def _distributed_type(plan: Plan) -> str:
    if plan.strategy in ZERO_STAGE:
        return "DEEPSPEED"
    if plan.strategy in FSDP2 or plan.strategy is Strategy.FSDP1:
        return "FSDP"
    return "MULTI_GPU" if plan.gpus > 1 else "NO"


def _precision_comment(plan: Plan) -> str:
    if plan.precision in (Precision.BF16, Precision.FP32):
        return f"parameters, gradients and optimizer are all {plan.precision}"
    return ""


def _fsdp2(plan: Plan, shape: ModelShape) -> list[Line]:
    reshard = plan.strategy is not Strategy.FSDP_NO_RESHARD
    lines: list[Line] = [
        ("fsdp_version", 2, "accelerate still defaults to 1"),
        (
            "fsdp_reshard_after_forward",
            reshard,
            "free gathered layers after forward (ZeRO-3 memory)"
            if reshard
            else "keep gathered layers until backward (ZeRO-2 memory, one all-gather less)",
        ),
        *_wrap(shape),
        ("fsdp_cpu_ram_efficient_loading", True, "rank 0 reads the checkpoint, the others start empty"),
        ("fsdp_state_dict_type", "SHARDED_STATE_DICT", "each rank saves its shard; merge once, at the end"),
        ("fsdp_offload_params", plan.offload is Offload.ALL, ""),
        _activation_checkpointing(plan),
    ]
    if plan.activation_offload and lines[-1][1]:
        lines.append(("fsdp_activation_checkpointing_offload", True, "layer inputs wait in host memory"))
    return lines


def _fsdp1(plan: Plan, shape: ModelShape, on_cpu: bool) -> list[Line]:
    adapters = plan.method is not Method.FULL
    return [
        ("fsdp_version", 1, "torch has deprecated it: prefer 2"),
        ("fsdp_sharding_strategy", "FULL_SHARD", ""),
        *_wrap(shape),
        (
            "fsdp_use_orig_params",
            not adapters,
            "PEFT's wrap policy gives adapters units of their own" if adapters else "",
        ),
        ("fsdp_backward_prefetch", "BACKWARD_PRE", ""),
        ("fsdp_forward_prefetch", False, ""),
        ("fsdp_sync_module_states", not on_cpu, "needed by RAM-efficient loading"),
        ("fsdp_cpu_ram_efficient_loading", not on_cpu, "rank 0 reads the checkpoint, the others start empty"),
        ("fsdp_state_dict_type", "SHARDED_STATE_DICT", "each rank saves its shard; merge once, at the end"),
        ("fsdp_offload_params", plan.offload is Offload.ALL, ""),
        _activation_checkpointing(plan),
    ]


def _wrap(shape: ModelShape) -> list[Line]:
    if not shape.layer_class:
        raise ConfigError(
            "--params names no layer class to wrap: give --model or --config to launch under FSDP"
        )
    return [
        ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", ""),
        ("fsdp_transformer_layer_cls_to_wrap", shape.layer_class, "one unit per decoder layer"),
    ]


def _activation_checkpointing(plan: Plan) -> Line:
    if plan.checkpointing is Checkpointing.NONE:
        return ("fsdp_activation_checkpointing", False, "")
    if plan.method is not Method.FULL:
        # Its wrappers hide adapters from PEFT 0.21.2, which then saves none of them, without an error.
        return ("fsdp_activation_checkpointing", False, "the trainer's own is on: PEFT would save no adapter")
    return ("fsdp_activation_checkpointing", True, "here only: the trainer's own switch stays off")


def _deepspeed(plan: Plan, nodes: int, deepspeed_file: str | None) -> list[Line]:
    if deepspeed_file is None:
        raise ConfigError("a DeepSpeed plan needs the path of its JSON")
    lines: list[Line] = [
        ("deepspeed_config_file", deepspeed_file, "owns every DeepSpeed setting"),
    ]
    if plan.strategy is Strategy.ZERO3:
        lines.append(("zero3_init_flag", True, "build the model partitioned, not whole on every rank"))
    if nodes > 1:
        lines.append(("deepspeed_multinode_launcher", "standard", "run on every node: no pdsh, no hostfile"))
    return lines


def _parallelism(plan: Plan, mesh: Mesh) -> list[Line]:
    ulysses = plan.cp > 1 and plan.strategy in ZERO_STAGE
    replicated = plan.strategy in FSDP2 and mesh.replicate > 1
    if plan.cp == 1 and not replicated:
        return []
    if ulysses:
        return [
            ("parallelism_config_sp_backend", "deepspeed", "Ulysses: all-to-alls around attention"),
            ("parallelism_config_sp_size", mesh.cp, "ranks that share one sequence; must divide the heads"),
            ("parallelism_config_dp_shard_size", mesh.data_parallel, ""),
            ("parallelism_config_sp_seq_length_is_variable", True, ""),
            ("parallelism_config_sp_attn_implementation", _ulysses_attention(plan), "eager is not supported"),
        ]
    lines: list[Line] = [
        ("parallelism_config_dp_replicate_size", mesh.replicate, "copies: only gradients cross"),
        ("parallelism_config_dp_shard_size", mesh.shard, "ranks of one copy: keep them in one node"),
    ]
    if mesh.cp > 1:
        lines += [
            ("parallelism_config_cp_size", mesh.cp, "ranks that share one sequence (ring attention)"),
            ("parallelism_config_cp_backend", "torch", ""),
            ("parallelism_config_cp_comm_strategy", "allgather", ""),
        ]
    return lines


def _ulysses_attention(plan: Plan) -> str:
    return "flash_attention_2" if plan.attention == "flash" else "sdpa"


def _line(entry: Line) -> str:
    key, value, comment = entry
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str) and (text.lower() in ("no", "yes", "on", "off") or not _plain(text)):
        text = "'" + text.replace("'", "''") + "'"
    return f"{key}: {text}" + (f"  # {comment}" if comment else "")


def _plain(text: str) -> bool:
    return bool(text) and text[0] not in "&*!|>'\"%@`[]{},?:-# " and ": " not in text and " #" not in text
