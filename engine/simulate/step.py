"""One training step of the real model class under fake tensors, tracked by PyTorch's memory tracker.

The tracker is `torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker` over a fake process group:
no GPU, no memory, and every operator of the real forward, backward and optimizer step. It sees what
the allocator would hand out; it does not see the CUDA context, NCCL buffers or fragmentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ftdash.engine.model.config import SAME_CLASS
from ftdash.engine.simulate.request import Peak, Request, Run

DEVICE = torch.device("cpu")
_EDGE = 2  # blocks at either end whose peaks are kept apart; between them memory is linear in the index


class _Parts:
    """Keeps the peak of each part of the step; the tracker calls `_update_peak_stats` after every op."""

    part = "setup"

    def start(self) -> None:
        self.peaks: dict[str, Peak] = {}

    def _update_peak_stats(self, peak_state: Any) -> None:
        snapshot = self._curr_mem_snap.get(DEVICE)  # type: ignore[attr-defined]
        if not snapshot:
            return
        seen = self.peaks.get(self.part)
        if seen is None or snapshot["Total"] > seen.total:
            named = {
                getattr(key, "value", str(key)): size for key, size in snapshot.items() if key != "Total"
            }
            self.peaks[self.part] = Peak(
                snapshot["Total"], {key: size for key, size in named.items() if size}
            )


class _ShardedTracker(_Parts, FSDPMemTracker):
    pass


class _SingleTracker(_Parts, MemTracker):
    pass


def prepare_processes(world: int) -> None:
    """A fake process group of `world` ranks, and DTensor's metadata propagation kept out of the tracker."""
    import torch.distributed.tensor._sharding_prop as sharding_prop
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    # Otherwise foreach optimizer steps are traced at global size inside our fake mode.
    sharding_prop.detect_fake_mode = lambda *args, **kwargs: None


def make_mesh(request: Request) -> DeviceMesh:
    """The mesh of a request; must be made outside FakeTensorMode."""
    if request.replicate > 1:
        shape = (request.replicate, request.world // request.replicate)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (request.world,))


def run_step(request: Request, layers: int, mesh: DeviceMesh | None, say: Callable[[str], None]) -> Run:
    """Simulate one optimizer step at a depth of `layers`."""
    say(f"{layers} layers: building")
    with torch.device("meta"):
        model = _build(request, layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    with FakeTensorMode():
        _give_fake_tensors(model)
        if request.fused_loss:
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(_base(model), outputs=("log_probs", "entropy", "is_top1"))
        model.train()
        if request.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if request.lora_rank:
                model.enable_input_require_grads()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trained = sum(parameter.numel() for parameter in trainable)
        if mesh is not None:
            _shard(model, request, mesh)
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _optimizer(trainable, request.optimizer)
        for parameter in trainable:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        say(f"{layers} layers: one step of {request.micro_batch} × {request.seq_len} tokens")
        peaks = _track(model, optimizer, request, sharded=mesh is not None)
    return Run(layers, peaks, total, trained)


def _build(request: Request, layers: int) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = {key: value for key, value in request.config.items() if key not in ("source", "model_type")}
    model_type = SAME_CLASS.get(request.config["model_type"], request.config["model_type"])
    config = CONFIG_MAPPING[model_type](**keys, use_cache=False)
    config.get_text_config().num_hidden_layers = layers
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds:
        config.get_text_config().layer_types = kinds[:layers]
    config._attn_implementation = request.attention
    torch.set_default_dtype(getattr(torch, request.base_dtype))
    try:
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return _adapt(model, request) if request.lora_rank else model


def _adapt(model: nn.Module, request: Request) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = list(request.lora_targets)
    stacks = {name for name, _ in model.named_parameters() if name.endswith((".gate_up_proj", ".down_proj"))}
    stacks = {name.split(".", 3)[3] for name in stacks if ".experts." in name}
    config = LoraConfig(
        r=request.lora_rank,
        lora_alpha=2 * request.lora_rank,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        target_parameters=sorted(stacks) if request.expert_rank else None,
        rank_pattern=dict.fromkeys(stacks, request.expert_rank) if request.expert_rank else {},
        use_dora=request.dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks: the longest ModuleList of the base model."""
    lists = [module for module in _base(model).modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def _give_fake_tensors(model: nn.Module) -> None:
    """Replace meta tensors by fake ones on the device; what was shared (tied) stays shared."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device=DEVICE)
                    is_parameter = isinstance(old, nn.Parameter)
                    made[id(old)] = (
                        nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                    )
                tensors[name] = made[id(old)]


def _shard(model: nn.Module, request: Request, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, request.compute_dtype),
        reduce_dtype=getattr(torch, request.reduce_dtype),
    )
    for layer in _blocks(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=request.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=request.reshard)


def _optimizer(parameters: list[nn.Parameter], name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.0, foreach=False)
    # The fused kernel has no temporaries; the per-tensor loop has one tensor's worth at a time.
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=name == "adamw-foreach", fused=False)


def _track(
    model: nn.Module, optimizer: torch.optim.Optimizer, request: Request, sharded: bool
) -> dict[str, Peak]:
    tracker: Any = _ShardedTracker(model, optimizer) if sharded else _SingleTracker()
    tracker.start()
    if not sharded:
        tracker.track_external(model, optimizer)
    _mark_parts(_blocks(model), tracker)
    tokens = torch.randint(0, 100, (request.micro_batch, request.seq_len), device=DEVICE)
    autocast: Any = contextlib.nullcontext
    if not sharded and request.compute_dtype != request.base_dtype:
        autocast = lambda: torch.autocast("cpu", dtype=getattr(torch, request.compute_dtype))  # noqa: E731
    with tracker:
        for micro_step in range(request.grad_accum):
            tracker.part = "before the blocks"
            with autocast():
                loss = _loss(model, tokens, request)
            loss.backward()
            del loss
            tracker.part = "after backward"
            if micro_step + 1 < request.grad_accum:
                tracker.reset_mod_stats()
        tracker.part = "optimizer step"
        optimizer.step()
        optimizer.zero_grad()
    return dict(tracker.peaks)


def _loss(model: nn.Module, tokens: torch.Tensor, request: Request) -> torch.Tensor:
    if request.fused_loss:
        out = model(input_ids=tokens, labels=tokens, use_cache=False, fused_lm_head=True)
        return -out.log_probs.sum() / request.seq_len
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _mark_parts(blocks: nn.ModuleList, tracker: _Parts) -> None:
    """Name the part of the step at each block boundary, forward and backward, but not in recomputation."""
    count = len(blocks)

    def place(index: int) -> str:
        if index < _EDGE:
            return f"block {index + 1}"
        return f"block {index - count}" if index >= count - _EDGE else "inner blocks"

    def before(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not tracker.part.startswith("backward"):
                tracker.part = f"forward {place(index)}"

        return hook

    def after(index: int) -> Callable[..., None]:
        def arrive(gradient: torch.Tensor) -> None:
            tracker.part = f"backward {place(index)}"

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if tracker.part.startswith("backward"):
                return
            if index == count - 1:
                tracker.part = "loss"
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(arrive)

        return hook

    for index, layer in enumerate(blocks):
        layer.register_forward_pre_hook(before(index))
        layer.register_forward_hook(after(index))
