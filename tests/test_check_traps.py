"""Every trap is found where it is, and not found where it is mended."""

# The table keeps one case a row where it can.
# ruff: noqa: E501

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ftdash.engine import check
from ftdash.engine.check.findings import Severity
from tests.support.check import (
    BF16,
    DDP,
    FOUR_BIT,
    FSDP2,
    GOOD_RUN,
    HEAD,
    LORA,
    ZERO3,
    codes,
    fsdp1,
    fsdp2,
    sbatch,
    script,
    zero3,
)

# code: (files that have the trap, the same files with it mended)
CASES = {
    "batch-arithmetic": (
        {"a.yaml": {**DDP, "num_processes": 4}, "d.json": {**ZERO3, "train_batch_size": 64,
         "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}},
        {"a.yaml": {**DDP, "num_processes": 8}, "d.json": {**ZERO3, "train_batch_size": 64,
         "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}},
    ),
    "batch-arithmetic#indivisible": (
        {"d.json": {**ZERO3, "train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}},
        {"d.json": {**ZERO3, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}},
    ),
    "deepspeed-trainer-mismatch": (
        {"d.json": zero3({"gradient_accumulation_steps": 1}),
         "t.py": script("gradient_accumulation_steps=4, deepspeed='d.json'")},
        {"d.json": zero3(), "t.py": script("gradient_accumulation_steps=4, deepspeed='d.json'")},
    ),
    "tokens-not-averaged": (
        {"a.yaml": DDP, "t.py": script("average_tokens_across_devices=False")},
        {"a.yaml": DDP, "t.py": script("average_tokens_across_devices=True")},
    ),
    "two-precisions": (
        {"a.yaml": {**DDP, "mixed_precision": "fp16"}, "t.py": script("bf16=True")},
        {"a.yaml": DDP, "t.py": script("bf16=True")},
    ),
    "fsdp2-old-flag": ({"a.yaml": fsdp2(fsdp_use_orig_params=True)}, {"a.yaml": fsdp2()}),
    "fsdp2-old-flag#version-1": ({"a.yaml": fsdp2(fsdp_backward_prefetch="BACKWARD_PRE")},
                                 {"a.yaml": fsdp1(fsdp_backward_prefetch="BACKWARD_PRE")}),
    "fsdp2-hybrid-shard-lost": (
        {"a.yaml": fsdp2(fsdp_sharding_strategy="HYBRID_SHARD")},
        {"a.yaml": fsdp1(fsdp_sharding_strategy="HYBRID_SHARD")},
    ),
    "fsdp2-reshard-value": (
        {"a.yaml": fsdp2(fsdp_reshard_after_forward="FULL_SHARD")},
        {"a.yaml": fsdp2(fsdp_reshard_after_forward="false")},
    ),
    "fsdp2-keys-without-version": (
        {"a.yaml": fsdp2(fsdp_version=None)}, {"a.yaml": fsdp2()},
    ),
    "fsdp-unknown-key": (
        {"a.yaml": fsdp2(fsdp_reshard_after_foward=True)}, {"a.yaml": fsdp2()},
    ),
    "fsdp-no-wrap": ({"a.yaml": fsdp2(fsdp_auto_wrap_policy="NO_WRAP")}, {"a.yaml": fsdp2()}),
    "fsdp-wrong-layer-class": (
        {"a.yaml": fsdp2(), "t.py": script(model="meta-llama/Llama-3.1-8B")},
        {"a.yaml": fsdp2(), "t.py": script()},
    ),
    "checkpointing-twice": (
        {"a.yaml": fsdp2(fsdp_activation_checkpointing=True), "t.py": script("gradient_checkpointing=True")},
        {"a.yaml": fsdp2(fsdp_activation_checkpointing=True), "t.py": script("gradient_checkpointing=False")},
    ),
    "save-model-writes-nothing": (
        {"a.yaml": fsdp2(fsdp_state_dict_type="SHARDED_STATE_DICT"), "t.py": script(end="trainer.save_model('out')")},
        {"a.yaml": fsdp2(fsdp_state_dict_type="SHARDED_STATE_DICT"), "t.py": script(
            end="""
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            trainer.save_model('out')
            """)},
    ),
    "save-gathers-whole-model": (
        {"a.yaml": fsdp2(), "t.py": script(model="Qwen/Qwen3-32B")},
        {"a.yaml": fsdp2(fsdp_state_dict_type="SHARDED_STATE_DICT"), "t.py": script(model="Qwen/Qwen3-32B")},
    ),
    "save-gathers-whole-model#adapters": (
        {"d.json": ZERO3, "t.py": script("deepspeed='d.json'", peft=LORA, model="Qwen/Qwen3-32B")},
        {"d.json": ZERO3, "t.py": script("deepspeed='d.json'", peft=LORA, model="Qwen/Qwen3-4B")},
    ),
    "fsdp-renamed-key": (
        {"a.yaml": fsdp1(fsdp_backward_prefetch_policy="BACKWARD_PRE")}, {"a.yaml": fsdp1(fsdp_backward_prefetch="BACKWARD_PRE")},
    ),
    "fsdp2-old-flag#script": (
        {"t.py": script("fsdp='full_shard', fsdp_config={'version': 2, 'use_orig_params': True}")},
        {"t.py": script("fsdp='full_shard', fsdp_config={'version': 1, 'use_orig_params': True}")},
    ),
    "fsdp2-hybrid-shard-lost#command": (
        {"r.sh": "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_sharding_strategy HYBRID_SHARD t.py"},
        {"r.sh": "accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD t.py"},
    ),
    "offload-param-stage#in-a-script": (
        {"t.py": "d = {'zero_optimization': {'stage': 2, 'offload_param': {'device': 'cpu'}}}\na = TrainingArguments(deepspeed=d)\n"},
        {"t.py": "d = {'zero_optimization': {'stage': 3, 'offload_param': {'device': 'cpu'}}}\na = TrainingArguments(deepspeed=d)\n"},
    ),
    "logits-memory": (
        {"t.py": script("max_length=32768")}, {"t.py": script("max_length=32768, use_liger_kernel=True")},
    ),
    "every-rank-loads": ({"a.yaml": fsdp2(fsdp_cpu_ram_efficient_loading=False)}, {"a.yaml": fsdp2()}),
    "accelerate-unknown-key": ({"a.yaml": {**DDP, "num_process": 8}}, {"a.yaml": DDP}),
    "cpu-single-process": (
        {"a.yaml": {**DDP, "distributed_type": "MULTI_CPU"}},
        {"a.yaml": {**DDP, "distributed_type": "MULTI_CPU", "mpirun_config": {"mpirun_hostfile": "hosts"}}},
    ),
    "cpu-single-process#flag": (
        {"run.sh": "accelerate launch --cpu --num_processes 2 train.py"},
        {"run.sh": "torchrun --nproc-per-node 2 train.py"},
    ),
    "processes-over-machines": (
        {"a.yaml": {**DDP, "num_machines": 3, "main_process_ip": "n0"}},
        {"a.yaml": {**DDP, "num_machines": 2, "main_process_ip": "n0"}},
    ),
    "no-main-process-ip": (
        {"a.yaml": {**DDP, "num_machines": 2}}, {"a.yaml": {**DDP, "num_machines": 2, "main_process_ip": "n0"}},
    ),
    "deepspeed-file-and-settings": (
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16",
                    "deepspeed_config": {"deepspeed_config_file": "d.json"}}, "d.json": ZERO3},
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 8,
                    "deepspeed_config": {"deepspeed_config_file": "d.json"}}, "d.json": ZERO3},
    ),
    "offload-param-stage": (
        {"d.json": zero3(stage=2, offload_param={"device": "cpu"})},
        {"d.json": zero3(stage=3, offload_param={"device": "cpu"})},
    ),
    "offload-param-stage#accelerate": (
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 2,
                    "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}}},
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 2,
                    "deepspeed_config": {"zero_stage": 2, "offload_param_device": "none"}}},
    ),
    "gather-16bit-off": (
        {"d.json": zero3(stage3_gather_16bit_weights_on_model_save=False)}, {"d.json": zero3()},
    ),
    "zero3-init-off": (
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 2,
                    "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False}}},
        {"a.yaml": {"distributed_type": "DEEPSPEED", "num_processes": 2,
                    "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}}},
    ),
    "zero-unknown-key": ({"d.json": zero3(stage3_prefetch_bucketsize=1)}, {"d.json": zero3()}),
    "nvme-path": (
        {"d.json": zero3(offload_param={"device": "nvme"})},
        {"d.json": zero3(offload_param={"device": "nvme", "nvme_path": "/nvme"})},
    ),
    "pinned-host-memory": (
        {"d.json": zero3(offload_optimizer={"device": "cpu", "pin_memory": True})},
        {"d.json": zero3(offload_optimizer={"device": "cpu", "pin_memory": False})},
    ),
    "moe-leaf-module": (
        {"d.json": ZERO3, "t.py": script("deepspeed='d.json'", model="Qwen/Qwen3-30B-A3B")},
        {"d.json": zero3(leaf_module={"classes": ["Qwen3MoeSparseMoeBlock"]}),
         "t.py": script("deepspeed='d.json'", model="Qwen/Qwen3-30B-A3B")},
    ),
    "mesh-product": (
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_dp_shard_size": 4}}},
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_dp_shard_size": 4,
                                                    "parallelism_config_dp_replicate_size": 2}}},
    ),
    "mesh-product#distributed-config": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', "
                 "distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))",
         "r.sh": "torchrun --nproc_per_node 8 t.py"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', "
                 "distributed_config=DistributedConfig(tp_size=2, fsdp_size=4))",
         "r.sh": "torchrun --nproc_per_node 8 t.py"},
    ),
    "mesh-ep": (
        {"t.py": "c = DistributedConfig(ep_size=4, "
                 "fsdp_size=2)"}, {"t.py": "c = DistributedConfig(ep_size=4, fsdp_size=8)"},
    ),
    "mesh-pp": (
        {"t.py": "c = DistributedConfig(pp_size=2, ep_size=2, "
                 "tp_size=2)"}, {"t.py": "c = DistributedConfig(pp_size=2, tp_size=2)"},
    ),
    "mesh-needs-fsdp2": (
        {"a.yaml": {**fsdp1(), "parallelism_config": {"parallelism_config_dp_shard_size": 8}}},
        {"a.yaml": {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shard_size": 8}}},
    ),
    "tp-heads": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-30B-A3B', "
                 "distributed_config=DistributedConfig(tp_size=8))"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-30B-A3B', "
                 "distributed_config=DistributedConfig(tp_size=4))"},
    ),
    "ep-experts": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B', "
                 "distributed_config=DistributedConfig(ep_size=8, fsdp_size=8))"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-30B-A3B', "
                 "distributed_config=DistributedConfig(ep_size=8, fsdp_size=8))"},
    ),
    "tied-embeddings-fsdp2": (
        {"a.yaml": fsdp2(), "t.py": script(model="Qwen/Qwen3-0.6B"), "requirements.txt": "torch==2.13.0\naccelerate==1.14.0\n"},
        {"a.yaml": fsdp2(), "t.py": script(model="Qwen/Qwen3-0.6B"), "requirements.txt": "torch==2.13.0\naccelerate==1.15.0\n"},
    ),
    "quant-storage": (
        {"a.yaml": fsdp2(), "t.py": script(load=FOUR_BIT.format(storage="torch.uint8", dtype="torch.bfloat16"))},
        {"a.yaml": fsdp2(), "t.py": script(load=BF16)},
    ),
    "quant-storage-dtype": (
        {"a.yaml": fsdp2(), "t.py": script(load=FOUR_BIT.format(storage="torch.bfloat16", dtype="torch.float16"))},
        {"a.yaml": fsdp2(), "t.py": script(load=BF16)},
    ),
    "int8-under-sharding": (
        {"a.yaml": fsdp1(), "t.py": script(load="quantization_config=BitsAndBytesConfig(load_in_8bit=True)")},
        {"a.yaml": DDP, "t.py": script(load="quantization_config=BitsAndBytesConfig(load_in_8bit=True)")},
    ),
    "use-reentrant": (
        {"a.yaml": DDP, "t.py": script("gradient_checkpointing_kwargs={'use_reentrant': True}", peft=LORA)},
        {"a.yaml": DDP, "t.py": script("gradient_checkpointing_kwargs={'use_reentrant': False}", peft=LORA)},
    ),
    "ddp-find-unused": (
        {"a.yaml": DDP, "t.py": script("ddp_find_unused_parameters=True, gradient_checkpointing=True")},
        {"a.yaml": DDP, "t.py": script("ddp_find_unused_parameters=True")},
    ),
    "adapter-saved-empty": (
        {"a.yaml": fsdp2(fsdp_activation_checkpointing=True), "t.py": script(peft=LORA)},
        {"a.yaml": fsdp2(fsdp_activation_checkpointing=False), "t.py": script(peft=LORA)},
    ),
    "adapter-switch-fsdp2": (
        {"a.yaml": fsdp2(), "t.py": script(peft=LORA, end="model.set_adapter('other')")},
        {"a.yaml": DDP, "t.py": script(peft=LORA, end="model.set_adapter('other')")},
    ),
    "modules-to-save": (
        {"t.py": script(peft=", peft_config=LoraConfig(modules_to_save=['embed_tokens'])")},
        {"t.py": script(peft=", peft_config=LoraConfig(modules_to_save=['score'])")},
    ),
    "kbit-preparation": (
        {"t.py": script(end="model = prepare_model_for_kbit_training(model)")}, {"t.py": script()},
    ),
    "lora-tp-version": (
        {"t.py": "c = DistributedConfig(tp_size=2)\np = "
                 "LoraConfig(r=8)", "requirements.txt": "peft==0.20.0\n"},
        {"t.py": "c = DistributedConfig(tp_size=2)\np = "
                 "LoraConfig(r=8)", "requirements.txt": "peft==0.21.1\n"},
    ),
    "trl-auxiliary-loss": (
        {"t.py": script(model="Qwen/Qwen3-30B-A3B"), "requirements.txt": "trl==1.14.0\n"},
        {"t.py": script(model="Qwen/Qwen3-30B-A3B"), "requirements.txt": "trl==1.15.0\n"},
    ),
    "router-logits-off": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', router_aux_loss_coef=0.01, "
                 "output_router_logits=False)"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', router_aux_loss_coef=0.01, "
                 "output_router_logits=True)"},
    ),
    "router-logits-off#default": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x')\nm.config.router_aux_loss_coef = 0.01"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x')\nm.config.router_aux_loss_coef = 0.0"},
    ),
    "expert-adapters-unmerged": (
        {"t.py": script(peft=", peft_config=LoraConfig(target_parameters=['mlp.experts.gate_up_proj'])")},
        {"t.py": script(peft=", peft_config=LoraConfig(target_parameters=['mlp.experts.gate_up_proj'])",
                        end="trainer.model.merge_and_unload()")},
    ),
    "fsdp2-upcast": (
        {"a.yaml": fsdp2(), "t.py": script(peft=LORA), "requirements.txt": "accelerate==1.12.0\n"},
        {"a.yaml": fsdp2(), "t.py": script(peft=LORA), "requirements.txt": "accelerate==1.15.0\n"},
    ),
    "save-on-one-rank": (
        {"a.yaml": fsdp2(), "t.py": script(end="""
            if trainer.is_world_process_zero():
                trainer.save_model('out')
            """)},
        {"a.yaml": fsdp2(), "t.py": script(end="""
            trainer.save_model('out')
            if trainer.is_world_process_zero():
                print('saved')
            """)},
    ),
    "collective-on-one-rank": (
        {"t.py": script(end="""
            if int(os.environ.get("RANK", 0)) != 0:
                sys.exit()
            trainer.evaluate()
            """)},
        {"t.py": script(end="trainer.evaluate()")},
    ),
    "collective-on-one-rank#through-a-function": (
        {"t.py": "def report(t):\n    t.accelerator.gather(1)\n\nif accelerator.is_main_process:\n    "
                 "report(trainer)\n"},
        {"t.py": "def report(t):\n    t.accelerator.gather(1)\n\nreport(trainer)\n"},
    ),
    "collective-on-one-rank#paired-barriers": (
        {"t.py": "if rank == 0:\n    dist.barrier()\n"},
        {"t.py": "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()\n"},
    ),
    "collective-on-one-rank#in-a-method": (
        {"t.py": "class A:\n    def run(self):\n        pass\nclass B:\n    def run(self):\n        if self.is_main:\n            self.accelerator.gather(1)\n"},
        {"t.py": "class A:\n    def run(self):\n        pass\nclass B:\n    def run(self):\n        self.accelerator.gather(1)\n"},
    ),
    "collective-on-one-rank#decorator": (
        {"t.py": "@rank_zero_only\ndef report():\n    dist.all_reduce(1)\n"}, {"t.py": "def report():\n    dist.all_reduce(1)\n"},
    ),
    "generate-on-one-rank": (
        {"a.yaml": fsdp2(), "t.py": script(end="if accelerator.is_main_process:\n    model.generate(x)\n")},
        {"a.yaml": fsdp2(), "t.py": script(end="model.generate(x)\n")},
    ),
    "data-parallel": (
        {"t.py": script(end="model = torch.nn.DataParallel(model)")},
        {"t.py": script(end="model = torch.nn.parallel.DistributedDataParallel(model)")},
    ),
    "plain-python-launch": (
        {"r.sh": sbatch("python t.py\n", nodes=1), "t.py": script()},
        {"r.sh": sbatch("torchrun --standalone --nproc-per-node 8 t.py\n", nodes=1), "t.py": script()},
    ),
    "arguments-after-model": (
        {"d.json": ZERO3, "t.py": "m = AutoModelForCausalLM.from_pretrained('x')\na = "
                                  "TrainingArguments(deepspeed='d.json')\n"},
        {"d.json": ZERO3, "t.py": "a = TrainingArguments(deepspeed='d.json')\nm = "
                                  "AutoModelForCausalLM.from_pretrained('x')\n"},
    ),
    "tp-plan-outside": (
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', tp_plan='auto')"},
        {"t.py": "m = AutoModelForCausalLM.from_pretrained('x', "
                 "distributed_config=DistributedConfig(tp_plan='auto'))"},
    ),
    "device-map-distributed": (
        {"a.yaml": DDP, "t.py": script(load="device_map='auto'")}, {"t.py": script(load="device_map='auto'")},
    ),
    "load-time-sharding-resume": (
        {"t.py": "c = DistributedConfig(tp_size=2)\na = TrainingArguments(output_dir='x')\n"},
        {"t.py": "c = DistributedConfig(tp_size=2)\na = TrainingArguments(output_dir='x', "
                 "save_only_model=True)\n"},
    ),
    "two-backends": (
        {"x.yaml": {"base_model": "Qwen/Qwen3-8B", "fsdp": ["full_shard"], "deepspeed": "zero2.json"}},
        {"x.yaml": {"base_model": "Qwen/Qwen3-8B", "fsdp": ["full_shard"]}},
    ),
    "rendezvous-localhost": (
        {"r.sh": sbatch("export MASTER_ADDR=localhost\nexport "
                        "MASTER_PORT=$((9000+SLURM_JOB_ID%999))\n" + GOOD_RUN)},
        {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "rendezvous-localhost#one-node": (
        {"r.sh": "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint localhost:29500 t.py"},
        {"r.sh": "torchrun --nnodes 1 --nproc_per_node 8 --rdzv_endpoint localhost:29500 t.py"},
    ),
    "rendezvous-launch-node": (
        {"r.sh": sbatch("export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR\n" + GOOD_RUN)}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "rendezvous-own-host": (
        {"r.sh": sbatch("srun bash -c 'torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint "
                        "$(hostname):2000$SLURM_JOB_ID t.py'\n")},
        {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "fixed-port": (
        {"r.sh": sbatch("export MASTER_PORT=29500\n" + GOOD_RUN)}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "fixed-port#exclusive": (
        {"r.sh": sbatch("export MASTER_PORT=29500\n" + GOOD_RUN)},
        {"r.sh": sbatch("export MASTER_PORT=29500\n" + GOOD_RUN, exclusive="user")},
    ),
    "port-per-task": (
        {"r.sh": sbatch(HEAD + "srun bash -c 'torchrun --nnodes 2 --nproc_per_node 8 --master_port "
                               "$((RANDOM % 9 + 9000)) t.py'\n")},
        {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "early-expansion": (
        {"r.sh": sbatch(HEAD + "srun torchrun --nnodes 2 --nproc_per_node 8 --node_rank $SLURM_PROCID "
                               "--master_addr $MASTER_ADDR t.py\n")},
        {"r.sh": sbatch(HEAD + "srun bash -c 'torchrun --nnodes 2 --nproc_per_node 8 --node_rank "
                               "$SLURM_PROCID t.py'\n")},
    ),
    "early-expansion#variable": (
        {"r.sh": sbatch(HEAD + 'ARGS="--nnodes 2 --node_rank $SLURM_NODEID"\nsrun torchrun $ARGS '
                               '--nproc_per_node 8 t.py\n')},
        {"r.sh": sbatch(HEAD + 'ARGS="--nnodes 2"\nsrun bash -c "torchrun $ARGS --node_rank \\$SLURM_NODEID '
                               't.py"\n')},
    ),
    "early-expansion#export": (
        {"r.sh": sbatch(HEAD + "export RANK=$SLURM_PROCID\nsrun python t.py\n", ntasks_per_node=8)},
        {"r.sh": sbatch(HEAD + "srun bash -c 'export RANK=$SLURM_PROCID; python t.py'\n", ntasks_per_node=8)},
    ),
    "tasks-times-processes": (
        {"r.sh": sbatch(HEAD + GOOD_RUN, ntasks_per_node=8)}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "more-processes-than-gpus": (
        {"r.sh": sbatch(HEAD + GOOD_RUN, gres="gpu:4")}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "idle-gpus": (
        {"r.sh": sbatch("torchrun --standalone --nproc_per_node 2 t.py\n", nodes=1)},
        {"r.sh": sbatch("torchrun --standalone --nproc_per_node 8 t.py\n", nodes=1)},
    ),
    "launcher-on-one-node": (
        {"r.sh": sbatch(HEAD + GOOD_RUN.removeprefix("srun "))}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "nnodes-missing": (
        {"r.sh": sbatch(HEAD + "srun torchrun --standalone --nproc_per_node 8 "
                               "t.py\n")}, {"r.sh": sbatch(HEAD + GOOD_RUN)},
    ),
    "one-gpu-per-task": (
        {"r.sh": sbatch("srun python t.py\n", ntasks_per_node=8, gpus_per_task=1)},
        {"r.sh": sbatch("srun python t.py\n", ntasks_per_node=8, gpus_per_node=8)},
    ),
    "one-task-many-gpus": (
        {"r.sh": sbatch("srun python t.py\n")}, {"r.sh": sbatch("srun python t.py\n", ntasks_per_node=8)},
    ),
    "srun-cpus-per-task": (
        {"r.sh": sbatch(HEAD + GOOD_RUN, cpus_per_task=64)},
        {"r.sh": sbatch(HEAD + "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" + GOOD_RUN, cpus_per_task=64)},
    ),
    "signal-batch-only": (
        {"r.sh": sbatch(HEAD + GOOD_RUN, signal="B:USR1@120")},
        {"r.sh": sbatch(HEAD + "trap 'touch stop' "
                               "USR1\n" + GOOD_RUN.rstrip() + " &\nwait\n", signal="B:USR1@120")},
    ),
    "signal-trap-waits": (
        {"r.sh": sbatch(HEAD + "trap 'touch stop' USR1\n" + GOOD_RUN, signal="B:USR1@120")},
        {"r.sh": sbatch(HEAD + "trap 'touch stop' "
                               "USR1\n" + GOOD_RUN.rstrip() + " &\nwait\n", signal="B:USR1@120")},
    ),
    "signal-launcher": (
        {"r.sh": sbatch(HEAD + GOOD_RUN, signal="USR1@120")}, {"r.sh": sbatch(HEAD + GOOD_RUN, signal="TERM@120")},
    ),
    "fsdp-version-unset": (
        {"a.yaml": {**FSDP2, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}}, {"a.yaml": fsdp1()},
    ),
    "single-process": ({"a.yaml": {**DDP, "distributed_type": "NO"}}, {"a.yaml": DDP}),
    "mesh-axis": (
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 4}}},
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_cp_size": 2,
                                                    "parallelism_config_dp_shard_size": 4}}},
    ),
    "mesh-axis#replicas-of-tp": (
        {"t.py": "c = ParallelismConfig(dp_replicate_size=2, tp_size=4)"},
        {"t.py": "c = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)"},
    ),
    "expert-rank": (
        {"t.py": script(model="Qwen/Qwen3-30B-A3B", peft=", peft_config=LoraConfig(r=16, "
                                                         "target_parameters=['experts'])")},
        {"t.py": script(model="Qwen/Qwen3-30B-A3B",
                        peft=", peft_config=LoraConfig(r=16, target_parameters=['experts'], "
                             "rank_pattern={'experts': 1})")},
    ),
    "nnodes-standalone": (
        {"r.sh": "torchrun --standalone --nnodes 2 --nproc_per_node 8 t.py"},
        {"r.sh": "torchrun --standalone --nproc_per_node 8 t.py"},
    ),
    "count-overridden": (
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_dp_shard_size": 8}},
         "r.sh": "accelerate launch --config_file a.yaml --num_processes 4 t.py"},
        {"a.yaml": {**FSDP2, "parallelism_config": {"parallelism_config_dp_shard_size": 8}},
         "r.sh": "accelerate launch --config_file a.yaml --num_processes 8 t.py"},
    ),
    "expert-parallel-flag": (
        {"t.py": "c = DistributedConfig(tp_size=2, enable_expert_parallel=True)"},
        {"t.py": "c = DistributedConfig(tp_size=2, ep_size=2)"},
    ),
    "elastic-checkpoint": ({"d.json": zero3(elastic_checkpoint=True)}, {"d.json": zero3(elastic_checkpoint=False)}),
    "offload-optimizer-stage": (
        {"d.json": zero3(stage=0, offload_optimizer={"device": "cpu"})},
        {"d.json": zero3(stage=1, offload_optimizer={"device": "cpu"})},
    ),
    "fsdp1-deprecated": (
        {"p.json": {"strategy": "fsdp1", "model": "qwen3-8b", "gpus": 8}},
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 8}},
    ),
    "nothing-to-shard": (
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 1}},
        {"p.json": {"strategy": "none", "model": "qwen3-8b", "gpus": 1}},
    ),
    "shard-across-nodes": (
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 16}},
        {"p.json": {"strategy": "hsdp", "model": "qwen3-8b", "gpus": 16}},
    ),
    "zero-resume": (
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8}},
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 8}},
    ),
    "not-rehearsed": (
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8, "offload": "nvme"}},
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8}},
    ),
    "plan-invalid": (
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": "many"}},
        {"p.json": {"strategy": "zero3", "model": "qwen3-8b", "gpus": 8}},
    ),
    "plan-refused": (
        {"p.json": {"strategy": "zero2", "model": "qwen3-8b", "gpus": 8, "offload": "all"}},
        {"p.json": {"strategy": "zero2", "model": "qwen3-8b", "gpus": 8, "offload": "optimizer"}},
    ),
    "tp-over-pcie": (
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 8, "tp": 2, "gpu": "rtx4090-24g"}},
        {"p.json": {"strategy": "fsdp", "model": "qwen3-8b", "gpus": 8, "tp": 2, "gpu": "h100-sxm-80g"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_trap_is_found_and_its_mended_form_is_not(case, tmp_path):
    code = case.split("#")[0]
    trap, mended = CASES[case]
    assert code in codes(tmp_path / "trap", trap)
    assert code not in codes(tmp_path / "mended", mended)


@pytest.mark.parametrize(
    ("config", "severity"), [(fsdp1(), Severity.ERROR), (fsdp2(), Severity.WARNING)], ids=["fsdp1", "fsdp2"]
)
def test_uint8_storage_stops_fsdp1_and_is_left_whole_by_fsdp2(config, severity, tmp_path):
    files = {
        "a.yaml": config,
        "t.py": script(load=FOUR_BIT.format(storage="torch.uint8", dtype="torch.bfloat16")),
    }
    assert codes(tmp_path / "x", files)["quant-storage"] is severity


def test_every_code_that_a_rule_reports_has_a_case():
    """Findings of this machine and of checkpoints on disk are tested in files of their own."""
    elsewhere = {
        "checkpoint-world-size",
        "checkpoint-incomplete",
        "port-taken",
        "host-memory",
        "file-not-found",
    } | {"file-broken"}
    tested = {case.split("#")[0] for case in CASES}
    assert _reported() - tested - elsewhere == set()


def _reported() -> set[str]:
    """The codes that stand as first argument of a finding in the rules."""
    found = set()
    for path in Path(check.__file__).parent.glob("rules_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                if name in ("error", "warning", "note", "report") or isinstance(node.func, ast.IfExp):
                    found.add(node.args[0].value)
    return found
