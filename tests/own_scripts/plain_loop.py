"""Somebody's own loop: DistributedDataParallel, two micro-batches a step, no word of ftdash."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)))
reference = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)).eval()  # a second model that only looks on
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    for _ in range(2):
        ids = torch.randint(0, 128, (2, 16))
        labels = ids.clone()
        labels[:, :6] = -100
        with torch.no_grad():
            reference(input_ids=ids)
        model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("last loss reached")
dist.destroy_process_group()
