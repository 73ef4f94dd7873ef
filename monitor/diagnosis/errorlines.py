"""Error lines whose cause is known: what each means, what helps, and where that is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownError:
    """What a line means. `source` is an issue, or the library's file that raises it."""

    cause: str
    fix: str
    source: str


_Tell = Callable[[re.Match[str]], KnownError]


def _always(cause: str, fix: str, source: str) -> _Tell:
    told = KnownError(cause, fix, source)
    return lambda match: told


def _flattened_dtypes(match: re.Match[str]) -> KnownError:
    """FSDP1 flattens a unit into one tensor; which two dtypes meet tells which part is the odd one."""
    kinds = {match["first"], match["second"]}
    source = "axolotl-ai-cloud/axolotl#1494"
    if "uint8" in kinds:
        return KnownError(
            "4-bit weights are stored as uint8, beside parameters that are not",
            "bnb_4bit_quant_storage and dtype the same float type (bfloat16), and adapters of that dtype",
            source,
        )
    if kinds == {"bfloat16", "float32"} or kinds == {"float16", "float32"}:
        low = "bf16" if "bfloat16" in kinds else "fp16"
        return KnownError(
            f"fp32 parameters (adapters, norms or a head) are in one FSDP unit with {low} ones",
            f"load with dtype={'bfloat16' if low == 'bf16' else 'float16'} and cast the adapters to it "
            "(autocast_adapter_dtype=False), or wrap them apart (fsdp_use_orig_params, PEFT's "
            "fsdp_auto_wrap_policy), or use FSDP2",
            source,
        )
    return KnownError(
        f"{match['first']} and {match['second']} parameters are in one FSDP unit",
        "one dtype for all: dtype, bnb_4bit_quant_storage, bnb_4bit_compute_dtype and mixed precision alike",
        source,
    )


def _other_world(match: re.Match[str]) -> KnownError:
    return KnownError(
        f"the optimizer's shards were written by {match['saved']} data-parallel ranks, and "
        f"{match['now']} read them",
        "start with the old number, or: ftdash checkpoint convert --to universal, and set load_universal",
        "deepspeedai/DeepSpeed#2898",
    )


def _same_gpu(match: re.Match[str]) -> KnownError:
    return KnownError(
        f"ranks {match['one']} and {match['other']} took the same GPU ({match['gpu']})",
        "torch.cuda.set_device(LOCAL_RANK) before the first collective; no fixed cuda:0; as many processes "
        "on a node as it has GPUs; under Slurm no --gpus-per-task with a launcher of several ranks",
        "verl-project/verl#161",
    )


def _twice_ready(match: re.Match[str]) -> KnownError:
    return KnownError(
        "DDP saw a gradient twice: reentrant checkpointing, or a parameter used in several forwards",
        'gradient_checkpointing_kwargs={"use_reentrant": False}, and ddp_find_unused_parameters=False',
        "huggingface/trl#921",
    )


def _pattern(text: str, tell: _Tell) -> tuple[re.Pattern[str], _Tell]:
    return re.compile(text, re.IGNORECASE), tell


_LINES: tuple[tuple[re.Pattern[str], _Tell], ...] = (
    _pattern(
        r"must flatten tensors with uniform dtype but got (?:torch\.)?(?P<first>\w+)"
        r" and (?:torch\.)?(?P<second>\w+)",
        _flattened_dtypes,
    ),
    _pattern(r"expected to mark a variable ready only once", _twice_ready),
    _pattern(
        r"checkpoint being loaded used a DP world size of (?P<saved>\d+) but the current world size is "
        r"(?P<now>\d+)",
        _other_world,
    ),
    _pattern(
        r"duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+)"
        r" both on CUDA device (?P<gpu>\w+)",
        _same_gpu,
    ),
    _pattern(
        r"expected to have finished reduction in the prior iteration",
        _always(
            "some parameters took no part in the loss, and DDP waits for their gradients",
            "ddp_find_unused_parameters=True, or freeze what the forward does not use",
            "pytorch/pytorch#43259",
        ),
    ),
    _pattern(
        r"element 0 of tensors does not require grad",
        _always(
            "nothing that learns is in the graph: frozen inputs under reentrant checkpointing, or no adapter",
            'model.enable_input_require_grads(), or gradient_checkpointing_kwargs={"use_reentrant": False}',
            "locuslab/open-unlearning#178",
        ),
    ),
    _pattern(
        r"killed by signal: Bus error|unexpected bus error encountered in worker"
        r"|unable to (?:open|write to) shared memory",
        _always(
            "the data loader's workers filled /dev/shm",
            "a larger /dev/shm (docker --shm-size=16g or --ipc=host), or fewer num_workers",
            "pytorch/pytorch#5040",
        ),
    ),
    _pattern(
        r"error while creating shared memory segment|posix_fallocate failed ?: No space left",
        _always(
            "NCCL found no room in /dev/shm",
            "a larger /dev/shm (docker --shm-size=1g or --ipc=host), or NCCL_SHM_DISABLE=1",
            "NVIDIA/nccl#342",
        ),
    ),
    _pattern(
        r"call to shm_open failed ?: permission denied",
        _always("NCCL may not write to /dev/shm", "give /dev/shm mode 1777", "NVIDIA/nccl#328"),
    ),
    _pattern(
        r"cannot copy out of meta tensor",
        _always(
            "weights were built without data (meta device), and something copies them as they are",
            "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states; turn both off to see which part "
            "is not loaded; to_empty() before to()",
            "huggingface/accelerate#2031",
        ),
    ),
    _pattern(
        r"got mixed torch\.Tensor and DTensor",
        _always(
            "a plain tensor meets a sharded one: a module outside of fully_shard or the TP plan, or a second "
            "forward under checkpointing",
            "shard the root module too, and call the model itself (not a submodule) so that its hooks run",
            "pytorch/pytorch#153354",
        ),
    ),
    _pattern(
        r"current loss scale already at minimum",
        _always(
            "fp16 overflows in every step: the weights were trained in bf16, or the loss is not finite",
            "bf16 instead of fp16 where the GPU has it; else a lower learning rate, and look at the data",
            "deepspeedai/DeepSpeedExamples#418",
        ),
    ),
    _pattern(
        r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint",
        _always(
            "the file holds ZeRO-3 placeholders instead of weights: it was saved from one rank's view",
            "stage3_gather_16bit_weights_on_model_save=true; from the shards: ftdash checkpoint convert",
            "OpenRLHF/OpenRLHF#839",
        ),
    ),
    _pattern(
        r"the shape in current model is torch\.Size\(\[0\]\)",
        _always(
            "a plain state dict is loaded into a model that ZeRO-3 has partitioned",
            "load through from_pretrained, or inside deepspeed.zero.GatheredParameters",
            "haotian-liu/LLaVA#1619",
        ),
    ),
    _pattern(
        r"can't train a model that has been loaded in (?:8-bit|4-bit|8-bit or 4-bit) precision on",
        _always(
            "the quantised model is not on this rank's own GPU",
            'device_map={"": PartialState().local_process_index} at load, never device_map="auto"',
            "huggingface/accelerate#1515",
        ),
    ),
    _pattern(
        r"cannot perform fine-tuning on purely quantized models",
        _always(
            "a quantised model without adapters has nothing that can learn",
            "peft_config for the trainer, or get_peft_model first",
            "transformers/trainer_utils.py",
        ),
    ),
    _pattern(
        r"attempting to unscale FP16 gradients",
        _always(
            "parameters that learn are fp16, and fp16 mixed precision wants fp32 masters",
            "load the model (or cast the adapters) in fp32, or use bf16",
            "torch/amp/grad_scaler.py",
        ),
    ),
    _pattern(
        r"target modules .{1,400} not found in the base model",
        _always(
            "LoRA's target_modules name no layer of this model",
            'target_modules="all-linear", or the names that model.named_modules() prints',
            "peft/tuners/tuners_utils.py",
        ),
    ),
    _pattern(
        r"could not find (?:a|the) transformer layer class",
        _always(
            "FSDP's wrap policy names a layer class that this model does not have",
            "fsdp_transformer_layer_cls_to_wrap: the model's own _no_split_modules",
            "accelerate/utils/dataclasses.py",
        ),
    ),
    _pattern(
        r"train_batch_size is not equal to micro_batch_per_gpu",
        _always(
            "DeepSpeed's three batch sizes do not multiply out over the ranks that were started",
            'all three "auto", or train_batch_size = micro batch x accumulation x ranks',
            "deepspeed/runtime/config.py",
        ),
    ),
    _pattern(
        r"torch\.utils\.checkpoint: (?:a different number of tensors was saved|recomputed values for the)",
        _always(
            "the recomputed forward was another than the first: a cache, random routing, or a changed mode",
            "use_cache=False; deterministic routing; or use_reentrant=True for this model",
            "torch/utils/checkpoint.py",
        ),
    ),
    _pattern(
        r"your setup doesn't support bf16",
        _always(
            "no GPU that computes bf16 is seen: an old one, or none at all",
            "look at nvidia-smi and torch.cuda.is_available(); fp16=True on GPUs before Ampere",
            "transformers/training_args.py",
        ),
    ),
    _pattern(
        r"installed CUDA version \S+ does not match the",
        _always(
            "DeepSpeed compiles its operators with another CUDA than torch was built with",
            "CUDA_HOME of torch's CUDA version (torch.version.cuda), or DS_SKIP_CUDA_CHECK=1 within a major",
            "deepspeed/ops/op_builder/builder.py",
        ),
    ),
    _pattern(
        r"asking to pad but the tokenizer does not have a padding token",
        _always(
            "the tokenizer has no pad token",
            "tokenizer.pad_token = a token that the data never holds (not eos, which would be masked)",
            "transformers/tokenization_utils_base.py",
        ),
    ),
    _pattern(
        r"srcIndex < srcSelectDimSize|index out of range in self|indexSelect\w*Index.*Assertion",
        _always(
            "a token id or position is past the embedding: tokens were added, or the text is too long",
            "model.resize_token_embeddings(len(tokenizer)); truncate to max_position_embeddings",
            "pytorch/pytorch aten/src/ATen/native/cuda/Indexing.cu",
        ),
    ),
    _pattern(
        r"Assertion `t >= 0 && t < n_classes` failed",
        _always(
            "a label is not below the number of classes (the vocabulary) and is not -100",
            "labels of padding are -100; the head is as large as the tokenizer",
            "pytorch/pytorch aten/src/ATen/native/cuda/Loss.cu",
        ),
    ),
    _pattern(
        r"invalid device ordinal",
        _always(
            "a rank asks for a GPU that this node does not show it",
            "as many processes on a node as CUDA_VISIBLE_DEVICES (or Slurm) leaves GPUs",
            "CUDA runtime API, cudaErrorInvalidDevice",
        ),
    ),
    _pattern(
        r"no kernel image is available for execution on the device",
        _always(
            "torch (or an extension) was not built for this GPU's architecture",
            "a torch build for this GPU (torch.cuda.get_arch_list()); reinstall compiled extensions",
            "CUDA runtime API, cudaErrorNoKernelImageForDevice",
        ),
    ),
    _pattern(
        r"an illegal memory access was encountered",
        _always(
            "a kernel read or wrote outside of its memory; the line that reports it is seldom its own",
            "CUDA_LAUNCH_BLOCKING=1 names the kernel; on one node only: look for Xid lines in dmesg",
            "CUDA runtime API, cudaErrorIllegalAddress",
        ),
    ),
    _pattern(
        r"uncorrectable (?:NVLink )?(?:ECC )?error (?:was )?(?:detected|encountered)",
        _always(
            "the GPU's memory or its NVLink is broken",
            "take the node out (drain it) and start without it",
            "CUDA runtime API, cudaErrorECCUncorrectable",
        ),
    ),
    _pattern(
        r"cannot re-initialize CUDA in forked subprocess",
        _always(
            "a forked worker uses the GPU",
            "multiprocessing start method spawn or forkserver; keep GPU work out of the data loader",
            "torch/cuda/__init__.py",
        ),
    ),
    _pattern(
        r"Too many open files|received \d+ items of ancdata",
        _always(
            "the limit of open files is too low for the data loader's shared tensors",
            'ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy("file_system")',
            "torch/multiprocessing docs, sharing strategies",
        ),
    ),
    _pattern(
        r"you are trying to access a gated repo|Access to model \S+ is restricted"
        r"|401 Client Error.*huggingface\.co",
        _always(
            "the hub refuses the model: it is gated, or the token is not there on this node",
            "accept its terms on the hub, and export HF_TOKEN on every node",
            "huggingface_hub/errors.py",
        ),
    ),
    _pattern(
        r"DUE TO TIME LIMIT",
        _always(
            "Slurm ended the job at its time limit",
            "a longer --time, or --signal=B:USR1@300 with a save, and --requeue",
            "Slurm, slurmstepd",
        ),
    ),
    _pattern(
        r"DUE TO NODE FAILURE|CANCELLED .* DUE TO PREEMPTION",
        _always(
            "Slurm took the node away",
            "start again from the last whole checkpoint: --requeue with a save on its signal",
            "Slurm, slurmstepd",
        ),
    ),
)
# A search of thousands of lines: only a line with one of these words is looked at closely.
_WORDS = re.compile(
    r"dtype|ready only once|DP world|duplicate GPU|finished reduction|require grad|bus error|shared memory"
    r"|fallocate|shm_open|meta tensor|DTensor|loss scale|torch\.Size\(\[0\]\)|precision on|purely quantized"
    r"|unscale|target modules|layer class|train_batch_size|utils\.checkpoint|support bf16|CUDA version"
    r"|padding token|SelectDim|out of range in self|indexSelect|n_classes|device ordinal|kernel image"
    r"|illegal memory|uncorrectable|forked subprocess|open files|ancdata|gated|restricted|401 Client|DUE TO",
    re.IGNORECASE,
)


def known_error(text: str) -> KnownError | None:
    """What is known of an error line, None for every other line."""
    if not _WORDS.search(text):
        return None
    for pattern, tell in _LINES:
        if match := pattern.search(text):
            return tell(match)
    return None
