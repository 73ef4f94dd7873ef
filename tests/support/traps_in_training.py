"""Traps in training scripts, in Axolotl's and LLaMA-Factory's files, and in how bash reads a batch script."""

# The tables keep one case a row where they can.
# ruff: noqa: E501

from __future__ import annotations

from tests.support.check import BF16, GOOD_RUN, HEAD, LORA, fsdp1, fsdp2, sbatch, script, zero3

TRAINER = """
from transformers import AutoModelForCausalLM, AutoTokenizer, {imports}Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("gpt2")
{pad}
args = TrainingArguments("out", {args})
model = AutoModelForCausalLM.from_pretrained("gpt2")
data = data.map(lambda row: tokenizer(row["text"]))
trainer = Trainer(model=model, args=args, train_dataset=data{given})
"""
COLLATOR = ", data_collator=DataCollatorForLanguageModeling(tokenizer{mlm})"


def trainer(
    args: str = "", given: str = "", pad: str = "", imports: str = "DataCollatorForLanguageModeling, "
) -> str:
    return TRAINER.format(
        args=args, given=given or COLLATOR.format(mlm=", mlm=False"), pad=pad, imports=imports
    )


DDP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
{device}
model = DDP(make().cuda(), device_ids=[{ids}])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, {order})
for epoch in range(3):
    {epoch}
    train(model, loader)
torch.save({saved}, "m.pt")
"""


def ddp(
    device: str = "torch.cuda.set_device(rank)",
    ids: str = "rank",
    order: str = "sampler=sampler",
    epoch: str = "sampler.set_epoch(epoch)",
    saved: str = "model.module.state_dict()",
) -> str:
    return DDP.format(device=device, ids=ids, order=order, epoch=epoch, saved=saved)


ACCELERATED = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
{prepared} = accelerator.prepare({prepared})
for batch in loader:
    with {entered}:
        loss = model(**batch).loss
        {backward}
        {clip}(model.parameters(), 1.0)
        optimizer.step()
"""


def accelerated(
    prepared: str = "model, optimizer, loader",
    entered: str = "accelerator.accumulate(model)",
    backward: str = "accelerator.backward(loss)",
    clip: str = "accelerator.clip_grad_norm_",
) -> str:
    return ACCELERATED.format(prepared=prepared, entered=entered, backward=backward, clip=clip)


AXOLOTL = {
    "base_model": "Qwen/Qwen3-8B",
    "adapter": "lora",
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "sample_packing": True,
    "flash_attention": True,
}
FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "sft",
    "finetuning_type": "lora",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
}
DEEPSPEED_JOB = {"train_batch_size": 64, "bf16": {"enabled": True}}


def axolotl(**changes: object) -> dict:
    return {key: value for key, value in {**AXOLOTL, **changes}.items() if value is not None}


def factory(**changes: object) -> dict:
    return {key: value for key, value in {**FACTORY, **changes}.items() if value is not None}


def job(body: str = "", run: str = GOOD_RUN, **options: object) -> dict:
    return {"j.sbatch": sbatch(HEAD + body + run, **options)}


STATIC = "srun {shell}torchrun --nnodes 2 {rank}--nproc_per_node 8 --master_addr $MASTER_ADDR train.py{end}\n"
BEST = "load_best_model_at_end=True, eval_strategy='steps', eval_steps=100, save_steps={save}"

# code: (files that have the trap, the same files with it mended); what follows # tells cases of a code apart
CASES = {
    "argument-gone": ({"t.py": script("evaluation_strategy='no'")}, {"t.py": script("eval_strategy='no'")}),
    "argument-gone#trainer": ({"t.py": script(peft=", tokenizer=t")}, {"t.py": script(peft=", tokenizer=t"), "requirements.txt": "transformers==4.44\n"}),
    "argument-gone#of-another-library": (
        {"t.py": "from trl import SFTTrainer\nSFTTrainer(model=m, tokenizer=t)\n"},
        {"t.py": "from mine import SFTTrainer\nSFTTrainer(model=m, tokenizer=t)\n"},
    ),
    "argument-gone#patched-in": (
        {"t.py": "from trl import SFTTrainer\nSFTTrainer(model=m, tokenizer=t)\n"},
        {"t.py": "import unsloth\nfrom trl import SFTTrainer\nSFTTrainer(model=m, tokenizer=t)\n"},
    ),
    "best-model-strategies": ({"t.py": script(BEST.format(save=150), peft=", eval_dataset=e")}, {"t.py": script(BEST.format(save=200), peft=", eval_dataset=e")}),
    "best-model-strategies#apart": (
        {"t.py": script("load_best_model_at_end=True, eval_strategy='epoch'", peft=", eval_dataset=e")},
        {"t.py": script("load_best_model_at_end=True, eval_strategy='epoch', save_strategy='best'", peft=", eval_dataset=e")},
    ),
    "evaluation-without-data": ({"t.py": script("eval_strategy='epoch'")}, {"t.py": script("eval_strategy='epoch'", peft=", **data")}),
    "warmup-longer-than-run": ({"t.py": script("warmup_steps=100, max_steps=50")}, {"t.py": script("warmup_steps=100, max_steps=-1")}),
    "fp16-weights-scaled": ({"t.py": script("fp16=True", load="dtype=torch.float16")}, {"t.py": script("fp16=True", load="dtype=torch.float16", peft=LORA)}),
    "masked-language-model": ({"t.py": trainer(given=COLLATOR.format(mlm=""))}, {"t.py": trainer()}),
    "end-token-not-learnt": (
        {"t.py": trainer(pad="if tokenizer.pad_token is None:\n    tokenizer.pad_token = tokenizer.eos_token")},
        {"t.py": trainer(pad="tokenizer.pad_token = tokenizer.eos_token", given=", data_collator=DataCollatorForSeq2Seq(tokenizer)")},
    ),
    "no-labels": ({"t.py": trainer(given=", callbacks=[]")}, {"t.py": trainer(given=", data_collator=collate")}),
    "packing-attention": (
        {"t.py": script("packing=True", load="attn_implementation='sdpa'")},
        {"t.py": script("packing=True", load="attn_implementation='kernels-community/flash-attn'")},
    ),
    "packing-attention#axolotl": ({"a.yaml": axolotl(flash_attention=None)}, {"a.yaml": axolotl(flash_attention=None, flex_attention=True)}),
    "quantised-without-adapters": ({"t.py": script(load=BF16)}, {"t.py": script(load=BF16, peft=LORA)}),
    "quantised-without-adapters#factory": ({"l.yaml": factory(quantization_bit=4, finetuning_type="full")}, {"l.yaml": factory(quantization_bit=4)}),
    "quantised-compute-dtype": (
        {"t.py": script("bf16=True", load="quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)", peft=LORA)},
        {"t.py": script("fp16=True", load="quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype='float16')", peft=LORA)},
    ),
    "value-unknown#quant-type": (
        {"t.py": script(load="quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='int4')", peft=LORA)},
        {"t.py": "kind = 'fp32'\n" + script(load="quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)", peft=LORA)},
    ),
    "merge-into-quantised": (
        {"t.py": script(load=BF16, peft=LORA, end="trainer.model.merge_and_unload()")},
        {"t.py": script(load=BF16, peft=LORA, end="base = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B')\nPeftModel.from_pretrained(base, 'out').merge_and_unload()")},
    ),
    "adapter-targets": (
        {"t.py": script(peft=", peft_config=LoraConfig(target_modules=['query_key_value', 'dense'])")},
        {"t.py": script(peft=", peft_config=LoraConfig(target_modules=['q_proj', 'gate_up_proj_of_mine'])")},
    ),
    "adapter-targets#some": (
        {"t.py": script(peft=", peft_config=LoraConfig(target_modules=['q_proj', 'fc1'])")},
        {"t.py": script(peft=", peft_config=LoraConfig(target_modules=['query_key_value'])", model="EleutherAI/unknown-neox")},
    ),
    "one-device-for-all": ({"t.py": ddp(ids="0")}, {"t.py": ddp()}),
    "one-device-for-all#not-set": ({"t.py": ddp(device="")}, {"t.py": ddp(device="torch.cuda.set_device(f'cuda:{rank}')")}),
    "same-data-on-every-rank": ({"t.py": ddp(order="shuffle=True")}, {"t.py": ddp(order="batch_sampler=batches")}),
    "same-order-every-epoch": ({"t.py": ddp(epoch="pass")}, {"t.py": ddp(epoch="loader.sampler.set_epoch(epoch)")}),
    "wrapped-names-saved": ({"t.py": ddp(saved="model.state_dict()")}, {"t.py": ddp()}),
    "backward-past-accelerator": ({"t.py": accelerated(backward="loss.backward()")}, {"t.py": accelerated()}),
    "optimizer-not-prepared": ({"t.py": accelerated(prepared="model, loader")}, {"t.py": accelerated(prepared="optimizer, model")}),
    "accumulation-not-entered": ({"t.py": accelerated(entered="torch.enable_grad()")}, {"t.py": accelerated(entered="accelerator.no_sync(model)")}),
    "clipping-past-accelerator": ({"t.py": accelerated(clip="torch.nn.utils.clip_grad_norm_")}, {"t.py": accelerated()}),
    "value-unknown#axolotl": ({"a.yaml": axolotl(adapter="Lora")}, {"a.yaml": axolotl()}),
    "value-unknown#factory": ({"l.yaml": factory(finetuning_type="qlora")}, {"l.yaml": factory(finetuning_type="oft")}),
    "key-misspelt#axolotl": ({"a.yaml": axolotl(micro_batchsize=4, micro_batch_size=None)}, {"a.yaml": axolotl(a_key_of_a_plugin=4)}),
    "key-misspelt#a-word-apart": ({"l.yaml": factory(enable_liger_kernl=True)}, {"l.yaml": factory(enable_activation_offloading=True)}),
    "8bit-optimizer-fsdp#offload": (
        {"a.yaml": axolotl(optimizer="paged_adamw_8bit", fsdp_config={"fsdp_offload_params": True})},
        {"a.yaml": axolotl(optimizer="paged_adamw_8bit", fsdp_config={"fsdp_offload_params": False})},
    ),
    "key-misspelt#trainer": ({"l.yaml": factory(gradient_accumulate_steps=4, gradient_accumulation_steps=None)}, {"l.yaml": factory(eval_dataset="mine")}),
    "two-quantisations": ({"a.yaml": axolotl(load_in_8bit=True, load_in_4bit=True)}, {"a.yaml": axolotl(load_in_8bit=True, load_in_4bit=False)}),
    "qlora-without-4bit": ({"a.yaml": axolotl(adapter="qlora", load_in_8bit=True)}, {"a.yaml": axolotl(adapter="qlora", load_in_4bit=True)}),
    "adapter-without-targets": ({"a.yaml": axolotl(lora_target_linear=None)}, {"a.yaml": axolotl(lora_target_linear=None, lora_target_modules=["q_proj"])}),
    "schedule-twice": ({"a.yaml": axolotl(save_steps=100, saves_per_epoch=1)}, {"a.yaml": axolotl(save_steps=100, saves_per_epoch=0)}),
    "8bit-optimizer-fsdp": (
        {"a.yaml": axolotl(optimizer="adamw_bnb_8bit", fsdp_version=2, fsdp_config={"reshard_after_forward": True})},
        {"a.yaml": axolotl(optimizer="adamw_torch_8bit", fsdp_version=2, fsdp_config={"reshard_after_forward": True})},
    ),
    "zero-unknown-key#fp16": ({"d.json": {**zero3(), "fp16": {"enabled": "auto", "loss_scale_power": 16}}}, {"d.json": {**zero3(), "fp16": {"enabled": "auto", "initial_scale_power": 16}}}),
    "offload-optimizer-stage#nvme": (
        {"d.json": zero3(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/d"})},
        {"d.json": zero3(offload_optimizer={"device": "nvme", "nvme_path": "/d"})},
    ),
    "stage-three-setting": ({"d.json": zero3(stage=2, zero_hpz_partition_size=8)}, {"d.json": zero3(stage=2, zero_hpz_partition_size=1)}),
    "one-bit-optimizer": (
        {"d.json": {**DEEPSPEED_JOB, "zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitAdam"}}},
        {"d.json": {**DEEPSPEED_JOB, "zero_optimization": {"stage": 0}, "optimizer": {"type": "OneBitAdam"}}},
    ),
    "efficient-loading-unsynchronised": (
        {"a.yaml": fsdp1(fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False)},
        {"a.yaml": fsdp2(fsdp_sync_module_states=False)},
    ),
    "node-list-as-address": (job("export MASTER_ADDR=$SLURM_JOB_NODELIST\n"), job()),
    "loopback-interface": (job("export NCCL_SOCKET_IFNAME=lo\n"), job("export NCCL_SOCKET_IFNAME=^lo,docker0\n")),
    "nccl-debug-level": (job("export NCCL_DEBUG=DEBUG\n"), job("export NCCL_DEBUG=info\n")),
    "debug-switch-left-on": (job("export TORCH_NCCL_ASYNC_ERROR_HANDLING=0\n"), job("export TORCH_NCCL_ASYNC_ERROR_HANDLING=1\n")),
    "more-processes-than-gpus#visible": (job("export CUDA_VISIBLE_DEVICES=0,1\n"), job("export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n")),
    "nodes-disagree": (job(run=GOOD_RUN.replace("$SLURM_NNODES", "1")), job(run=GOOD_RUN.replace("$SLURM_NNODES", "2"))),
    "node-rank-missing": (
        job(run=STATIC.format(shell="", rank="", end="")),
        job(run=STATIC.format(shell="bash -c '", rank="--node_rank $SLURM_NODEID ", end="'")),
    ),
    "local-rank-is-global": (
        job(run="srun bash -c 'LOCAL_RANK=$SLURM_PROCID python t.py'\n", ntasks_per_node=8),
        job(run="srun bash -c 'LOCAL_RANK=$SLURM_LOCALID python t.py'\n", ntasks_per_node=8),
    ),
    "cores-for-processes": (job(cpus_per_task=1), job(cpus_per_task=8)),
    "directive-after-command": (job("#SBATCH --exclusive\n"), job("# about --exclusive\n")),
    "directive-not-read": ({"j.sbatch": "#!/bin/bash\n# SBATCH --mem=0\n" + job()["j.sbatch"]}, {"j.sbatch": "#!/bin/bash\n##SBATCH --mem=0\n" + job()["j.sbatch"]}),
    "time-in-minutes": (job(time="24"), job(time="24:00:00")),
    "space-after-backslash": (
        job(run="srun torchrun \\ \n  --nnodes 2 --nproc_per_node 8 t.py\n"),
        job(run="srun torchrun \\\n  --nnodes 2 --nproc_per_node 8 t.py\n"),
    ),
    "here-document-open": (job("cat > h <<EOF\na\nEOF \n"), job("cat > h <<-EOF\na\n\tEOF\nread x <<< EOT\n")),
    "no-interpreter": ({"j.sbatch": job()["j.sbatch"].removeprefix("#!/bin/bash\n")}, job()),
    "directive-form": (job(time="24h"), job(time="1-12:30")),
    "directive-form#gres": (job(gres="8"), job(gres="gpu:h100:8")),
    "directive-form#memory": (job(mem="64"), job(mem="64G")),
    "value-unknown#processes": (job(run=GOOD_RUN.replace("node 8", "node all")), job(run=GOOD_RUN.replace("node 8", "node gpu"))),
    "port-range#launcher": (job(run=GOOD_RUN.replace("$MASTER_PORT", "99999")), job(run=GOOD_RUN.replace("$MASTER_PORT", "9999"))),
    "no-process-group": ({"t.py": ddp().replace('dist.init_process_group("nccl")', "").replace("from torch.utils.data import DataLoader", "")}, {"t.py": ddp()}),
    "sampler-and-shuffle": ({"t.py": ddp(order="sampler=sampler, shuffle=True")}, {"t.py": ddp(order="sampler=None, shuffle=True")}),
    "value-unknown#accelerator": ({"t.py": "a = Accelerator(mixed_precision='bfloat16')\n"}, {"t.py": "a = Accelerator(mixed_precision='bf16')\n"}),
    "count-too-small": ({"t.py": script("gradient_accumulation_steps=0")}, {"t.py": script("gradient_accumulation_steps=1")}),
    "learning-rate": ({"t.py": script("learning_rate=0.2")}, {"t.py": script("learning_rate=0.002")}),
    "section-shape#deepspeed": ({"d.json": zero3(offload_optimizer="cpu")}, {"d.json": zero3(offload_optimizer={"device": "cpu"})}),
}  # fmt: skip
