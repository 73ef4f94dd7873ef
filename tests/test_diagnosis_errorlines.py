"""Error lines whose cause is known come with cause and fix, and ordinary lines never do."""

from __future__ import annotations

import pytest

from ftdash.monitor.diagnosis import diagnose
from ftdash.monitor.diagnosis.errorlines import known_error
from ftdash.monitor.diagnosis.logs import read_logs
from ftdash.monitor.diagnosis.model import Sample, Verdict

# ruff: noqa: E501 - lines as libraries print them
KNOWN = {
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.uint8": "quant_storage",
    "ValueError: Must flatten tensors with uniform dtype but got torch.float32 and torch.bfloat16": "autocast_adapter_dtype",
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float16": "one dtype for all",
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of": "use_reentrant",
    "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current world size is 4. Automatic adjustment": "--to universal",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000": "LOCAL_RANK",
    "gpu01:212:455 [1] init.cc:943 NCCL WARN Duplicate GPU detected : rank 5 and rank 4 both on CUDA device b000": "LOCAL_RANK",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.": "find_unused",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn": "enable_input_require_grads",
    "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that": "shm",
    "h:1:2 [0] include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-25 (size 9637888)": "shm",
    "NotImplementedError: Cannot copy out of meta tensor; no data!": "sync_module_states",
    "RuntimeError: aten.embedding.default: got mixed torch.Tensor and DTensor, need to convert all": "root module",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": "bf16",
    "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is torch.Size([32002, 4096]).": "gather_16bit",
    "size mismatch for 0.weight: copying a param with shape torch.Size([4096, 1024]) from checkpoint, the shape in current model is torch.Size([0]).": "GatheredParameters",
    "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than": "local_process_index",
    "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach": "peft_config",
    "ValueError: Attempting to unscale FP16 gradients.": "fp32",
    "ValueError: Target modules {'query_key_value'} not found in the base model. Please check": "all-linear",
    "ValueError: Could not find the transformer layer class LlamaDecoderLayer in the model.": "_no_split_modules",
    "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 64 != 4 * 1 * 8": "auto",
    "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata": "use_cache",
    "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu": "nvidia-smi",
    "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.8 does not match the version torch was compiled with": "CUDA_HOME",
    "ValueError: Asking to pad but the tokenizer does not have a padding token. Please select": "pad_token",
    "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [9,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed.": "resize_token_embeddings",
    "RuntimeError: CUDA error: invalid device ordinal": "CUDA_VISIBLE_DEVICES",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "get_arch_list",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "CUDA_LAUNCH_BLOCKING",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "drain",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with": "spawn",
    "RuntimeError: received 0 items of ancdata": "ulimit -n",
    "slurmstepd: error: *** JOB 812 ON gpu03 CANCELLED AT 2026-03-01T04:00:12 DUE TO TIME LIMIT ***": "--time",
    "slurmstepd: error: *** STEP 812.0 ON gpu03 CANCELLED AT 2026-03-01T04:00:12 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***": "--requeue",
}


def verdict_of(folder, text: str) -> Verdict:
    (folder / "train.log").write_text(text)
    return diagnose([Sample(logs=read_logs(folder))]).verdict


def traced(line: str) -> str:
    return f'Traceback (most recent call last):\n  File "/home/me/sft.py", line 9, in main\n    trainer.train()\n{line}\n'


@pytest.mark.parametrize(("line", "fix"), KNOWN.items(), ids=[line[:60] for line in KNOWN])
def test_a_known_line_comes_with_its_cause_and_fix(line, fix, tmp_path):
    bare = verdict_of(tmp_path, f"step 4 loss 1.0\n{line}\n")
    assert bare.kind == ("stopped-from-outside" if line.startswith("slurmstepd") else "crash")
    assert fix in bare.fix
    assert any(text.startswith("known: ") for text in bare.evidence)
    raised = verdict_of(tmp_path, traced(line))
    assert fix in raised.fix


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 1.2, 'grad_norm': 0.3, 'learning_rate': 1e-5}",
        "UserWarning: torch.utils.checkpoint: please pass in use_reentrant=True or use_reentrant=False explicitly.",
        "[WARNING] Setting ds_accelerator to cuda (auto detect)",
        "loss scale: 65536.0 | grad norm: 1.2",
        "Using padding token <pad> (id 0)",
        "Target modules: q_proj, v_proj",
        "bf16 mixed precision is enabled; dtype torch.bfloat16",
        "The open files limit is 65536",
        "train_batch_size ............. 64",
        "trainable params: 41,943,040 || all params: 8,072,204,288 || trainable%: 0.52",
    ],
)
def test_ordinary_lines_are_no_errors(line, tmp_path):
    assert known_error(line) is None
    assert verdict_of(tmp_path, f"{line}\n").kind == "no-evidence"


def test_an_unknown_exception_has_no_fix_of_a_known_one(tmp_path):
    verdict = verdict_of(tmp_path, traced("KeyError: 'labels'"))
    assert verdict.kind == "crash"
    assert not any(text.startswith("known: ") for text in verdict.evidence)


def test_ncclls_reason_two_lines_below_is_the_first_failure(tmp_path):
    text = traced(
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage"
    )
    text += "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    verdict = verdict_of(
        tmp_path, text + "Duplicate GPU detected : rank 3 and rank 1 both on CUDA device e2000\n"
    )
    assert verdict.kind == "crash"
    assert "ranks 3 and 1 took the same GPU (e2000)" in " ".join(verdict.evidence)
    assert verdict_of(tmp_path, text).confidence < 0.5


@pytest.mark.parametrize(
    "killed",
    [
        "run.sh: line 9: 30211 Killed                  python sft.py",
        "/var/spool/job/slurm_script: line 31: 77 Killed    torchrun t.py",
        "Killed",
    ],
)
def test_what_the_shell_says_of_a_killed_process_is_host_memory(killed, tmp_path):
    loading = "Loading checkpoint shards:  33%|###       | 2/6 [00:21<00:43, 10.9s/it]\n"
    verdict = verdict_of(tmp_path, f"{loading}{killed}\n")
    assert verdict.kind == "host-out-of-memory"
    assert any("loading the model" in text for text in verdict.evidence)
    assert verdict.against
    later = verdict_of(tmp_path, f"{loading}{{'loss': 1.25, 'epoch': 0.1}}\n{killed}\n")
    assert later.kind == "host-out-of-memory"
    assert not any("loading the model" in text for text in later.evidence)
    assert later.confidence < verdict.confidence


def test_a_process_that_ended_otherwise_was_not_killed(tmp_path):
    assert (
        verdict_of(tmp_path, "run.sh: line 9: 30211 Terminated  python sft.py\n").kind != "host-out-of-memory"
    )
    assert verdict_of(tmp_path, "Killed 3 stale workers, line 9: 12 more\n").kind == "no-evidence"
