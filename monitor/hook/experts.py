"""How many tokens each expert gets: counted on the device at the routers, read back without a pause.

A router is a module whose class name ends in `TopKRouter` (any case, as in transformers) and whose output
holds the chosen experts as an integer tensor (tokens, k). Activation checkpointing runs a router a second
time during backward: a forward inside a running autograd graph task is such a recomputation and is not
counted (`torch._C._current_graph_task_id() != -1`, which torch.utils.checkpoint itself relies on).
"""

from __future__ import annotations

import re
from typing import Any

import torch

_ROUTER = re.compile(r"(TopK|Topk|Top2|Top1|Dbrx)Router$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")

_graph_task_id = getattr(torch._C, "_current_graph_task_id", None)


def find_routers(model: torch.nn.Module) -> list[tuple[int, torch.nn.Module]]:
    """(layer, router) for every router of the model; the layer's index is read from the module's path."""
    found: list[tuple[int, torch.nn.Module]] = []
    for name, module in model.named_modules():
        if _ROUTER.search(_class_name(module)):
            match = _LAYER.search(name + ".")
            found.append((int(match.group(1)) if match else len(found), module))
    return found


def _class_name(module: torch.nn.Module) -> str:
    """The module's own class name, also after FSDP2 or a PEFT wrapper made a subclass of it."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((name for name in names if _ROUTER.search(name)), type(module).__name__)


def expert_count(router: torch.nn.Module) -> int:
    """The number of experts that a router chooses from, or 0 when it does not say."""
    for attribute in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if value := getattr(router, attribute, None):
            return int(value)
    config = getattr(router, "config", None)
    for attribute in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        if value := getattr(config, attribute, None):
            return int(value)
    return 0


def chosen_experts(output: Any) -> torch.Tensor | None:
    """The integer tensor (tokens, k) among a router's outputs."""
    for item in output if isinstance(output, tuple | list) else (output,):
        if isinstance(item, torch.Tensor) and not item.is_floating_point() and item.dtype != torch.bool:
            return item
    return None


class ExpertCounter:
    """Counts tokens per expert for every router of a model, in one int64 tensor (layers, experts)."""

    def __init__(self, model: torch.nn.Module) -> None:
        if _graph_task_id is None:
            raise RuntimeError("this torch cannot tell recomputation from forward")
        routers = [(layer, router, expert_count(router)) for layer, router in find_routers(model)]
        self.routers = [(layer, router, experts) for layer, router, experts in routers if experts]
        self.layers = [layer for layer, _, _ in self.routers]
        self.experts = [experts for _, _, experts in self.routers]
        self.top_k = max((int(getattr(router, "top_k", 0) or 0) for _, router, _ in self.routers), default=0)
        self._counts: torch.Tensor | None = None
        self._one: torch.Tensor | None = None
        # First in line: expert parallelism hangs its own hook on the router and renumbers the experts.
        self._handles = [
            router.register_forward_hook(self._hook(row), prepend=True)
            for row, (_, router, _) in enumerate(self.routers)
        ]

    def _hook(self, row: int) -> Any:
        def count(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not module.training or _graph_task_id() != -1:  # type: ignore[misc]
                return
            chosen = chosen_experts(output)
            if chosen is None:
                return
            with torch.no_grad():
                flat = chosen.detach().reshape(-1).long()
                if self._counts is None:
                    width = max(self.experts)
                    self._counts = torch.zeros(len(self.routers), width, dtype=torch.long, device=flat.device)
                    self._one = torch.ones(1, dtype=torch.long, device=flat.device)
                # Not bincount: on a GPU it waits for the device to learn its output's length.
                self._counts[row].scatter_add_(0, flat, self._one.expand(flat.numel()))  # type: ignore[union-attr]

        return count

    def take(self) -> torch.Tensor | None:
        """The counts since the last call, (layers, experts) on their device; None before any token."""
        if self._counts is None:
            return None
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
