"""Somebody's own loop with torch's loss function beside a model that gives logits; no word of ftdash."""

import torch
from torch.nn import functional

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for _ in range(2):
        ids = torch.randint(0, 64, (2, 8))
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
