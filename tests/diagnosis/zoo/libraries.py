"""Hangs made with the libraries' own code: FSDP2, DeepSpeed ZeRO-3, accelerate: `libraries.py CASE`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def ready():
    Path(os.environ["ZOO_DIR"], f"ready-{RANK}").touch()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.visual = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 16)

    def forward(self, x, use_visual=True):
        x = self.first(x)
        if use_visual:
            x = self.visual(x)
        return self.last(x)


def sharded():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = Net()
    for layer in (model.first, model.visual, model.last):
        fully_shard(layer)
    return fully_shard(model)


def fsdp2_save_under_is_main():
    model = sharded()
    model(torch.ones(2, 16)).sum().backward()
    ready()
    if RANK == 0:
        save_model(model)
    dist.barrier()


def save_model(model):
    state = {}
    for name, value in model.state_dict().items():
        state[name] = value.full_tensor()  # named: fsdp2_save_under_is_main
    torch.save(state, os.devnull)


def fsdp2_conditional_submodule():
    model = sharded()
    model(torch.ones(2, 16)).sum().backward()
    ready()
    model(torch.ones(2, 16), use_visual=RANK != 1).sum().backward()  # named
    model(torch.ones(2, 16)).sum().backward()


def zero3(model):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def zero3_save_under_is_main():
    engine = zero3(Net())
    engine.backward(engine(torch.ones(2, 16)).sum())
    engine.step()
    ready()
    if RANK == 0:
        save_weights(engine)
    dist.barrier()


def save_weights(engine):
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):  # named: zero3_save_under_is_main
        torch.save(engine.module.state_dict(), os.devnull)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x, chosen):
        total = torch.zeros_like(x)
        for number in chosen:
            total = total + self.experts[number](x)
        return self.last(total)  # named: zero3_expert_without_tokens


def zero3_expert_without_tokens():
    engine = zero3(Experts())
    x = torch.ones(2, 16)
    engine.backward(engine(x, (0, 1)).sum())
    engine.step()
    ready()
    loss = engine(x, (0,) if RANK == 1 else (0, 1)).sum()
    engine.backward(loss)
    engine.step()
    for _ in range(3):
        engine.backward(engine(x, (0, 1)).sum())
        engine.step()


def accelerate_evaluates_on_main_only():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(16, 1))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    ready()
    if accelerator.is_main_process:
        evaluate(accelerator, model)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 16)).sum())


def evaluate(accelerator, model):
    with torch.no_grad():
        accelerator.gather_for_metrics(torch.ones(2))  # named: accelerate_evaluates_on_main_only


def accelerate_waits_for_a_rank_that_broke_out():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(16, 1))
    for step in range(100):
        accelerator.backward(model(torch.ones(2, 16)).sum())
        if step == 2:
            ready()
        if RANK == 2 and step == 3:
            break
    accelerator.wait_for_everyone()  # named


if __name__ == "__main__":
    globals()[sys.argv[1]]()
