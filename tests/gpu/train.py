"""Trains one configuration for a few steps in a process of its own, and writes down what it took.

`python -m tests.gpu.train JOB OUT`: JOB is JSON with plan, steps, device and scratch folder. The loop is
plain torch with what the plan says: dtype, adapters, checkpointing, optimizer. Weights are random.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ftdash.engine.plan import Checkpointing, Method, Plan, Precision
from ftdash.engine.train import adapters
from ftdash.engine.train.options import Options, Variant

WARM_STEPS = 2


class DeviceWatch:
    """Samples NVML in a thread: the device's peak above what it held before, and this process's own."""

    def __init__(self) -> None:
        self.before, _ = self._read()
        self.peak: int | None = None
        self.process: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            used, process = self._read()
            if used is not None and self.before is not None:
                self.peak = max(self.peak or 0, used - self.before)
            if process is not None:
                self.process = max(self.process or 0, process)

    def _read(self) -> tuple[int | None, int | None]:
        from ftdash.monitor.nvml import sample_gpus

        gpus = [gpu for gpu in sample_gpus() if gpu.memory_used is not None]
        if not gpus:
            return None, None
        gpu = gpus[_index(gpus)]
        own = [process.memory for process in gpu.processes if process.pid == os.getpid()]
        return gpu.memory_used, own[0] if own else None

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _index(gpus: list[Any]) -> int:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves, by number or uuid."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if first.isdigit():
        return min(int(first), len(gpus) - 1)
    return next((index for index, gpu in enumerate(gpus) if gpu.uuid.startswith(first)), 0)


def build(plan: Plan, device: str, scratch: Path) -> Any:
    """The model of the plan's config.json with random weights, adapters on it where the plan has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(plan.config))
    config.use_cache = False
    half = plan.method is not Method.FULL or plan.precision is Precision.BF16
    dtype = torch.bfloat16 if half else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=str(plan.attention))
    variant = {Method.LORA: Variant.LORA, Method.QLORA: Variant.QLORA}.get(plan.method, Variant.FULL)
    options = Options(variant=variant, lora_rank=plan.lora_rank, lora_targets=plan.lora_targets)
    if plan.method is Method.QLORA:
        model = _quantised(model, adapters.quantization(options), device, scratch)
    if plan.checkpointing is not Checkpointing.NONE:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if plan.method is Method.QLORA:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=plan.checkpointing is not Checkpointing.NONE
        )
    wanted = adapters.lora_config(options, config)
    if wanted is not None:
        from peft import get_peft_model

        model = get_peft_model(model, wanted)
        model.enable_input_require_grads()
    model.train()
    return model


def _quantised(model: Any, quantization: Any, device: str, scratch: Path) -> Any:
    """The same weights loaded in four bits, the way a user loads them: from files."""
    import gc

    import torch
    from transformers import AutoModelForCausalLM

    folder = scratch / "weights"
    model.save_pretrained(folder)
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=quantization,
        device_map={"": 0 if device == "cuda" else "cpu"},
    )


def train(plan: Plan, steps: int, device: str, scratch: Path) -> dict[str, Any]:
    """Losses, peaks in bytes and tokens a second of `steps` steps after the warm-up."""
    import torch

    on_gpu = device == "cuda"
    torch.manual_seed(0)
    watch = DeviceWatch() if on_gpu else None
    if on_gpu:
        torch.zeros(1, device=device)
    model = build(plan, device, scratch)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-4, fused=on_gpu)
    mixed = plan.precision is Precision.BF16_MIXED
    vocabulary = model.config.get_text_config().vocab_size
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []
    started = 0.0
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
        ids = torch.randint(vocabulary, (plan.micro_batch, plan.seq_len), device=device)
        context = torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext()
        with context:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {
        "losses": losses,
        "tokens_per_s": plan.micro_batch * plan.seq_len * steps / seconds,
        "total_params": sum(parameter.numel() for parameter in model.parameters()),
        "trainable_params": sum(parameter.numel() for parameter in learning),
    }
    if watch is not None:
        watch.end()
        found |= {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "device": watch.peak,
            "process": watch.process,
        }
    return found


def main(job_path: str, out: str) -> int:
    job = json.loads(Path(job_path).read_text())
    plan = Plan.from_dict(job["plan"])
    found = train(plan, job["steps"], job["device"], Path(job["scratch"]))
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
