"""Checks of accelerate config files: keys, process counts, CPU launches, meshes, DeepSpeed sections."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle, is_false
from ftdash.engine.check.documents import Document, Kind, Sourced, words
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check

# Fields of accelerate's ClusterConfig and SageMakerConfig (config_args.py); it refuses all others.
KEYS = words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank "
    "num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network "
    "main_training_function enable_cpu_affinity fp8_config deepspeed_config fsdp_config "
    "parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster "
    "tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16 dynamo_backend "
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
    "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args "
    "ipex_config tpu_config"
)
# Settings that the DeepSpeed file owns once one is named (DeepSpeedPlugin._deepspeed_config_checks).
_OWNED_BY_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)


@check
def unknown_keys(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        for key in document.data:
            if key in KEYS:
                continue
            near = difflib.get_close_matches(str(key), KEYS, 1, 0.75)
            yield error(
                "accelerate-unknown-key",
                document.where(str(key)),
                f"{key} is no key of an accelerate config: accelerate launch refuses the file",
                f"did you mean {near[0]}?" if near else "remove it, or move it below its section",
            )


@check
def cpu_single_process(bundle: Bundle) -> Iterator[Finding]:
    """accelerate starts one process, exit 0, for MULTI_CPU without mpirun and for --cpu."""
    for document in bundle.of(Kind.ACCELERATE):
        kind, count = document.get("distributed_type"), document.get("num_processes")
        if (
            kind
            and document.distributed_type == "MULTI_CPU"
            and not document.section("mpirun_config")
            and count
            and _above_one(count)
        ):
            yield error(
                "cpu-single-process",
                kind.where,
                f"distributed_type MULTI_CPU with num_processes {count.value}: accelerate launch starts "
                "one "
                "process, without a word",
                "use torchrun --nproc-per-node, or mpirun_config, or MULTI_GPU with the trainer's "
                "use_cpu=True",
            )
        if kind and document.distributed_type == "NO" and count and _above_one(count):
            yield warning(
                "single-process",
                kind.where,
                f"distributed_type NO with num_processes {count.value}: one process is started",
                "use MULTI_GPU, FSDP or DEEPSPEED",
            )
    for document, shell, launch in bundle.launches():
        started = shell.number(launch.option("--num_processes")) or 0
        if launch.launcher == "accelerate" and launch.has("--cpu") and started > 1:
            yield error(
                "cpu-single-process",
                document.at(launch.line),
                f"accelerate launch --cpu --num_processes {started} starts one process, without a word",
                f"torchrun --nproc-per-node {started}, with the trainer's use_cpu=True",
            )


def _above_one(count: Sourced) -> bool:
    return isinstance(count.value, int) and count.value > 1


@check
def processes_over_machines(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        machines, count = document.get("num_machines"), document.get("num_processes")
        if not machines or not isinstance(machines.value, int) or machines.value < 2:
            continue
        if count and isinstance(count.value, int) and count.value % machines.value:
            yield error(
                "processes-over-machines",
                count.where,
                f"num_processes {count.value} is over all machines, and does not divide by {machines.value}",
                "num_processes = machines x GPUs of one machine",
            )
        given = any(launch.has("--main_process_ip") for _, _, launch in bundle.launches())
        if document.get("main_process_ip") is None and not given:
            yield warning(
                "no-main-process-ip",
                machines.where,
                f"{machines.value} machines, and no main_process_ip: each looks for the first one on itself",
                "set main_process_ip and main_process_port to the first machine's",
            )
        elif (ip := document.get("main_process_ip")) and str(ip.value) in (
            "localhost",
            "127.0.0.1",
            "0.0.0.0",
        ):
            yield error(
                "rendezvous-localhost",
                ip.where,
                f"main_process_ip {ip.value} with {machines.value} machines: each waits for itself",
                "name the first machine as the others reach it",
            )


@check
def machine_numbers(bundle: Bundle) -> Iterator[Finding]:
    """Ranks of machines count from 0; accelerate hands gpu_ids on as CUDA_VISIBLE_DEVICES."""
    for document in bundle.of(Kind.ACCELERATE):
        machines = document.get("num_machines")
        total = machines.value if machines and isinstance(machines.value, int) else 1
        rank, port = document.get("machine_rank"), document.get("main_process_port")
        if rank and isinstance(rank.value, int) and not 0 <= rank.value < max(total, 1):
            yield error(
                "machine-rank",
                rank.where,
                f"machine_rank {rank.value} of {total} machines: they are numbered from 0 to {total - 1}",
                "0 on the first machine, 1 on the second",
            )
        if port and isinstance(port.value, int) and not 0 <= port.value < 65536:
            yield error(
                "port-range", port.where, f"main_process_port {port.value}: ports end at 65535", "a free port"
            )
        ids, count = document.get("gpu_ids"), document.get("num_processes")
        named = [part for part in str(ids.value).split(",") if part.strip()] if ids else []
        if not ids or "all" in named or not count or not isinstance(count.value, int) or total < 1:
            continue
        if count.value // total > len(named):
            yield error(
                "more-processes-than-gpus",
                ids.where,
                f"gpu_ids names {len(named)} GPUs for {count.value // total} processes on each machine",
                f"name {count.value // total} GPUs, or all",
            )


@check
def deepspeed_file_and_settings(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        named = document.get("deepspeed_config", "deepspeed_config_file")
        if named is None or document.distributed_type != "DEEPSPEED":
            continue
        section = document.section("deepspeed_config")
        clashes = [(key, document.where("deepspeed_config", key)) for key in _OWNED_BY_FILE if key in section]
        if document.get("mixed_precision"):
            clashes.append(("mixed_precision", document.where("mixed_precision")))
        for key, where in clashes:
            yield error(
                "deepspeed-file-and-settings",
                where,
                f"{key} beside deepspeed_config_file ({named.where}): accelerate refuses both at once",
                f"remove {key} here and set it in {named.value}",
            )


@check
def deepspeed_section(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        if document.distributed_type != "DEEPSPEED":
            continue
        yield from _deepspeed_section(document)


def _deepspeed_section(document: Document) -> Iterator[Finding]:
    stage = document.get("deepspeed_config", "zero_stage")
    if stage is None:
        return
    offload = document.get("deepspeed_config", "offload_param_device")
    if stage.value in (0, 1, 2) and offload and str(offload.value) not in ("none", "None"):
        yield error(
            "offload-param-stage",
            offload.where,
            f"offload_param_device {offload.value} at zero_stage {stage.value}: parameters are offloaded at "
            "stage 3 only",
            "use zero_stage: 3, or offload_param_device: none",
        )
    if stage.value != 3:
        return
    save, init = (
        document.get("deepspeed_config", "zero3_save_16bit_model"),
        document.get("deepspeed_config", "zero3_init_flag"),
    )
    if is_false(save) and save:
        yield warning(
            "gather-16bit-off",
            save.where,
            "zero3_save_16bit_model is false: save_model() leaves shards and no model that loads",
            "set it to true, or convert after training: ftdash checkpoint convert",
        )
    elif save is None:
        yield note(
            "gather-16bit-off",
            document.where("deepspeed_config"),
            "zero3_save_16bit_model is not set and defaults to false: the final save leaves shards only",
            "set it to true, or convert after training: ftdash checkpoint convert",
        )
    if is_false(init) and init:
        yield warning(
            "zero3-init-off",
            init.where,
            "zero3_init_flag is false: every rank builds the whole model before it is partitioned",
            "set zero3_init_flag: true",
        )


@check
def mesh_product(bundle: Bundle) -> Iterator[Finding]:
    """The axes' product is the world size (accelerate's ParallelismConfig)."""
    for document in bundle.of(Kind.ACCELERATE):
        section = document.section("parallelism_config")
        if not section:
            continue
        sizes = {
            str(key).removeprefix("parallelism_config_").removesuffix("_size"): value
            for key, value in section.items()
            if str(key).endswith("_size") and isinstance(value, int)
        }
        where = document.where("parallelism_config")
        yield from mesh_findings(sizes, bundle.world.value if bundle.world else None, where)
        kind = document.distributed_type
        version = document.get("fsdp_config", "fsdp_version")
        if kind == "FSDP" and not (version and str(version.value) == "2"):
            yield error(
                "mesh-needs-fsdp2",
                where,
                "parallelism_config with FSDP version 1: accelerate refuses it",
                "set fsdp_version: 2 in fsdp_config",
            )


@check
def megatron_product(bundle: Bundle) -> Iterator[Finding]:
    """Tensor, pipeline and context sizes divide the world; what they leave is data parallel."""
    for document in bundle.of(Kind.ACCELERATE):
        if document.distributed_type != "MEGATRON_LM":
            continue
        found = (document.get("megatron_lm_config", f"megatron_lm_{name}") for name in _MEGATRON_SIZES)
        yield from _divides(bundle, [each for each in found if each])
    for document, shell, launch in bundle.launches():
        sizes = []
        for option in _MEGATRON_OPTIONS:
            if (size := shell.number(launch.option(option))) is not None:
                sizes.append(Sourced(size, document.at(launch.line)))
        yield from _divides(bundle, sizes)


_MEGATRON_SIZES = ("tp_degree", "pp_degree", "context_parallel_size")
_MEGATRON_OPTIONS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


def _divides(bundle: Bundle, sizes: list[Sourced]) -> Iterator[Finding]:
    known = [size for size in sizes if isinstance(size.value, int) and size.value > 0]
    product = math.prod(size.value for size in known)
    if bundle.world and bundle.world.value % product:
        named = " x ".join(str(size.value) for size in known)
        yield error(
            "mesh-product",
            known[0].where,
            f"tensor x pipeline x context parallelism, {named} = {product}, does not divide the "
            f"{bundle.world.value} processes ({bundle.world.where})",
            "sizes whose product divides the number of processes",
        )


def mesh_findings(sizes: dict[str, int], world: int | None, where: str) -> Iterator[Finding]:
    """Rules of accelerate's ParallelismConfig on axis sizes."""
    replicate, shard = sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1)
    tp, cp, sp = sizes.get("tp", 1), sizes.get("cp", 1), sizes.get("sp", 1)
    named = " x ".join(f"{name} {size}" for name, size in sizes.items())
    for name, size in sizes.items():
        if size < 1:
            yield error(
                "mesh-axis", where, f"{name}_size {size}: every axis is at least 1", "write the size out"
            )
            return
    total = replicate * shard * tp * cp * sp
    # DeepSpeed forms its own groups for sequence parallelism: data parallelism is what is left of the world.
    if world and (total != world if sp == 1 else world % sp):
        missing = ""
        if world % total == 0 and total < world:
            free = next((axis for axis in ("dp_replicate", "dp_shard") if axis not in sizes), "one axis")
            missing = f"; a factor {world // total} is missing, {free} for one"
        yield error(
            "mesh-product",
            where,
            f"{named or 'no axis'} = {total}, but {world} processes are started{missing}",
            "make the product of all axes equal to the number of processes",
        )
    if cp > 1 and sp > 1:
        yield error("mesh-axis", where, f"cp {cp} and sp {sp}: one or the other", "set one of them to 1")
    if replicate > 1 and shard == 1 and (tp > 1 or cp > 1):
        yield error(
            "mesh-axis",
            where,
            f"dp_replicate {replicate} with tp {tp} x cp {cp} and nothing sharded: replicas of tensor or "
            "context "
            "groups are not supported",
            "set dp_shard_size above 1, or dp_replicate_size to 1",
        )
