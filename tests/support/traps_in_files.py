"""Traps in how a file is written: values and keys that its reader does not know, quoted numbers, types."""

# The tables keep one case a row where they can.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.check import DDP, ZERO3, fsdp1, fsdp2, titan, zero3

MULTI = {**DDP, "num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29501}
MEGATRON = {"distributed_type": "MEGATRON_LM", "num_processes": 8, "mixed_precision": "bf16"}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 4}


def megatron(tp: object, pp: object) -> dict:
    return {**MEGATRON, "megatron_lm_config": {"megatron_lm_tp_degree": tp, "megatron_lm_pp_degree": pp}}


def deepspeed(**section: object) -> dict:
    return {**DEEPSPEED, "deepspeed_config": section}


# code: (files that have the trap, the same files with it mended); what follows # tells cases of a code apart
CASES = {
    "value-unknown": ({"a.yaml": {**DDP, "distributed_type": "MULTIGPU"}}, {"a.yaml": {**DDP, "distributed_type": "multi_gpu"}}),
    "value-unknown#precision": ({"a.yaml": {**DDP, "mixed_precision": "bfloat16"}}, {"a.yaml": {**DDP, "mixed_precision": False}}),
    "value-unknown#state-dict": ({"a.yaml": fsdp2(fsdp_state_dict_type="SHARDED")}, {"a.yaml": fsdp2(fsdp_state_dict_type="sharded_state_dict")}),
    "value-unknown#fsdp1-only": ({"a.yaml": fsdp2(fsdp_state_dict_type="LOCAL_STATE_DICT")}, {"a.yaml": fsdp1(fsdp_state_dict_type="LOCAL_STATE_DICT")}),
    "value-unknown#version": ({"a.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2.0}\n"}, {"a.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: '2'}\n"}),
    "value-unknown#stage": ({"d.json": zero3(stage=4)}, {"d.json": zero3(stage=3)}),
    "value-unknown#device": ({"d.json": zero3(offload_param={"device": "ram"})}, {"d.json": zero3(offload_param={"device": "auto"})}),
    "key-misspelt": ({"d.json": {"zero_optimisation": {"stage": 3}, "train_batch_size": "auto", "bf16": {"enabled": True}}}, {"d.json": zero3()}),
    "key-misspelt#section": ({"a.yaml": deepspeed(zero_stages=2)}, {"a.yaml": deepspeed(zero_stage=2)}),
    "key-misspelt#mesh": (
        {"a.yaml": {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shared_size": 8}}},
        {"a.yaml": {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shard_size": 8}}},
    ),
    "key-misspelt#torchtitan": ({"j.toml": titan("tensor_parallel_degre = 2")}, {"j.toml": titan("tensor_parallel_degree = 2")}),
    "key-misspelt#plan": (
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8, "grad_acum": 4}},
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8, "grad_accum": 4}},
    ),
    "zero-unknown-key#offload": (
        {"d.json": zero3(offload_optimizer={"device": "cpu", "pin_memmory": True})},
        {"d.json": zero3(offload_optimizer={"device": "cpu", "pin_memory": True})},
    ),
    "offload-param-stage#old-switch": ({"d.json": zero3(stage=2, cpu_offload_param=True)}, {"d.json": zero3(stage=2, cpu_offload=True)}),
    "offload-param-stage#quoted": (
        {"a.yaml": deepspeed(zero_stage="2", offload_param_device="cpu")}, {"a.yaml": deepspeed(zero_stage="3", offload_param_device="cpu")},
    ),
    "number-as-text": ({"d.json": {**ZERO3, "train_batch_size": "64"}}, {"d.json": {**ZERO3, "train_batch_size": 64}}),
    "batch-arithmetic#quoted": (
        {"a.yaml": {**DDP, "num_processes": "4"}, "d.json": {**ZERO3, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}},
        {"a.yaml": {**DDP, "num_processes": "8"}, "d.json": {**ZERO3, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}},
    ),
    "section-shape": ({"a.yaml": "distributed_type: FSDP\nfsdp_config:\n- fsdp_version: 2\n"}, {"a.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"}),
    "section-ignored": ({"a.yaml": {**fsdp2(), "distributed_type": "MULTI_GPU"}}, {"a.yaml": {**fsdp2(), "deepspeed_config": {}}}),
    "single-process#yaml-no": ({"a.yaml": "distributed_type: NO\nnum_processes: 4\n"}, {"a.yaml": "distributed_type: NO\nnum_processes: 1\n"}),
    "repeated-key": (
        {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\nmachine_rank: 0\nnum_processes: 4\n"},
        {"a.yaml": "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: &x {fsdp_version: 2}\nfp8_config: {<<: *x, fsdp_version: 1}\n"},
    ),
    "machine-rank": ({"a.yaml": {**MULTI, "machine_rank": 2}}, {"a.yaml": {**MULTI, "machine_rank": 1}}),
    "port-range": ({"a.yaml": {**MULTI, "main_process_port": 99999}}, {"a.yaml": {**MULTI, "main_process_port": 0}}),
    "more-processes-than-gpus#ids": ({"a.yaml": {**DDP, "gpu_ids": "0,1,2,3"}}, {"a.yaml": {**DDP, "num_processes": 4, "gpu_ids": "0,1,2,3"}}),
    "mesh-product#megatron": ({"a.yaml": megatron(3, 2)}, {"a.yaml": megatron(2, 2)}),
    "mesh-product#megatron-command": (
        {"r.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4\n"},
        {"r.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2\n"},
    ),
    "version-too-old": ({"a.yaml": fsdp2(), "requirements.txt": "torch==2.5.1\n"}, {"a.yaml": fsdp2(), "requirements.txt": "torch==2.7.0\n"}),
    "version-too-old#mesh": (
        {"a.yaml": {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shard_size": 8}}, "requirements.txt": "accelerate==1.9.0\n"},
        {"a.yaml": {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shard_size": 8}}, "requirements.txt": "accelerate==1.10.1\n"},
    ),
    "plain-python-launch#one-command": (
        {"r.sh": "CUDA_VISIBLE_DEVICES=0,1,2,3 python t.py\n", "t.py": "from transformers import Trainer\n"},
        {"r.sh": "CUDA_VISIBLE_DEVICES=0 python t.py\n", "t.py": "from transformers import Trainer\n"},
    ),
    "plan-invalid#strategy": ({"p.json": {"strategy": "zero", "model": "qwen3-8b", "gpus": 8}}, {"p.json": {"strategy": "zero1", "model": "qwen3-8b", "gpus": 8}}),
    "plan-invalid#count": (
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 0, "tp": 0, "method": "lora"}},
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 8, "tp": 1, "method": "lora"}},
    ),
    "plan-invalid#unknown-model": (
        {"p.json": {"strategy": "zero3", "model": "qwen9-8b", "gpus": 8}}, {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8}},
    ),
}  # fmt: skip
