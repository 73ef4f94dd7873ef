"""Somebody's own script on transformers' Trainer, which evaluates now and then; no word of ftdash."""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 16) % 128
        return {"input_ids": ids, "labels": ids}


args = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    max_steps=6,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    dataloader_num_workers=1,
)
model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))
Trainer(model, args, train_dataset=Rows(), eval_dataset=torch.utils.data.Subset(Rows(), range(4))).train()
