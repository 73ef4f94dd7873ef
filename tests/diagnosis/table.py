"""Hang patterns met in the field as recorded dumps: frames by rank, written in every style that tools print.

A frame is "Qualified.name@file"; files are shortened as py-spy's text shows them. Old styles print the last
part of the name only.
"""

import json
from dataclasses import dataclass
from pathlib import Path

STDLIB = "/usr/lib/python3.11/"
SITE = "/opt/venv/lib/python3.11/site-packages/"
OWN = "/home/user/job/"
_STDLIB_FILES = {"threading.py", "queue.py", "weakref.py", "socket.py", "selectors.py"}

C10D = "torch/distributed/distributed_c10d.py"
LOADER = "torch/utils/data/dataloader.py"
PIPE = "deepspeed/runtime/pipe/engine.py"
TRAINER = "transformers/trainer.py"

BARRIER = f"barrier@{C10D}"
ALL_REDUCE = f"all_reduce@{C10D}"
WRAP = "_exception_logger.<locals>.wrapper@torch/distributed/c10d_logger.py"
MODULE = "<module>@train.py"
BACKWARD = (
    "_engine_run_backward@torch/autograd/graph.py",
    "backward@torch/autograd/__init__.py",
    "Tensor.backward@torch/_tensor.py",
)
FETCH = (
    "PartitionedParameterCoordinator.fetch_sub_module@deepspeed/runtime/zero/partitioned_param_coordinator.py",
    "DeepSpeedZeRoOffload.pre_sub_module_forward_function@deepspeed/runtime/zero/parameter_offload.py",
    "_pre_forward_module_hook@deepspeed/runtime/zero/parameter_offload.py",
    "Module._call_impl@torch/nn/modules/module.py",
)


@dataclass(frozen=True)
class Dump:
    """One rank's dump: threads of frames (the first is the main thread), or an error instead."""

    threads: tuple[tuple[str, ...], ...] = ()
    error: str = ""
    active: bool = False


@dataclass(frozen=True)
class Row:
    name: str
    ranks: dict[int, Dump]
    kinds: frozenset[str]
    culprits: frozenset[int]
    frame: str = ""  # a part of every culprit's frame
    fix: str = ""  # a part of the remedy


def same(ranks, *frames, active=False):
    return {rank: Dump((frames,), active=active) for rank in ranks}


def row(name, ranks, kinds, culprits, frame="", fix=""):
    return Row(name, ranks, frozenset(kinds.split()), frozenset(culprits), frame, fix)


EVAL = (f"PipelineEngine.eval_batch@{PIPE}", "evaluate@megatron/training.py")
EVAL += (
    "evaluate_and_print_results@megatron/training.py",
    "train@megatron/training.py",
    "pretrain@megatron/training.py",
)
NEXT = (f"PipelineEngine._next_batch@{PIPE}", f"PipelineEngine._exec_load_micro_batch@{PIPE}")
NEXT += (f"PipelineEngine._exec_schedule@{PIPE}", *EVAL, MODULE)

UNSHARD = "FSDPParamGroup.unshard@torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
GRPO = "trl/trainer/grpo_trainer.py"
GENERATE = (
    f"GRPOTrainer._generate_and_score_completions@{GRPO}",
    f"GRPOTrainer._prepare_inputs@{GRPO}",
    f"Trainer.training_step@{TRAINER}",
    MODULE,
)

ROWS = [
    row(
        "evaluation loader deadlock under pipeline parallelism",
        {
            2: Dump(
                (
                    (
                        "Condition.wait@threading.py",
                        "Queue.get@queue.py",
                        f"_MultiProcessingDataLoaderIter._try_get_data@{LOADER}",
                        f"_MultiProcessingDataLoaderIter._get_data@{LOADER}",
                        f"_MultiProcessingDataLoaderIter._next_data@{LOADER}",
                        f"_BaseDataLoaderIter.__next__@{LOADER}",
                        *NEXT,
                    ),
                )
            ),
            **same(
                (0, 1, 3),
                f"broadcast@{C10D}",
                "_build_key_size_numel_dictionaries@megatron/mpu/data.py",
                "broadcast_data@megatron/mpu/data.py",
                "get_batch_pipe@pretrain_gpt.py",
                *NEXT,
                active=True,
            ),
            **same(
                range(4, 8),
                f"broadcast@{C10D}",
                f"PipelineEngine._bcast_pipe_scalar@{PIPE}",
                *EVAL,
                MODULE,
                active=True,
            ),
            **same(
                range(8, 12), ALL_REDUCE, f"PipelineEngine._reduce_outputs@{PIPE}", *EVAL, MODULE, active=True
            ),
            **same(
                range(12, 16),
                f"recv@{C10D}",
                "recv@deepspeed/runtime/pipe/p2p.py",
                f"PipelineEngine._exec_recv_activations@{PIPE}",
                f"PipelineEngine._exec_schedule@{PIPE}",
                *EVAL,
                MODULE,
                active=True,
            ),
        },
        "data-loader",
        {2},
        "train.py",
        "num_workers=0",
    ),
    row(
        "evaluation loader deadlock, a stage sends",
        {
            1: Dump(
                (
                    (
                        "Condition.wait@threading.py",
                        "Queue.get@queue.py",
                        f"_MultiProcessingDataLoaderIter._try_get_data@{LOADER}",
                        f"_MultiProcessingDataLoaderIter._get_data@{LOADER}",
                        f"_BaseDataLoaderIter.__next__@{LOADER}",
                        *NEXT,
                    ),
                )
            ),
            **same(
                (0,),
                f"broadcast@{C10D}",
                "broadcast_data@megatron/mpu/data.py",
                "get_batch_pipe@pretrain_gpt.py",
                *NEXT,
                active=True,
            ),
            **same(
                (2, 3),
                f"send@{C10D}",
                "send@deepspeed/runtime/pipe/p2p.py",
                f"PipelineEngine._exec_send_activations@{PIPE}",
                f"PipelineEngine._exec_schedule@{PIPE}",
                *EVAL,
                MODULE,
                active=True,
            ),
        },
        "data-loader",
        {1},
        "train.py",
        "num_workers=0",
    ),
    row(
        "one rank in uninterruptible sleep",
        {
            0: Dump(
                error="Error: Failed to suspend process\nReason: EPERM: Operation not permitted\nSTAT Dl"
            ),
            **same(
                range(1, 64),
                BARRIER,
                "wait_for_everyone@accelerate/utils/other.py",
                "Accelerator.wait_for_everyone@accelerate/accelerator.py",
                MODULE,
                active=True,
            ),
        },
        "d-state",
        {0},
        fix="--exclude=node00",
    ),
    row(
        "one rank refuses its own user, in a state that is not told",
        {
            9: Dump(error="Error: Failed to suspend process\nReason: EPERM: Operation not permitted"),
            **same(
                (*range(9), *range(10, 16)), BARRIER, "wait@accelerate/utils/other.py", MODULE, active=True
            ),
        },
        "undumpable",
        {9},
        fix="--exclude=node01",
    ),
    row(
        "dataset map on rank 0",
        {
            0: Dump(
                (
                    (
                        "Connection._recv@multiprocess/connection.py",
                        "iflatmap_unordered@datasets/utils/py_utils.py",
                        "Dataset.map@datasets/arrow_dataset.py",
                        "encode@train.py",
                        MODULE,
                    ),
                )
            ),
            1: Dump(
                (
                    (
                        BARRIER,
                        "safe_ddp_context@swift/utils/torch_utils.py",
                        "Preprocessor.__call__@swift/llm/dataset/preprocessor/core.py",
                        "SwiftSft._encode_dataset@swift/llm/train/sft.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
        },
        "slow",
        set(),
    ),
    row(
        "uneven last batch",
        {
            **same((1, 5), *BACKWARD, "training_step@train.py", MODULE, active=True),
            **same(
                (0, 2, 3, 4, 6, 7, 8, 9),
                ALL_REDUCE,
                "_sync_ddp@lightning/fabric/utilities/distributed.py",
                MODULE,
            ),
            **same((10, 11), BARRIER, "save_checkpoint@train.py", MODULE),
        },
        "phase-mismatch",
        {1, 5},
        "training_step",
        "innocent",
    ),
    row(
        "nobody differs",
        same(range(4), *BACKWARD, "train_one_epoch@train.py", "fit@train.py", MODULE, active=True),
        "network-or-hardware",
        set(),
    ),
    row(
        "parameter fetch under generate",
        {
            **same(
                (0, 1, 2, 3),
                "Stream.synchronize@torch/cuda/streams.py",
                "PartitionedParameterCoordinator._synchronize_communication@deepspeed/runtime/zero/stage3.py",
                *FETCH,
                "project@transformers/models/t5/modeling_t5.py",
                "T5Attention.forward@transformers/models/t5/modeling_t5.py",
                "GenerationMixin.generate@transformers/generation/utils.py",
                "predict@train.py",
                MODULE,
                active=True,
            ),
            **same((4, 5, 6, 7), f"all_gather@{C10D}", "collect@train.py", MODULE, active=True),
        },
        "phase-mismatch",
        {4, 5, 6, 7},
        "collect",
    ),
    row(
        "an expert without tokens under ZeRO-3",
        {
            **same(
                (0, 1),
                f"all_gather_into_tensor@{C10D}",
                *FETCH,
                "MixtralBlock.forward@transformers/models/mixtral/modeling_mixtral.py",
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
            **same(
                (2, 3),
                f"reduce_scatter_tensor@{C10D}",
                "DeepSpeedZeroOptimizer_Stage3.reduce_and_partition_ipg_grads@deepspeed/runtime/zero/stage3.py",
                *BACKWARD,
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
        },
        "collective-mismatch",
        {0, 1},
        "train.py",
    ),
    row(
        "text-only batch skips the vision tower",
        {
            **same(
                (0, 1, 2, 4, 7),
                f"all_gather_into_tensor@{C10D}",
                "FSDPParamGroup.unshard@torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
                "Qwen2VisionBlock.forward@transformers/models/qwen2_vl/modeling_qwen2_vl.py",
                "Qwen2VLModel.get_image_features@transformers/models/qwen2_vl/modeling_qwen2_vl.py",
                "Qwen2VLModel.forward@transformers/models/qwen2_vl/modeling_qwen2_vl.py",
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
            **same(
                (3, 5, 6),
                f"all_gather_into_tensor@{C10D}",
                "FSDPParamGroup.unshard@torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
                "Qwen2VLDecoderLayer.forward@transformers/models/qwen2_vl/modeling_qwen2_vl.py",
                "Qwen2VLModel.forward@transformers/models/qwen2_vl/modeling_qwen2_vl.py",
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
        },
        "collective-mismatch",
        {3, 5, 6},
        "train.py",
    ),
    row(
        "text-only batch skips a vision tower of another name",
        {
            **same(
                (0, 1, 3),
                f"all_gather_into_tensor@{C10D}",
                UNSHARD,
                "SiglipEncoderLayer.forward@transformers/models/siglip/modeling_siglip.py",
                "Gemma3Model.embed_images@transformers/models/gemma3/modeling_gemma3.py",
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
            **same(
                (2,),
                f"all_gather_into_tensor@{C10D}",
                UNSHARD,
                "Gemma3DecoderLayer.forward@transformers/models/gemma3/modeling_gemma3.py",
                "Gemma3TextModel.forward@transformers/models/gemma3/modeling_gemma3.py",
                f"Trainer.training_step@{TRAINER}",
                MODULE,
                active=True,
            ),
        },
        "collective-mismatch order-mismatch",
        {2},
        "train.py",
        "dummy image",
    ),
    row(
        "collective on an autograd thread, everybody alike",
        {
            rank: Dump(
                (
                    (
                        *BACKWARD,
                        "DeepSpeedEngine.backward@deepspeed/runtime/engine.py",
                        "training_loop@train.py",
                        MODULE,
                    ),
                    (
                        f"all_gather_into_tensor@{C10D}",
                        WRAP,
                        "TorchBackend.all_gather_into_tensor@deepspeed/comm/torch.py",
                        "timed_op.<locals>.log_wrapper@deepspeed/comm/comm.py",
                        "allgather_fn@deepspeed/comm/comm.py",
                    ),
                    (
                        "Condition.wait@threading.py",
                        "TMonitor.run@tqdm/_monitor.py",
                        "Thread._bootstrap@threading.py",
                    ),
                )
            )
            for rank in range(2)
        },
        "network-or-hardware",
        set(),
    ),
    row(
        "finalizer in a forked worker",
        {
            0: Dump(
                (
                    (
                        "Future.result@concurrent/futures/_base.py",
                        "AsyncioManager.run@wandb/sdk/lib/asyncio_manager.py",
                        "ServiceConnection.api_cleanup_request@wandb/sdk/lib/service/service_connection.py",
                        "finalize.__call__@weakref.py",
                        "build_request@train.py",
                        MODULE,
                    ),
                )
            ),
            **same((1, 2, 3), ALL_REDUCE, "step@train.py", MODULE, active=True),
        },
        "lock",
        {0},
        "build_request",
    ),
    row(
        "weight sync waits for the inference server",
        {
            0: Dump(
                (
                    (
                        "NCCLLibrary.ncclAllReduce@vllm/distributed/device_communicators/pynccl_wrapper.py",
                        "PyNcclCommunicator.all_reduce@vllm/distributed/device_communicators/pynccl.py",
                        "PyNcclCommunicator.__init__@vllm/distributed/device_communicators/pynccl.py",
                        "VLLMClient.init_communicator@trl/extras/vllm_client.py",
                        "VLLMGeneration._init_vllm@trl/generation/vllm_generation.py",
                        "VLLMGeneration.__init__@trl/generation/vllm_generation.py",
                        "GRPOTrainer.__init__@trl/trainer/grpo_trainer.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
            **same(
                (1, 2, 3), BARRIER, "GRPOTrainer.__init__@trl/trainer/grpo_trainer.py", MODULE, active=True
            ),
        },
        "external-peer",
        {0},
        "train.py",
    ),
    row(
        "weights are handed to the inference server",
        {
            0: Dump(
                ((BARRIER, "VLLMClient.update_named_param@trl/extras/vllm_client.py", *GENERATE),),
                active=True,
            ),
            **same((1, 2, 3), f"broadcast_object_list@{C10D}", *GENERATE, active=True),
        },
        "collective-mismatch external-peer",
        {0},
        "train.py",
        "vLLM server",
    ),
    row(
        "save under is_main_process with ZeRO-3",
        {
            0: Dump(
                (
                    (
                        f"all_gather_into_tensor@{C10D}",
                        "GatheredParameters.__enter__@deepspeed/runtime/zero/partition_parameters.py",
                        "DeepSpeedEngine.save_16bit_model@deepspeed/runtime/engine.py",
                        f"Trainer.save_model@{TRAINER}",
                        "main@train.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
            **same(
                (1, 2, 3), *FETCH, f"Trainer.training_step@{TRAINER}", "main@train.py", MODULE, active=True
            ),
        },
        "save-on-one-rank",
        {0},
        "main",
        "on every rank",
    ),
    row(
        "save under is_main_process with FSDP",
        {
            0: Dump(
                (
                    (
                        "_all_gather_flat_param@torch/distributed/fsdp/_flat_param.py",
                        "FullyShardedDataParallel.state_dict@torch/distributed/fsdp/fully_sharded_data_parallel.py",
                        f"Trainer.save_model@{TRAINER}",
                        "main@train.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
            **same((1, 2, 3), BARRIER, "main@train.py", MODULE, active=True),
        },
        "save-on-one-rank",
        {0},
        "main",
    ),
    row(
        "evaluation on the main process only",
        {
            0: Dump(
                (
                    (
                        f"all_gather_into_tensor@{C10D}",
                        "_gpu_gather@accelerate/utils/operations.py",
                        "Accelerator.gather_for_metrics@accelerate/accelerator.py",
                        "evaluate@train.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
            **same((1, 2, 3), *BACKWARD, "train@train.py", MODULE, active=True),
        },
        "eval-on-one-rank",
        {0},
        "evaluate",
    ),
    row(
        "teardown after an exception",
        {
            0: Dump(
                (
                    (
                        "destroy_process_group@" + C10D,
                        "Engine.destroy@train.py",
                        "Engine.close@train.py",
                        MODULE,
                    ),
                )
            ),
            1: Dump(
                (
                    (
                        f"recv_object_list@{C10D}",
                        "PipelineStage._shape_inference@torch/distributed/pipelining/stage.py",
                        "ScheduleGPipe.step@torch/distributed/pipelining/schedules.py",
                        "_run_train@train.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
        },
        "teardown",
        {0},
        "destroy",
    ),
    row(
        "out of memory retried on one rank",
        {
            1: Dump(((f"all_gather@{C10D}", WRAP, "retry@train.py", MODULE),), active=True),
            **same((0, 2, 3), ALL_REDUCE, WRAP, "step@train.py", MODULE, active=True),
        },
        "collective-mismatch",
        {1},
        "retry",
    ),
    row(
        "the store's owner is gone",
        {
            3: Dump(
                (
                    (
                        "recv@libc.so.6",
                        "c10d::tcputil::recvBytes@libtorch_cpu.so",
                        "c10d::TCPStore::doGet@libtorch_cpu.so",
                        "c10d::TCPStore::get@libtorch_cpu.so",
                        f"init_process_group@{C10D}",
                        "main@train.py",
                        MODULE,
                    ),
                )
            )
        },
        "store",
        {0},
    ),
    row(
        "one dump is missing",
        same((0, 1, 2, 4, 5, 6, 7), BARRIER, WRAP, "sync@train.py", MODULE, active=True),
        "undumpable",
        {3},
    ),
    row(
        "slow save",
        {
            0: Dump(
                (
                    (
                        "_save@torch/serialization.py",
                        "save@torch/serialization.py",
                        "save_checkpoint@train.py",
                        MODULE,
                    ),
                ),
                active=True,
            ),
            **same((1, 2, 3), ALL_REDUCE, WRAP, "sync@train.py", MODULE),
        },
        "slow",
        set(),
    ),
]


def full_path(file: str) -> str:
    if file.startswith("<"):
        return file
    if file.startswith(("concurrent/", "multiprocessing/")) or file in _STDLIB_FILES:
        return STDLIB + file
    return (SITE if "/" in file else OWN) + file


def _split(spec: str, old: bool) -> tuple[str, str]:
    name, _, file = spec.rpartition("@")
    return (name.rsplit(".", 1)[-1] if old else name), file


def as_text(dump: Dump, pid: int, old: bool) -> str:
    """`py-spy dump`."""
    if dump.error:
        return dump.error + "\n"
    lines = [f"Process {pid}: python3 train.py --config a.yaml", "Python v3.11.7 (/usr/bin/python3.11)", ""]
    for number, thread in enumerate(dump.threads):
        status = "active" if dump.active and number == 0 else "idle"
        lines.append(
            f'Thread {pid + number} ({status}): "{"MainThread" if number == 0 else f"Thread-{number}"}"'
        )
        for line, spec in enumerate(thread, 10):
            name, file = _split(spec, old)
            lines.append(f"    {name} ({file}:{line})")
    return "\n".join(lines) + "\n"


def as_json(dump: Dump, pid: int, old: bool) -> str:
    """`py-spy dump --json`, the main thread last as it comes."""
    if dump.error:
        return dump.error + "\n"
    threads = []
    for number, thread in enumerate(dump.threads):
        frames = []
        for line, spec in enumerate(thread, 10):
            name, file = _split(spec, old)
            frames.append({"name": name, "filename": full_path(file), "short_filename": file, "line": line})
        threads.append(
            {
                "pid": pid,
                "thread_id": 140000000 + number,
                "thread_name": "MainThread" if number == 0 else None,
                "os_thread_id": pid + number,
                "active": dump.active and number == 0,
                "owns_gil": False,
                "frames": frames,
            }
        )
    return json.dumps(threads[::-1], indent=2)


def as_faulthandler(dump: Dump, pid: int, old: bool) -> str:
    """`faulthandler.dump_traceback(all_threads=True)`: full paths, bare names, the main thread last."""
    if dump.error:
        return dump.error + "\n"
    parts = []
    for number, thread in enumerate(dump.threads):
        lines = [
            ("Current thread" if number == 0 else "Thread")
            + f" 0x00007f{pid + number:010x} (most recent call first):"
        ]
        for line, spec in enumerate(thread, 10):
            name, file = _split(spec, True)
            lines.append(f'  File "{full_path(file)}", line {line} in {name}')
        parts.append("\n".join(lines))
    return "\n\n".join(parts[::-1]) + "\n"


STYLES = {
    "old text": (as_text, True, "txt"),
    "new text": (as_text, False, "txt"),
    "old json": (as_json, True, "json"),
    "new json": (as_json, False, "json"),
    "faulthandler": (as_faulthandler, True, "txt"),
}


def write(folder: Path, item: Row, style: str) -> None:
    """One file a rank, in a style; dumps that failed stay text."""
    writer, old, suffix = STYLES[style]
    for rank, dump in item.ranks.items():
        kind = "txt" if dump.error else suffix
        (folder / f"node{rank // 8:02}_rank{rank}.{kind}").write_text(writer(dump, 1000 + 40 * rank, old))


def write_one_file(folder: Path, item: Row) -> None:
    parts = [
        f"===== rank {rank} (node{rank // 8:02}) pid {1000 + 40 * rank} =====\n"
        + as_text(dump, 1000 + 40 * rank, True)
        for rank, dump in item.ranks.items()
    ]
    (folder / "all.txt").write_text("\n".join(parts))
