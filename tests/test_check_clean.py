"""Well-formed files of every kind give no error and hardly a warning; broken ones give one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from ftdash.engine.check.documents import DocumentError, Kind, read_document
from ftdash.engine.check.findings import Severity
from ftdash.engine.check.registry import check_files
from ftdash.tui.cli import UserError, guarded, run

ACCELERATE = {
    "single": {"distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16", "use_cpu": False},
    "ddp": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": 8,
        "gpu_ids": "all",
    },
    "nodes": {
        "distributed_type": "MULTI_GPU",
        "num_machines": 2,
        "num_processes": 16,
        "machine_rank": 1,
        "main_process_ip": "10.1.1.10",
        "main_process_port": 9898,
        "rdzv_backend": "static",
    },
    "xpu": {"distributed_type": "MULTI_XPU", "num_processes": 4, "ipex_config": {"ipex": True}},
    "tpu": {"distributed_type": "XLA", "num_processes": 8, "downcast_bf16": "no", "tpu_use_sudo": False},
    "fp8": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "TE", "fp8_format": "E4M3"},
    },
    "fsdp1": {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_use_orig_params": True,
            "fsdp_sync_module_states": True,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
            "fsdp_offload_params": False,
        },
    },
    "fsdp2": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 100000,
            "fsdp_offload_params": True,
        },
    },
    "hsdp-tp": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_tp_size": 2,
            "parallelism_config_cp_size": 1,
        },
    },
    "zero2": {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "mixed_precision": "fp16",
        "deepspeed_config": {
            "zero_stage": 2,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero3_init_flag": False,
        },
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "mixed_precision": "bf16",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_param_device": "cpu",
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "deepspeed_multinode_launcher": "standard",
        },
    },
}
DEEPSPEED = {
    "batch-only": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    },
    "stage1": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}, "train_batch_size": 16},
    "stage2": {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
    },
    "stage3-nvme": {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e10},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
        },
        "train_batch_size": "auto",
    },
    "zero-plus-plus": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_batch_size": 64,
    },
}
OTHERS = {
    "axolotl.yaml": {
        "base_model": "NousResearch/Meta-Llama-3.1-8B",
        "adapter": "qlora",
        "load_in_4bit": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lora_target_linear": True,
    },
    "axolotl-fsdp2.yaml": {
        "base_model": "meta-llama/Llama-3.1-8B",
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    },
    "factory.yaml": {
        "stage": "sft",
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "finetuning_type": "lora",
        "template": "llama3",
        "per_device_train_batch_size": 1,
        "bf16": True,
    },
    "trl.yaml": {
        "model_name_or_path": "Qwen/Qwen3-4B",
        "dataset_name": "trl-lib/Capybara",
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 4,
        "bf16": True,
        "output_dir": "out",
    },
}
TRAIN = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

def main():
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, gradient_checkpointing=True)
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype=torch.bfloat16)
    trainer = Trainer(model=model, args=args, train_dataset=load())
    with args.main_process_first(desc="map"):
        data = load()
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model("out")
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        trainer.log_metrics("eval", metrics)
        print(metric.compute(predictions=[], references=[]))
        tokenizer.save_pretrained("out")

if __name__ == "__main__":
    main()
"""
LOOP = """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
    predictions = accelerator.gather_for_metrics(model(**batch).logits)
accelerator.wait_for_everyone()
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("out", state_dict=state, save_function=accelerator.save)
"""
BATCH = """#!/bin/bash
#SBATCH --job-name=sft
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
set -e
module load cuda
export HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export LAUNCHER="accelerate launch --config_file fsdp.yaml --num_processes $((SLURM_NNODES * 8)) \\
  --num_machines $SLURM_NNODES --main_process_ip $HEAD --main_process_port 29500 \\
  --machine_rank \\$SLURM_PROCID"
srun --kill-on-bad-exit=1 bash -c "$LAUNCHER train.py --epochs 3"
"""


def files() -> dict[str, str]:
    found = {f"{name}.yaml": yaml.safe_dump(config) for name, config in ACCELERATE.items()}
    found |= {f"{name}.json": json.dumps(config, indent=1) for name, config in DEEPSPEED.items()}
    found |= {name: yaml.safe_dump(config) for name, config in OTHERS.items()}
    return found | {"train.py": TRAIN, "loop.py": LOOP, "job.sbatch": BATCH}


@pytest.mark.parametrize("name", files())
def test_a_well_formed_file_has_no_error_and_no_warning(name, tmp_path):
    path = tmp_path / name
    path.write_text(files()[name])
    loud = [finding for finding in check_files([path]) if finding.severity is not Severity.NOTE]
    assert not loud


def test_script_config_and_batch_file_are_checked_together_without_a_word(tmp_path):
    for name, text in (("fsdp.yaml", files()["fsdp2.yaml"]), ("train.py", TRAIN), ("job.sbatch", BATCH)):
        (tmp_path / name).write_text(text)
    (tmp_path / "fsdp.yaml").write_text(
        files()["fsdp2.yaml"]
        .replace("SHARDED_STATE_DICT", "FULL_STATE_DICT")
        .replace("activation_checkpointing: true", "activation_checkpointing: false")
    )
    assert not [
        finding for finding in check_files([tmp_path / "job.sbatch"]) if finding.severity is Severity.ERROR
    ]


def test_what_ftdash_generates_passes_its_own_checks(tmp_path):
    for strategy in ("ddp", "fsdp", "hsdp", "zero2", "zero3", "fsdp1"):
        out = tmp_path / strategy
        gpus = "16" if strategy == "hsdp" else "8"
        assert (
            run(
                [
                    "configs",
                    "--model",
                    "qwen3-30b-a3b",
                    "--gpus",
                    gpus,
                    "--strategy",
                    strategy,
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
        for path in sorted(out.iterdir()):
            if path.suffix in (".yaml", ".json"):
                findings = [finding for finding in check_files([path]) if finding.severity is Severity.ERROR]
                assert not findings


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("run.json", '{"run": "r", "created": 1.0, "plan": null}', Kind.PLAN),
        ("config.json", '{"model_type": "llama", "hidden_size": 64}', Kind.MODEL),
        ("adapter_config.json", '{"peft_type": "LORA"}', Kind.ADAPTER),
        ("requirements.txt", "torch==2.13.0\n", Kind.VERSIONS),
        ("launch", "torchrun --nproc-per-node 2 train.py\n", Kind.SHELL),
        ("job", "#!/bin/bash\n#SBATCH --nodes=1\n", Kind.SHELL),
        ("tool", "#!/usr/bin/env python\nprint(1)\n", Kind.SCRIPT),
    ],
)
def test_files_are_recognised_by_what_they_hold(name, text, kind, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    assert read_document(path).kind is kind


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.yaml", b"a: [1\n", "not YAML"),
        ("x.json", b"{", "not JSON"),
        ("x.py", b"def (:\n", "not Python"),
        ("x.yaml", b"\xff\xfe\x00", "not a text file"),
        ("x.yaml", b"", "empty"),
        ("x.yaml", b"- 1\n- 2\n", "not a mapping"),
        ("x.yaml", b"colour: blue\n", "not recognised"),
        ("x.md", b"# hello\n", "not recognised"),
    ],
)
def test_an_unreadable_file_is_one_line_that_names_it(name, content, reason, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        run(["check", str(path)])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        run(["check", str(tmp_path / "none.yaml")])
    with pytest.raises(DocumentError, match="no checkpoint"):
        read_document(tmp_path)


def test_json_has_the_fixed_shape_and_errors_set_the_exit_status(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}))
    command = [sys.executable, "-c", "from ftdash.tui.cli import main; main()", "check", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert [set(finding) for finding in findings] == [{"code", "severity", "where", "text", "fix"}]
    assert findings[0]["code"] == "offload-param-stage"
    assert findings[0]["where"] == "d.json:1"


def test_a_deepspeed_file_that_is_not_there_is_a_warning(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 2,
                                    "deepspeed_config": {"deepspeed_config_file": "gone.json"}}))  # fmt: skip
    assert {finding.code: finding.severity for finding in check_files([path])} == {
        "file-not-found": Severity.WARNING
    }


def test_a_deepspeed_file_that_is_broken_is_an_error_where_it_is_named(tmp_path):
    path = tmp_path / "a.yaml"
    section = {"deepspeed_config_file": "d.json"}
    config = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    path.write_text(yaml.safe_dump(config))
    (tmp_path / "d.json").write_text("{")
    (found,) = check_files([path])
    assert (found.code, found.severity) == ("file-broken", Severity.ERROR)
    assert "not JSON" in found.text


ANCHORS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", '{"a":' * 20_000),
        ("digits.json", '{"train_batch_size":' + "9" * 6000 + "}"),
        ("deep.yaml", "[" * 1200),
        ("date.yaml", "distributed_type: FSDP\nx: 2024-13-45\n"),
        ("anchors.yaml", f"distributed_type: FSDP\n{ANCHORS}"),
        ("itself.yaml", "distributed_type: FSDP\nfsdp_config: &f\n  self: *f\n"),
        ("deep.py", "x=" + "-" * 50_000 + "1"),
    ],
)
@pytest.mark.parametrize("read", ["check", "plan"])
def test_a_hostile_file_is_one_line_that_names_it(name, content, read, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(content)
    flags = ["check", str(path)] if read == "check" else ["plan", "--from", str(path), "--model", "qwen3-8b"]
    assert guarded([*flags, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert str(path) in said.err


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_bytes(b"\xef\xbb\xbfdistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    assert read_document(path).kind is Kind.ACCELERATE
    assert read_document(path).get("distributed_type").value == "FSDP"


def test_a_launch_command_in_a_variable_with_c10d_is_no_error(tmp_path):
    path = tmp_path / "launch.slurm"
    path.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
        "NODES=($(scontrol show hostnames $SLURM_JOB_NODELIST))\n"
        'export LAUNCHER="accelerate launch --num_machines 2 --num_processes 16 '
        "--main_process_ip ${NODES[0]} --main_process_port 6000 --machine_rank $SLURM_PROCID "
        '--rdzv_backend=c10d"\n'
        'srun bash -c "$LAUNCHER train.py"\n'
    )
    assert Severity.ERROR not in {finding.severity for finding in check_files([path])}
    path.write_text(path.read_text().replace("--rdzv_backend=c10d", ""))
    assert "early-expansion" in {f.code for f in check_files([path]) if f.severity is Severity.ERROR}
