"""Exceptions of Python and of the process groups whose cause is known; looked up where one was raised.

The same words in an ordinary line say nothing: a package that is not there is often done without.
"""

from __future__ import annotations

import re

from ftdash.monitor.diagnosis.errorlines import KnownError

_PAD = (
    "pad to one size (accelerate's pad_across_processes, or gather_for_metrics), drop_last=True, or gather "
    "objects"
)
_ONE_MODEL = "build the model on every rank from the same configuration and seed, before it is wrapped"


def _raised(text: str, cause: str, fix: str, source: str) -> tuple[re.Pattern[str], KnownError]:
    return re.compile(text, re.I), KnownError(cause, fix, source)


_RAISED = (
    _raised(
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d"
        r"|basic_ios::clear: iostream error|\[Errno 5\] Input/output error",
        "a file could not be written to its end: most often the file system is full, or over its quota",
        "free space (`df -h`, and the quota) or write elsewhere; keep fewer checkpoints "
        "(save_total_limit); a checkpoint that was cut must not be loaded",
        "errno(3), ENOSPC and EDQUOT",
    ),
    _raised(
        r"No module named '?(?P<module>[\w.]+)",
        "a package is not in the Python environment that this rank runs in",
        "install it in the environment of every node, or start the job with the right one activated",
        "Python, ModuleNotFoundError",
    ),
    _raised(
        r"^FileNotFoundError\b",
        "a file is not where this rank looks for it",
        "check the path on this rank's node: not shared storage, another working directory, or a file "
        "that another rank had yet to write",
        "Python, FileNotFoundError",
    ),
    _raised(
        r"undefined symbol|cannot open shared object file|GLIBC(?:XX)?_[\d.]+' not found",
        "a compiled extension was built for another torch, CUDA or C library",
        "reinstall the extension against the torch that is installed",
        "dlopen(3)",
    ),
    _raised(
        r"ProcessGroupGloo::\w+: invalid tensor size",
        "the tensor and the buffers that it is gathered into differ in size: ranks hold other numbers "
        "of rows, as in a last batch that is not full",
        _PAD,
        "pytorch/pytorch ProcessGroupGloo.cpp",
    ),
    _raised(
        r"^Fatal Python error: (?:Segmentation fault|Illegal instruction)",
        "native code crashed; the line is the Python call that led into it",
        "suspect compiled extensions (of another torch, CUDA or C library), the driver, NCCL and its "
        "plugins; a core file (ulimit -c unlimited) with gdb names the native function",
        "Python, faulthandler",
    ),
    _raised(
        r"cannot identify image file|(?:invalid|unexpected end of) (?:gz|tar|zip|header)"
        r"|ReadError|BadZipFile|truncated (?:image|file|data)",
        "a file of the data set is broken or not what it is taken for",
        "look at the file that the message names; check all of them once before the job, or skip them",
        "Python, tarfile, zipfile and PIL",
    ),
    _raised(
        r"desired GPU memory utilization",
        "the inference engine found less free memory on its GPU than it was told to take",
        "a smaller gpu_memory_utilization (trl: vllm_gpu_memory_utilization), a GPU of its own for the engine"
        ", or the end of what else holds the GPU (nvidia-smi)",
        "vllm-project/vllm, EngineCore",
    ),
    _raised(
        r"CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+",
        "a CUDA library failed",
        "one of: memory that ran out (look at what was in use), a bad index or an illegal access before "
        "(CUDA_LAUNCH_BLOCKING=1), a GPU in a bad state (Xid lines in dmesg)",
        "cuBLAS and cuDNN status codes",
    ),
    _raised(
        r"DDP expects same model across all ranks",
        "the ranks built models with different numbers of parameters",
        _ONE_MODEL,
        "pytorch/pytorch torch/csrc/distributed/c10d/reducer.cpp",
    ),
    _raised(
        r"params\[\d+\] in this process with sizes .* appears not to match",
        "the ranks built models of different shapes",
        _ONE_MODEL,
        "pytorch/pytorch torch/csrc/distributed/c10d/reducer.cpp",
    ),
    _raised(
        r"device-side assert triggered",
        "a kernel refused its input: most often an index past a table (token ids, labels, positions)",
        "CUDA_LAUNCH_BLOCKING=1, or the same batch on the CPU, names the operation",
        "CUDA runtime API, cudaErrorAssert",
    ),
    _raised(
        r"\b(?:loss|grad\w*|norm)\b.{0,40}\b(?:nan|inf|infinite|non-?finite|not finite)\b"
        r"|\b(?:nan|inf|non-?finite)\b.{0,40}\b(?:loss|grad\w*|norm)\b|found (?:nan|inf)",
        "the loss or a gradient is no longer finite on this rank",
        "look at the batch of this step on this rank; clip gradients, lower the learning rate, bf16 "
        "instead of fp16; labels that are all ignored give 0/0",
        "IEEE 754",
    ),
    _raised(
        r"unspecified launch failure|CUDA error: (?:unknown error|device unavailable)|GPU is lost"
        r"|fallen off the bus|CUDA-capable device\(s\) is/are busy",
        "the GPU or its driver is in a bad state",
        "look for Xid lines (dmesg) and `nvidia-smi -q` on this node; take the node out if it comes back",
        "CUDA runtime API",
    ),
    _raised(
        r"CUDA driver version is insufficient|no CUDA-capable device is detected"
        r"|Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        "this node shows the rank no GPU that its torch can use",
        "nvidia-smi on this node; CUDA_VISIBLE_DEVICES; a torch build of the driver's CUDA version",
        "CUDA runtime API",
    ),
    _raised(
        r"DataLoader worker \(pid.*exited unexpectedly",
        "a data loader's worker died without an exception: killed, or a crash in native code",
        "num_workers=0 shows its error; `dmesg -T | grep -i killed` tells whether memory ran out",
        "pytorch/pytorch#8976",
    ),
    _raised(
        r"mat1 and mat2 shapes cannot|size of tensor a .* must match|shape '.*' is invalid for",
        "tensors of this batch do not have the shapes that the model expects",
        "look at this rank's batch and what changed its shape (padding, a last batch that is not full)",
        "PyTorch shape checks",
    ),
)


def known_exception(text: str) -> KnownError | None:
    """What is known of a raised exception, None for every other one."""
    return next((known for pattern, known in _RAISED if pattern.search(text)), None)
