"""Traps in training scripts, launch commands, batch scripts and plans."""

# The tables keep one case a row where they can.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.check import (
    DDP,
    FSDP2,
    GOOD_RUN,
    HEAD,
    ZERO3,
    fsdp1,
    fsdp2,
    sbatch,
    script,
    zero3,
)

# code: (files that have the trap, the same files with it mended); what follows # tells cases of a code apart
CASES = {
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
    "gather-16bit-off#flag": ({"run.sh": "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 8 t.py\n"},
                              {"run.sh": "accelerate launch --use_deepspeed --zero_stage 3 --zero3_save_16bit_model true --num_processes 8 t.py\n"}),
    "offload-param-stage#flag": ({"run.sh": "accelerate launch --use_deepspeed --zero_stage 2 --offload_param_device cpu t.py\n"},
                                 {"run.sh": "accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu t.py\n"}),
    "save-on-one-rank#aliased": (
        {"a.yaml": FSDP2, "t.py": "from accelerate import Accelerator as A\na = A()\nfirst = a.is_main_process\nif first:\n    a.save_state('x')\n"},
        {"a.yaml": FSDP2, "t.py": "from accelerate import Accelerator as A\na = A()\nfirst = a.is_main_process\na.save_state('x')\nif first:\n    print(1)\n"},
    ),
    "save-on-one-rank#state-dict": (
        {"t.py": "from torch.distributed.fsdp import FullyShardedDataParallel as F\nm = F(m)\nif rank == 0:\n    torch.save(m.state_dict(), 'x')\n"},
        {"t.py": "from torch.distributed.fsdp import FullyShardedDataParallel as F\nm = F(m)\ns = m.state_dict()\nif rank == 0:\n    torch.save(s, 'x')\n    torch.save(optimizer.state_dict(), 'y')\n"},
    ),
    "collective-on-one-rank#by-what-it-is": (
        {"t.py": "from trl import SFTTrainer\nt = SFTTrainer(model='x')\nif t.is_world_process_zero():\n    t.evaluate()\n"},
        {"t.py": "from trl import SFTTrainer\nt = SFTTrainer(model='x')\nt.evaluate()\nif t.is_world_process_zero():\n    metric.evaluate()\n"},
    ),
    "quant-storage#dict-handed-on": (
        {"a.yaml": fsdp1(), "t.py": "import torch\nkw = dict(load_in_4bit=True)\nkw['bnb_4bit_compute_dtype'] = torch.bfloat16\nb = BitsAndBytesConfig(**kw)\n"},
        {"a.yaml": fsdp1(), "t.py": "import torch\nkw = dict(load_in_4bit=True)\nkw['bnb_4bit_quant_storage'] = torch.bfloat16\nb = BitsAndBytesConfig(**kw)\n"},
    ),
    "tp-heads#argparse": (
        {"t.py": "p.add_argument('--tp', type=int, default=8)\np.add_argument('--model', default='Qwen/Qwen3-30B-A3B')\na = p.parse_args()\nm = AutoModelForCausalLM.from_pretrained(a.model, distributed_config=DistributedConfig(tp_size=a.tp))\n"},
        {"t.py": "p.add_argument('--tp', type=int, default=4)\np.add_argument('--model', default='Qwen/Qwen3-30B-A3B')\na = p.parse_args()\nm = AutoModelForCausalLM.from_pretrained(a.model, distributed_config=DistributedConfig(tp_size=a.tp))\n"},
    ),
    "arguments-after-model#aliased": (
        {"d.json": ZERO3, "t.py": "from transformers import AutoModelForCausalLM as M, TrainingArguments as T\nm = M.from_pretrained('Qwen/Qwen3-8B')\na = T(output_dir='o', deepspeed='d.json')\n"},
        {"d.json": ZERO3, "t.py": "from transformers import AutoModelForCausalLM as M, TrainingArguments as T\na = T(output_dir='o', deepspeed='d.json')\nm = M.from_pretrained('Qwen/Qwen3-8B')\n"},
    ),
    "data-parallel#notebook-export": ({"t.py": "# %%\n!pip install x\n%env A=1\n# %%\nm = nn.DataParallel(m)\n"}, {"t.py": "# %%\n!pip install x\n%env A=1\n# %%\nm = DDP(m)\n"}),
    "data-parallel#notebook": (
        {"n.ipynb": {"cells": [{"cell_type": "markdown", "source": "x"}, {"cell_type": "code", "source": ["!ls\n", "m = nn.DataParallel(m)\n"]}]}},
        {"n.ipynb": {"cells": [{"cell_type": "markdown", "source": "m = nn.DataParallel(m)"}, {"cell_type": "code", "source": ["!ls\n"]}]}},
    ),
    "router-logits-off#update": (
        {"t.py": "c = AutoConfig.from_pretrained('Qwen/Qwen3-30B-A3B')\nc.update({'router_aux_loss_coef': 0.01})\nm = AutoModelForCausalLM.from_config(c)\n"},
        {"t.py": "c = AutoConfig.from_pretrained('Qwen/Qwen3-30B-A3B')\nc.update({'router_aux_loss_coef': 0.01, 'output_router_logits': True})\nm = AutoModelForCausalLM.from_config(c)\n"},
    ),
    "fsdp2-hybrid-shard-lost#plugin": (
        {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy='HYBRID_SHARD')\na = Accelerator(fsdp_plugin=p)\n"},
        {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)\na = Accelerator(fsdp_plugin=p)\n"},
    ),
    "offload-param-stage#plugin": (
        {"t.py": "a = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, offload_param_device='cpu'))\n"},
        {"t.py": "a = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, offload_param_device='cpu'))\n"},
    ),
    "deepspeed-trainer-mismatch#flag-alone": (
        {"d.json": zero3({"fp16": {"enabled": False}}), "run.sh": "deepspeed --num_gpus 8 t.py --fp16 --deepspeed d.json --max_steps 5\n"},
        {"d.json": zero3({"fp16": {"enabled": True}}), "run.sh": "deepspeed --num_gpus 8 t.py --fp16 --deepspeed d.json --learning_rate ${1:-0.1}\n"},
    ),
    "two-precisions#one-or-the-other": (
        {"t.py": "c = {'zero_optimization': {'stage': 1}}\nc['bf16'] = {'enabled': True}\nc['fp16'] = {'enabled': True}\ndeepspeed.initialize(config=c)\n"},
        {"t.py": "c = {'zero_optimization': {'stage': 1}}\nif half:\n    c['bf16'] = {'enabled': True}\nelse:\n    c['fp16'] = {'enabled': True}\ndeepspeed.initialize(config=c)\n"},
    ),
    "batch-arithmetic#ranks-that-share-a-sample": (
        {"d.json": {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2},
         "run.sh": "deepspeed --num_gpus 2 t.py --deepspeed d.json\n"},
        {"d.json": {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "sequence_parallel_size": 2},
         "run.sh": "deepspeed --num_gpus 2 t.py --deepspeed d.json\n"},
    ),
}  # fmt: skip
