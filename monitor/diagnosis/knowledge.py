"""What is known of the libraries' functions, as data: collectives, waits, phases.

Function names are bare (the last dotted part), since py-spy printed them so before 0.4.3. Sources are
the modules of torch, accelerate, transformers, trl, DeepSpeed, Megatron-LM, datasets and vLLM named in
the patterns.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Phase(StrEnum):
    """Where in the life of a job a stack stands; the order is the order in time."""

    INIT = "init"
    LOAD = "load"
    PREPROCESS = "preprocess"
    COMPILE = "compile"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    GENERATE = "generate"
    TRAIN = "train"
    EVAL = "eval"
    SAVE = "save"
    TEARDOWN = "teardown"
    UNKNOWN = ""


PHASE_ORDER = {phase: number for number, phase in enumerate(Phase)}

# Phases that hold others: an evaluation has its own data and forward.
CONTEXT_PHASES = frozenset(
    {
        Phase.INIT,
        Phase.LOAD,
        Phase.PREPROCESS,
        Phase.COMPILE,
        Phase.GENERATE,
        Phase.EVAL,
        Phase.SAVE,
        Phase.TEARDOWN,
    }
)

# Phases that may last for minutes while the other ranks wait, without being a hang.
SLOW_PHASES = frozenset(
    {
        Phase.INIT,
        Phase.LOAD,
        Phase.PREPROCESS,
        Phase.COMPILE,
        Phase.GENERATE,
        Phase.EVAL,
        Phase.SAVE,
        Phase.DATA,
    }
)

# Function name -> operation. The names of the first table mean a collective in any file.
DISTINCT_COLLECTIVES: dict[str, str] = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "ncclAllReduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "allgather_fn": "all_gather",
    "ncclAllGather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_fn": "reduce_scatter",
    "ncclReduceScatter": "reduce_scatter",
    "broadcast_object_list": "broadcast",
    "_broadcast_coalesced": "broadcast",
    "ncclBroadcast": "broadcast",
    "_bcast_pipe_scalar": "broadcast",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "wait_for_everyone": "barrier",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather_object": "gather",
    "scatter_object_list": "scatter",
    "send_object_list": "send",
    "recv_object_list": "recv",
    "batch_isend_irecv": "send/recv",
    "isend": "send",
    "irecv": "recv",
    "ncclSend": "send",
    "ncclRecv": "recv",
    "gather_for_metrics": "all_gather",
}

# These names mean a collective only in a file of a communication library.
AMBIGUOUS_COLLECTIVES: dict[str, str] = {
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}

# Functions of the libraries that wait for a collective without a frame of torch.distributed below them.
IMPLICIT_COLLECTIVES: dict[str, str] = {
    "wait_tensor": "wait",
    "wait_for_unshard": "all_gather",
    "foreach_all_gather": "all_gather",
    "foreach_all_gather_copy_out": "all_gather",
    "foreach_reduce": "reduce_scatter",
    "_wait_for_post_backward": "reduce_scatter",
    "finalize_backward": "reduce_scatter",
    "_all_gather_flat_param": "all_gather",
    "_unshard": "all_gather",
    "fetch_sub_module": "all_gather",
    "_fetch_sub_module_impl": "all_gather",
    "__all_gather_params": "all_gather",
    "__all_gather_params_": "all_gather",
    "_allgather_params": "all_gather",
    "_allgather_params_coalesced": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_and_partition_ipg_grads": "reduce_scatter",
    "__reduce_and_partition_ipg_grads": "reduce_scatter",
    "__avg_scatter_grads": "reduce_scatter",
    "reduce_independent_p_g_buckets_and_remove_grads": "reduce_scatter",
    "_synchronize_communication": "all_gather",
    "_sync_ddp": "all_reduce",
    "_sync_buffers": "broadcast",
    "_sync_module_states": "broadcast",
    "_sync_params_and_buffers": "broadcast",
    "_distributed_broadcast_coalesced": "broadcast",
    "_verify_params_across_processes": "all_gather",
    "_verify_param_shape_across_processes": "all_gather",
    "_exec_recv_activations": "recv",
    "_exec_recv_grads": "recv",
    "_exec_send_activations": "send",
    "_exec_send_grads": "send",
    "synchronize": "wait",
}

# Operations that name a source, a destination or a root.
POINT_TO_POINT = frozenset({"send", "recv", "send/recv"})
NAMES_A_RANK = POINT_TO_POINT | {"broadcast", "scatter", "gather", "reduce"}

# Files of libraries that communicate.
COMM_FILE = re.compile(
    r"(?:^|/)(?:torch/distributed/(?!elastic/|launcher/|checkpoint/|rendezvous|run\.py|flight_recorder/|debug/)"
    r"|torch/nn/parallel/|torch/cuda/nccl|torch/cuda/streams|deepspeed/comm/|deepspeed/runtime/comm/"
    r"|deepspeed/runtime/zero/|deepspeed/runtime/pipe/p2p|deepspeed/utils/comms_logging|deepspeed/utils/timer"
    r"|accelerate/utils/operations|horovod/|megatron/core/tensor_parallel/|megatron/core/pipeline_parallel/p2p"
    r"|megatron/mpu/|vllm/distributed/)"
    r"|distributed_c10d\.py$|c10d_logger\.py$|pynccl(?:_wrapper)?\.py$|p2p(?:_communication)?\.py$"
    r"|(?:^|/)mpu/\w+\.py$|nccl\w*\.py$"
)

# Glue between a call and what it calls: skipped when the deepest telling frame is looked for.
GLUE = frozenset(
    {
        "wrapper",
        "log_wrapper",
        "decorate_context",
        "decorate_autocast",
        "_fn",
        "inner",
        "wrapped_fn",
        "_wrapped_call_impl",
        "_call_impl",
        "__call__",
        "get_safe",
        "nvtx_wrapper",
        "instrument_w_nvtx",
        "record_function",
        "__torch_function__",
        "__torch_dispatch__",
        "_lru_cache",
        "helper",
    }
)

# Dispatch inside torch between an operation and the kernel that waits.
GLUE_FILE = re.compile(
    r"torch/(?:_ops|_compile|_library/|utils/_contextlib|autograd/function|_dynamo/eval_frame)"
)

BACKWARD_ENGINE = frozenset({"_engine_run_backward"})

STORE_FUNCTIONS = frozenset(
    {
        "_store_based_barrier",
        "_create_c10d_store",
        "_create_store_from_options",
        "_tcp_rendezvous_handler",
        "_env_rendezvous_handler",
        "_file_rendezvous_handler",
        "_torchelastic_use_agent_store",
        "_get_default_store",
        "synchronize_impl",
        "get_all",
    }
)
RENDEZVOUS_FUNCTIONS = frozenset(
    {
        "next_rendezvous",
        "_rendezvous",
        "init_process_group",
        "_new_process_group_helper",
        "rendezvous",
        "new_group",
        "_new_group_with_tag",
        "split_group",
        "initialize_distributed",
        "init_distributed",
        "_initialize_distributed",
    }
)
# Made by all ranks of the world, in the same order, also by those that are not members.
GROUP_FUNCTIONS = frozenset({"new_group", "_new_group_with_tag", "split_group", "new_subgroups"})
STORE_NATIVE = re.compile(r"TCPStore|FileStore|PrefixStore|tcputil")
COLLECTIVE_NATIVE = re.compile(
    r"c10d::(?:Work|ProcessGroup|ops|Reducer)|gloo::|AsyncWork|ncclGroup|ProcessGroupGloo"
)

# Wakes up again and again while it waits for worker processes (datasets' map): no sign of work.
WORKER_POLLS = frozenset({"iflatmap_unordered"})
# Files whose functions talk with or wait for processes below this one.
CHILD_FILE = re.compile(
    r"(?:^|/)(?:multiprocessing|multiprocess|joblib|torch/multiprocessing|torch/utils/data|torch/_inductor"
    r"|torchdata|datasets)/"
    r"|(?:^|/)subprocess\.py$|concurrent/futures/process\.py$|(?:^|/)dataloader\.py$"
)
# socket, ssl and multiprocessing.connection: reads that wait for somebody's bytes.
RECEIVES = frozenset({"readinto", "recv_into", "recv", "_recv", "_recv_bytes", "read1"})
# The same for writes to a socket or a pipe: a blocked one wakes up when the other side has taken something.
SENDS = frozenset({"send", "sendall", "_send", "_send_bytes", "sendto", "sendfile"})
# Writes a line to the log every ten seconds while it waits for other ranks.
LOGS_ITS_WAIT = frozenset({"_store_based_barrier"})
# Libraries that poll for a lock file.
LOCK_FILE = re.compile(r"(?:^|/)(?:filelock|portalocker|fasteners)/|torch/utils/_?file_?(?:baton|lock)")

LOADER_FUNCTIONS = frozenset(
    {
        "_try_get_data",
        "_get_data",
        "_next_data",
        "_next_index",
        "_reset",
        "_try_put_index",
        "_shutdown_workers",
    }
)
# Of a loader with worker processes: what is called below these talks with a worker.
TAKES_FROM_WORKERS = frozenset({"_try_get_data", "_get_data"})
LOADER_FILE = re.compile(
    r"torch/utils/data/|(?:^|/)dataloader\.py$|data_loader\.py$|accelerate/data_loader|datasets/"
)

TEARDOWN_FUNCTIONS = frozenset(
    {
        "destroy_process_group",
        "_abort_process_group",
        "_shutdown",
        "_exit_function",
        "_python_exit",
        "_run_exitfuncs",
        "_exitfunc",
        "destroy_model_parallel",
        "end_training",
        "destroy",
    }
)

FINALIZER_FILES = re.compile(r"(?:^|/)weakref\.py$")
FINALIZER_FUNCTIONS = frozenset({"_run_finalizers", "__del__", "_run_after_forkers", "_after_fork"})

WEIGHT_SYNC_FUNCTIONS = frozenset(
    {"init_communicator", "update_named_param", "update_model_params", "_init_vllm"}
)

# (phase, function names, pattern of the file or None for any library or own file)
_PHASES: tuple[tuple[Phase, tuple[str, ...], str | None], ...] = (
    (Phase.TEARDOWN, tuple(sorted(TEARDOWN_FUNCTIONS - {"_shutdown", "destroy", "_exitfunc"})), None),
    (Phase.TEARDOWN, ("_shutdown", "_exitfunc"), r"threading\.py|weakref\.py"),
    (Phase.INIT, tuple(sorted(RENDEZVOUS_FUNCTIONS | STORE_FUNCTIONS)), None),
    (
        Phase.INIT,
        ("initialize", "setup_distributed", "init_communicator", "_init_vllm", "prepare_model"),
        None,
    ),
    (Phase.INIT, ("prepare", "_prepare_fsdp2", "_prepare_deepspeed", "prepare_data_loader"), r"accelerate"),
    (Phase.INIT, ("__init__",), r"trainer|torch/nn/parallel|deepspeed/runtime/engine"),
    (Phase.INIT, ("_find_and_load", "_load_unlocked", "exec_module"), None),
    (
        Phase.LOAD,
        ("from_pretrained", "_load_pretrained_model", "load_state_dict", "safe_open", "load_file"),
        None,
    ),
    (
        Phase.LOAD,
        ("load_checkpoint", "load_model", "load_weights", "_load_from_checkpoint", "load_dataset"),
        None,
    ),
    (
        Phase.PREPROCESS,
        ("_map_single", "iflatmap_unordered", "_encode_dataset", "safe_ddp_context", "main_process_first"),
        None,
    ),
    (Phase.PREPROCESS, ("map", "filter"), r"datasets|dataset"),
    (
        Phase.PREPROCESS,
        ("_prepare_dataset", "tokenize", "tokenize_fn", "preprocess", "local_main_process_first"),
        None,
    ),
    (
        Phase.COMPILE,
        ("_jit_compile", "jit_load", "_compile", "compile_fx", "compile_inner", "_compile_fx_inner"),
        None,
    ),
    (
        Phase.COMPILE,
        ("codegen_and_compile", "_run_ninja_build", "compile_to_fn", "precompile", "warmup_compile"),
        None,
    ),
    (
        Phase.DATA,
        ("_next_data", "_get_data", "_try_get_data", "get_batch_samples", "_exec_load_micro_batch"),
        None,
    ),
    (
        Phase.DATA,
        ("get_batch", "_next_batch", "get_batch_pipe", "next_batch", "collate_fn", "__getitem__"),
        None,
    ),
    (Phase.DATA, ("__next__", "__iter__"), r"dataloader|data_loader|torch/utils/data"),
    (Phase.BACKWARD, ("backward", "_engine_run_backward", "run_backward"), None),
    (
        Phase.BACKWARD,
        ("reduce_and_partition_ipg_grads", "allreduce_gradients", "post_backward", "pre_backward"),
        None,
    ),
    (Phase.BACKWARD, ("_exec_backward_pass", "_exec_recv_grads", "finalize_backward"), None),
    (
        Phase.FORWARD,
        ("forward", "compute_loss", "_exec_forward_pass", "pre_sub_module_forward_function"),
        None,
    ),
    (Phase.FORWARD, ("loss_fn", "loss_func"), None),
    (Phase.FORWARD, ("_pre_forward", "_post_forward", "pre_forward"), None),
    (Phase.OPTIMIZER, ("optimizer_step", "_optimizer_step", "clip_grad_norm_", "_take_model_step"), None),
    (Phase.OPTIMIZER, ("step", "zero_grad"), r"torch/optim|optimizer|bitsandbytes"),
    (
        Phase.GENERATE,
        ("generate", "_generate", "_sample", "_generate_and_score_completions", "_beam_search"),
        None,
    ),
    (Phase.GENERATE, ("_calculate_rewards", "_generate_single_turn", "rollout", "update_named_param"), None),
    (Phase.EVAL, ("evaluate", "evaluation_loop", "eval_batch", "prediction_step", "prediction_loop"), None),
    (
        Phase.EVAL,
        ("validate", "validation_step", "_evaluate", "evaluate_and_print_results", "_maybe_log_eval"),
        None,
    ),
    (Phase.EVAL, ("gather_for_metrics", "compute_metrics"), None),
    (
        Phase.SAVE,
        ("save_model", "_save_checkpoint", "save_checkpoint", "save_pretrained", "save_state"),
        None,
    ),
    (
        Phase.SAVE,
        ("_save", "save", "_legacy_save", "save_file", "async_save", "_write_item"),
        r"torch/|safetensors|tr",
    ),
    (
        Phase.SAVE,
        ("get_state_dict", "state_dict", "get_model_state_dict", "save_fsdp_model"),
        None,
    ),
    (Phase.SAVE, ("_zero3_consolidated_16bit_state_dict", "save_16bit_model", "_get_fsdp_state_dict"), None),
    (
        Phase.TRAIN,
        ("train", "_inner_training_loop", "training_step", "train_one_epoch", "training_loop", "fit"),
        None,
    ),
    (
        Phase.TRAIN,
        ("_run_train", "train_step", "train_batch", "pretrain", "_exec_schedule", "train_epoch"),
        None,
    ),
)

# Words in names of a user's own functions. Only whole words between underscores count.
_OWN_WORDS: tuple[tuple[Phase, str], ...] = (
    (Phase.PREPROCESS, "preprocess|preprocessing|tokenize|tokenise|tokenizing|encode|prepare|featurize|pack"),
    (Phase.EVAL, "eval|evaluate|evaluation|validate|validation|test"),
    (Phase.SAVE, "save|saving|checkpoint|ckpt|dump|export|write|writing"),
    (Phase.LOAD, "load|loading|download"),
    (Phase.COMPILE, "compile|compiling|warmup|warm"),
    (Phase.GENERATE, "generate|generation|rollout|reward|rewards"),
    (Phase.TEARDOWN, "teardown|cleanup|shutdown|close|destroy"),
    (Phase.INIT, "init|setup|initialize"),
    (Phase.FORWARD, "forward"),
    (Phase.BACKWARD, "backward"),
    (Phase.TRAIN, "train|training|fit|epoch"),
)

PHASE_BY_NAME: dict[str, list[tuple[Phase, re.Pattern[str] | None]]] = {}
for _phase, _names, _file in _PHASES:
    for _name in _names:
        PHASE_BY_NAME.setdefault(_name, []).append((_phase, re.compile(_file) if _file else None))

# What is written or dumped with these words is no checkpoint.
_FIGURES = "summary|summaries|metric|metrics|stat|stats|log|logs|report|results|scalar|scalars"
FIGURES = frozenset(_FIGURES.split("|"))

OWN_WORD_PHASES: dict[str, Phase] = {word: phase for phase, words in _OWN_WORDS for word in words.split("|")}

# Library areas that tell what a thread is busy with when no collective is in sight.
COMPILE_FILE = re.compile(r"torch/_(?:inductor|dynamo|functorch)/|torch/utils/cpp_extension|(?:^|/)triton/")
ARITHMETIC_FILE = re.compile(
    r"torch/(?:nn/(?:functional|modules)|optim/|_tensor)|transformers/(?:models|activations)/"
)
SAVE_FILE = re.compile(r"torch/serialization|torch/distributed/checkpoint/|safetensors/")
