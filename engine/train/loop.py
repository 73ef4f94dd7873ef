"""The plain training loop for tensor and expert parallelism through transformers' DistributedConfig.

TRL cannot carry these, so this loop does what it needs and no more: the same data, the same loss on assistant
tokens normalised over all ranks, the same telemetry and the same checks. Started by torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftdash.engine.train import data, loading, verify
from ftdash.engine.train.options import Options, TrainError, TrainStrategy, Variant
from ftdash.engine.train.report import StepReport
from ftdash.engine.train.stop import StopRequest
from ftdash.monitor.hook import Hook

MAX_GRAD_NORM = 1.0
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks are laid out: `replicate` x `fsdp` groups that see different data, of `tp` ranks each."""

    world: int
    rank: int
    tp: int
    ep: int
    replicate: int

    @property
    def fsdp(self) -> int:
        return self.world // (self.tp * self.replicate)

    @property
    def dp_size(self) -> int:
        return self.replicate * self.fsdp

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank sees; the ranks of one TP group see the same."""
        return self.rank // self.tp

    @classmethod
    def of(cls, options: Options) -> Layout:
        """Raises TrainError, printing every factor, when the ranks cannot be laid out so."""
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        layout = cls(world, rank, options.tp, options.ep, options.replicate)
        factors = f"--tp {options.tp} x --replicate {options.replicate}"
        if world < 2:
            raise TrainError(f"{factors}, --ep {options.ep}: only one process runs; start it with torchrun")
        if world % (options.tp * options.replicate):
            raise TrainError(f"{factors} does not divide {world} ranks")
        if options.ep > 1 and (layout.fsdp * layout.tp) % options.ep:
            raise TrainError(f"--ep {options.ep} must divide fsdp {layout.fsdp} x tp {layout.tp}")
        if options.ep > 1 and options.ep % options.tp:
            raise TrainError(f"--ep {options.ep} must be a multiple of --tp {options.tp}")
        return layout

    def expected_mesh(self) -> dict[str, int]:
        sizes = {"tp": self.tp, "fsdp": self.fsdp, "ep": self.ep, "dp_replicate": self.replicate}
        return {name: size for name, size in sizes.items() if size > 1}


def run(options: Options, asked: TrainStrategy, hook: Hook) -> None:
    """Train, verify before the first step, and save plain safetensors. Raises TrainError in one line."""
    import torch
    from transformers import DistributedConfig

    layout = _checked_layout(options)
    loading.quiet()
    source = loading.model_source(options)
    tokenizer = loading.load_tokenizer(source, options)
    rows = encode(data.load(options.data), tokenizer, options)
    loading.enough_rows(len(rows), options)
    if options.device == "cpu" and torch.cuda.is_available():
        raise TrainError("--device cpu: transformers puts its mesh on the GPU that it sees; hide it")
    torch.manual_seed(options.seed)
    config = DistributedConfig(
        tp_size=layout.tp, ep_size=layout.ep, fsdp_size=layout.fsdp, dp_replicate_size=layout.replicate
    )
    model = loading.load_model(source, options, distributed_config=config)
    model.config.use_cache = False
    if options.checkpointing != "none":
        model.gradient_checkpointing_enable()
    if options.freeze_router:
        loading.freeze_routers(model)
    model.train()
    found = verify.observe(model, model, "DISTRIBUTED_CONFIG")
    hook.describe(model, **loading.meta(options, options.steps), **found.meta(), strategy=str(asked))
    verify.check(options, asked, found, layout.expected_mesh())
    hook.watch_experts(model)
    report = StepReport(options, hook)
    report.tell_reality(asked, found)
    stop = StopRequest(hook.run_dir, hook.rank)
    try:
        _steps(options, layout, model, rows, tokenizer.pad_token_id, hook, report, stop)
        if options.export:
            with hook.phase("save"):
                _save(model, tokenizer, options, "final")
                report.say(f"final model: {options.output_dir / 'final'}")
    finally:
        stop.close()


def _checked_layout(options: Options) -> Layout:
    if options.variant is not Variant.FULL:
        raise TrainError(f"--variant {options.variant}: tensor and expert parallelism train all weights here")
    if options.resume is not None:
        raise TrainError("--resume: transformers cannot resume a model that was sharded at load time")
    if options.packing:
        raise TrainError("--packing: not with tensor and expert parallelism")
    if options.cp > 1:
        raise TrainError("--cp: not with tensor and expert parallelism")
    if options.optimizer not in ("adamw", "adamw-foreach", "sgd"):
        raise TrainError(f"--optimizer {options.optimizer}: adamw, adamw-foreach or sgd with tp and ep")
    return Layout.of(options)


def encode(dataset: Any, tokenizer: Any, options: Options) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of every row with loss tokens: assistant tokens where the template marks them."""
    marked = data.is_conversational(dataset) and loading.marks_assistant(tokenizer)
    rows = []
    for row in dataset:
        if not data.is_conversational(dataset):
            tokens = tokenizer(row["text"])["input_ids"][: options.seq_len]
            labels = list(tokens)
        else:
            encoded = tokenizer.apply_chat_template(
                row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
            )
            tokens = encoded["input_ids"][: options.seq_len]
            mask = encoded["assistant_masks"] if marked else [1] * len(tokens)
            labels = [token if keep else IGNORED for token, keep in zip(tokens, mask, strict=False)]
        labels[0] = IGNORED  # nothing predicts the first token
        if any(label != IGNORED for label in labels):
            rows.append((tokens, labels))
    return rows


def batches(
    rows: list[tuple[list[int], list[int]]], layout: Layout, micro_batch: int, seed: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless micro-batches of this rank's share: one shuffled order for all ranks, dealt out in turns."""
    import random

    order: list[int] = []
    generator = random.Random(seed)
    while True:
        share = []
        for _ in range(micro_batch):
            while len(order) < layout.dp_size:
                order += generator.sample(range(len(rows)), len(rows))
            dealt, order = order[: layout.dp_size], order[layout.dp_size :]
            share.append(rows[dealt[layout.dp_rank]])
        yield share


def collate(share: list[tuple[list[int], list[int]]], pad: int, device: Any) -> dict[str, Any]:
    """Padded (micro_batch, longest) tensors of a micro-batch."""
    import torch

    longest = max(len(tokens) for tokens, _ in share)
    ids = torch.full((len(share), longest), pad)
    labels = torch.full((len(share), longest), IGNORED)
    for index, (tokens, targets) in enumerate(share):
        ids[index, : len(tokens)] = torch.tensor(tokens)
        labels[index, : len(tokens)] = torch.tensor(targets)
    mask = torch.zeros_like(ids)
    for index, (tokens, _) in enumerate(share):
        mask[index, : len(tokens)] = 1
    return {name: tensor.to(device) for name, tensor in (("ids", ids), ("mask", mask), ("labels", labels))}


def token_loss(logits: Any, labels: Any) -> Any:
    """Summed cross-entropy of the next token over the labelled positions, in fp32."""
    import torch.nn.functional as functional

    flat = logits[:, :-1].float().flatten(0, 1)
    return functional.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def _optimizer(options: Options, model: Any) -> tuple[Any, Any]:
    import torch
    from transformers import get_cosine_schedule_with_warmup

    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(learning, lr=options.lr)
    else:
        # Tensors of different meshes cannot share one foreach or fused kernel call.
        optimizer = torch.optim.AdamW(learning, lr=options.lr, weight_decay=0.0, foreach=False)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, options.warmup, options.steps)


def router_coefficient(options: Options, model: Any) -> float:
    """The weight of the router's balancing loss; 0 without routers. Raises TrainError for a dense model."""
    config = model.config.get_text_config()
    if options.router_logits == "off" or not hasattr(config, "output_router_logits"):
        if options.router_aux_loss and options.router_logits == "on":
            raise TrainError("--router-aux-loss: the model has no routers")
        return 0.0
    own = float(getattr(config, "router_aux_loss_coef", 0.0))
    return own if options.router_aux_loss is None else options.router_aux_loss


def _steps(
    options: Options,
    layout: Layout,
    model: Any,
    rows: list[tuple[list[int], list[int]]],
    pad: int,
    hook: Hook,
    report: StepReport,
    stop: StopRequest,
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    device = next(model.parameters()).device
    coefficient = router_coefficient(options, model)
    extra = {"output_router_logits": True} if coefficient else {}
    optimizer, schedule = _optimizer(options, model)
    source = batches(rows, layout, options.micro_batch, options.seed)
    mixed = options.precision == "bf16-mixed"
    hook.start_steps()
    for step in range(1, options.steps + 1):
        with hook.phase("data"):
            micro = [collate(next(source), pad, device) for _ in range(options.grad_accum)]
            mine = sum((batch["labels"] != IGNORED).sum() for batch in micro)
        with hook.phase("sync"):
            # Every TP group of `tp` ranks counts the same tokens.
            total = mine.clone()
            dist.all_reduce(total)
            total = total / layout.tp
        logged = torch.zeros(2, device=device, dtype=torch.double)
        for index, batch in enumerate(micro):
            if layout.dp_size > 1 and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(index == len(micro) - 1)
            with hook.phase("forward"), torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                output = model(input_ids=batch["ids"], attention_mask=batch["mask"], use_cache=False, **extra)
                summed = token_loss(output.logits, batch["labels"])
                # Gradients are averaged over the data-parallel ranks: scale up to the global mean.
                loss = summed * layout.dp_size / total
                if coefficient:
                    loss = loss + coefficient * output.aux_loss / len(micro)
            with hook.phase("backward"):
                loss.backward()
            logged[0] += summed.detach().double()
            if coefficient:
                logged[1] += output.aux_loss.detach().double() / len(micro)
        with hook.phase("optimizer"):
            norm = _clip(model, MAX_GRAD_NORM)
            rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        with hook.phase("sync"):
            dist.all_reduce(logged)
            stopping = stop.agreed(device)
        mean_loss = float(logged[0] / layout.tp / total)
        hook.step(
            loss=mean_loss,
            aux_loss=float(logged[1] / layout.world) if coefficient else None,
            tokens=int(mine),
            lr=rate,
            grad_norm=norm.full_tensor() if isinstance(norm, DTensor) else norm,
            epoch=step * options.grad_accum * options.micro_batch * layout.dp_size / len(rows),
            step=step,
        )
        if step % options.log_steps == 0 or step == options.steps:
            report.line(step, options.steps, mean_loss)
        if stopping:
            hook.event("note", "stop-requested", f"asked to stop: ending after step {step}")
            return


def _clip(model: Any, limit: float) -> Any:
    """Clip to a global norm over parameters of several meshes; returns the norm before."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    norms = [get_total_norm([parameter.grad for parameter in group]) for group in groups.values()]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(plain))
    for group in groups.values():
        clip_grads_with_norm_(group, limit, total)
    return total


def _save(model: Any, tokenizer: Any, options: Options, name: str) -> None:
    """Gather and write plain safetensors; a collective. Raises TrainError when nothing came out."""
    import torch.distributed as dist

    folder = options.output_dir / name
    first = dist.get_rank() == 0
    model.save_pretrained(folder, is_main_process=first)
    if first:
        tokenizer.save_pretrained(folder)
        if not list(folder.glob("*.safetensors")):
            raise TrainError(f"the final model was not written to {folder}")
    dist.barrier()
