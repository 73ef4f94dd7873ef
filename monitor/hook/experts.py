"""How many tokens each expert gets: counted on the device at the routers, read back without a pause.

A router is a module whose class name ends in Router or Gating and that says how many experts it chooses from.
Its output holds the chosen experts as integers (tokens, k), in any place, or only logits (tokens, experts):
the k largest are then the choice. Where neither is there, or a bias that the logits do not show takes part in
the choice, nothing is counted and `trouble` says so.

Activation checkpointing runs a router a second time during backward: a forward inside a running autograd
graph task is such a recomputation and is not counted (`torch._C._current_graph_task_id() != -1`, which
torch.utils.checkpoint itself relies on). Choices are only kept during forward and added up once a step, all
layers together: three launches a step instead of three a layer.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_ROUTER = re.compile(r"(Router|Gating)$")
_EXPERT_NUMBERS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_HIDDEN_BIASES = ("e_score_correction_bias", "expert_bias", "moe_statics")
_MOST_KEPT = 1 << 22  # choices (8 bytes each) kept before they are added up within a step
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")

_graph_task_id = getattr(torch._C, "_current_graph_task_id", None)


def find_routers(model: torch.nn.Module) -> list[tuple[int, torch.nn.Module]]:
    """(layer, router) for every router of the model; the layer's index is read from the module's path."""
    found: list[tuple[int, torch.nn.Module]] = []
    for name, module in model.named_modules():
        # JetMoe also routes tokens to attention experts: those are not the experts meant here.
        if _ROUTER.search(_class_name(module)) and "attention" not in name and expert_count(module):
            match = _LAYER.search(name + ".")
            found.append((int(match.group(1)) if match else len(found), module))
    return found


def _class_name(module: torch.nn.Module) -> str:
    """The module's own class name, also after FSDP2 or a PEFT wrapper made a subclass of it."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((name for name in names if _ROUTER.search(name)), type(module).__name__)


def expert_count(router: torch.nn.Module) -> int:
    """The number of experts that a router chooses from, or 0 when it does not say."""
    return _number(router, _EXPERT_NUMBERS) or _number(getattr(router, "config", None), _EXPERT_NUMBERS)


def chosen_count(router: torch.nn.Module) -> int:
    """How many experts a router gives each token to, or 0 when it does not say."""
    names = ("top_k", "num_experts_per_tok", "moe_k", "moe_topk")
    return _number(router, names) or _number(getattr(router, "config", None), names)


def experts_in_config(model: torch.nn.Module) -> int:
    """The number of experts of which the model's config speaks; 0 for a dense model."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if not (getattr(part, "is_moe", True) and getattr(part, "enable_moe_block", True)):
            continue  # Doge and Gemma 4 name experts also where they have none
        if (experts := _number(part, _EXPERT_NUMBERS)) > 1:
            return experts
    return 0


def _number(holder: object, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def chosen_experts(output: Any, experts: int, k: int, biased: bool = False) -> torch.Tensor | None:
    """The chosen experts (tokens, k) in a router's output; None when they cannot be told.

    `k` is 0 where the router does not say it. With a bias beside the logits, these do not tell the choice.
    """
    items = output if isinstance(output, tuple | list) else (output,)
    tensors = [item for item in items if isinstance(item, torch.Tensor) and item.dim() >= 2]
    for item in tensors:
        whole = not (item.is_floating_point() or item.dtype == torch.bool)
        if whole and (item.shape[-1] == k or not k):
            return item
    if k and not biased:
        for item in tensors:
            if item.is_floating_point() and item.shape[-1] == experts:
                return item.detach().topk(k, dim=-1).indices
    return None


class ExpertCounter:
    """Counts tokens per expert for every router of a model, in one int64 tensor (layers, experts)."""

    def __init__(self, model: torch.nn.Module) -> None:
        if _graph_task_id is None:
            raise RuntimeError("this torch cannot tell recomputation from forward")
        self.routers = find_routers(model)
        self.layers = [layer for layer, _ in self.routers]
        self.experts = [expert_count(router) for _, router in self.routers]
        self.trouble = ""  # why experts of this model are not counted, or not all of them
        if not self.routers and (experts := experts_in_config(model)):
            self.trouble = (
                f"the model's config names {experts} experts, but no router is known in"
                f" {type(model).__name__}: tokens per expert are not counted"
            )
        self._counts: torch.Tensor | None = None  # (routers, width), flat
        self._one: torch.Tensor | None = None
        # One column more than experts: a number beyond them must not end the training, and lands there.
        self._width = max(self.experts, default=0) + 1
        self._kept: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}  # by shape: row, chosen
        self._kept_choices = 0
        self._offsets: dict[tuple[int, ...], torch.Tensor] = {}
        # First in line: expert parallelism hangs its own hook on the router and renumbers the experts.
        self._handles = [
            router.register_forward_hook(self._hook(row, router), prepend=True)
            for row, (_, router) in enumerate(self.routers)
        ]

    def _hook(self, row: int, router: torch.nn.Module) -> Any:
        experts, k = self.experts[row], chosen_count(router)
        biased = any(getattr(router, name, None) is not None for name in _HIDDEN_BIASES)

        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not module.training or _graph_task_id() != -1:  # type: ignore[misc]
                return
            chosen = chosen_experts(output, experts, k, biased)
            if chosen is None:
                self.trouble = (
                    f"the output of {_class_name(module)} does not tell which experts it chose: their tokens"
                    " are not counted"
                )
                return
            self._kept.setdefault(tuple(chosen.shape), []).append((row, chosen))
            self._kept_choices += chosen.numel()
            if self._kept_choices > _MOST_KEPT:
                self.add_up()

        return keep

    def add_up(self) -> None:
        """Add the choices kept since the last call to the counts; called once a step."""
        kept, self._kept, self._kept_choices = self._kept, {}, 0
        with torch.no_grad():
            for entries in kept.values():
                rows = tuple(row for row, _ in entries)
                flat = torch.stack([chosen for _, chosen in entries]).reshape(len(rows), -1)
                flat = flat.long().clamp_(0, self._width - 1).add_(self._offsets_of(rows, flat.device))
                if self._counts is None:
                    size = len(self.routers) * self._width
                    self._counts = torch.zeros(size, dtype=torch.long, device=flat.device)
                    self._one = torch.ones(1, dtype=torch.long, device=flat.device)
                # Not bincount: on a GPU it waits for the device to learn its output's length.
                one = self._one.expand(flat.numel())  # type: ignore[union-attr]
                self._counts.scatter_add_(0, flat.reshape(-1), one)

    def _offsets_of(self, rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Where the counts of these routers begin, (rows, 1); kept, for it crosses to the device."""
        found = self._offsets.get(rows)
        if found is None:
            if len(self._offsets) >= 16:
                self._offsets.clear()
            starts = [[row * self._width] for row in rows]
            found = self._offsets[rows] = torch.tensor(starts, dtype=torch.long).to(device)
        return found

    def take(self) -> torch.Tensor | None:
        """The counts since the last call, (layers, experts) on their device; None before any token."""
        self.add_up()
        if self._counts is None:
            return None
        taken = self._counts.view(len(self.routers), self._width)[:, :-1].clone()
        self._counts.zero_()
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
