"""Somebody's own loop with a loss module beside a model that gives logits; no word of ftdash."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for _ in range(2):
        ids = torch.randint(0, 64, (2, 8))
        (criterion(model(ids).flatten(0, 1), ids.flatten()) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        criterion(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long))  # only looked at
