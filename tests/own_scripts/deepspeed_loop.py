"""Somebody's own DeepSpeed loop under ZeRO-2; no word of ftdash."""

import deepspeed
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}

deepspeed.init_distributed("gloo")
model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(10):
    ids = torch.randint(0, 128, (2, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
