"""Traps in accelerate, DeepSpeed and trainer configs, and in what they say of adapters and meshes."""

# The tables keep one case a row where they can.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.check import (
    BF16,
    DDP,
    FOUR_BIT,
    FSDP2,
    LORA,
    ZERO3,
    fsdp1,
    fsdp2,
    script,
    titan,
    zero3,
)

# code: (files that have the trap, the same files with it mended); what follows # tells cases of a code apart
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
    "fsdp2-hybrid-shard-lost#by-number": ({"a.yaml": fsdp2(fsdp_sharding_strategy=4)}, {"a.yaml": fsdp2(fsdp_sharding_strategy=1)}),
    "offload-param-stage#stage-as-text": ({"d.json": zero3(stage="2", offload_param={"device": "cpu"})},
                                          {"d.json": zero3(stage="3", offload_param={"device": "cpu"})}),
    "checkpointing-twice#file-of-fsdp-arguments": (
        {"run.sh": "torchrun --nproc_per_node 8 t.py --fsdp full_shard --fsdp_config f.json --gradient_checkpointing true\n",
         "f.json": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True}},
        {"run.sh": "torchrun --nproc_per_node 8 t.py --fsdp full_shard --fsdp_config f.json --gradient_checkpointing true\n",
         "f.json": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    ),
    "int8-under-sharding#quantization-bit": (
        {"l.yaml": {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "lora", "quantization_bit": 8, "fsdp": "full_shard"}},
        {"l.yaml": {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "lora", "quantization_bit": 4, "fsdp": "full_shard"}},
    ),
    "mesh-product#axolotl": (
        {"x.yaml": {"base_model": "Qwen/Qwen3-8B", "fsdp_version": 2, "dp_shard_size": 2, "tensor_parallel_size": 2},
         "run.sh": "axolotl train x.yaml --launcher torchrun -- --nproc_per_node=8\n"},
        {"x.yaml": {"base_model": "Qwen/Qwen3-8B", "fsdp_version": 2, "dp_shard_size": 4, "tensor_parallel_size": 2},
         "run.sh": "axolotl train x.yaml --launcher torchrun -- --nproc_per_node=8\n"},
    ),
    "mesh-axis#torchtitan": ({"j.toml": titan("data_parallel_replicate_degree = -1")}, {"j.toml": titan("data_parallel_shard_degree = -1")}),
    "mesh-product#torchtitan": (
        {"j.toml": titan("data_parallel_shard_degree = 8\ncontext_parallel_degree = 8"), "run.sh": "torchrun --nproc_per_node 8 train.py\n"},
        {"j.toml": titan("data_parallel_shard_degree = 1\ncontext_parallel_degree = 8"), "run.sh": "torchrun --nproc_per_node 8 train.py\n"},
    ),
    "mesh-ep#torchtitan": ({"j.toml": titan("data_parallel_shard_degree = 4\nexpert_parallel_degree = 8")},
                           {"j.toml": titan("data_parallel_shard_degree = 8\nexpert_parallel_degree = 8")}),
    "tp-heads#torchtitan": ({"j.toml": titan("tensor_parallel_degree = 16")}, {"j.toml": titan("tensor_parallel_degree = 8")}),
}  # fmt: skip
