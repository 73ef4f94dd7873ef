"""Follows a training script that does not report itself, from the first step of its first optimizer on.

Torch's global optimizer hooks tell the steps; hooks on the model that owns the optimizer's parameters tell
phases, tokens and loss, hooks on loss modules beside it the loss of a model that returns none, and what
backward starts from the loss of every other loop. A transformers Trainer gets the callback instead, through
its public list. A process that never steps an optimizer (launcher, data loader worker, compile worker) leaves
no trace.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ftdash.monitor.inject import groups
from ftdash.monitor.inject.roots import Roots

IGNORED_LABEL = -100


def arm() -> None:
    """Act once parts of torch or transformers' Trainer are imported; costs nothing before."""
    follower = Follower()
    actions = {
        "torch.autograd": follower.roots.listen,
        "torch.amp.grad_scaler": follower.roots.listen_to_scaler,
        "torch.distributed.distributed_c10d": groups.listen,
        "torch.optim.optimizer": follower.listen,
        "transformers.trainer": follower.offer_callback,
    }
    sys.meta_path.insert(0, AfterImport(actions))


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when it has been imported; finds nothing itself."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)  # not here again: the name is no longer awaited
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                with contextlib.suppress(Exception):
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Follower:
    """What is known of the training in this process. Every entry is safe: a failure ends the following."""

    def __init__(self) -> None:
        self.hook: Any = None
        self.off = False  # somebody else reports, or following failed
        self.roots = Roots()
        self._handles: list[Any] = []
        self._forwards = 0
        self._tokens: Any = 0
        self._loss: Any = None
        self._losses = 0

    # Plain loops

    def listen(self, optimizer_module: ModuleType) -> None:
        """Torch's optimizers are there: hear their steps."""
        self._handles = [
            optimizer_module.register_optimizer_step_pre_hook(self.before_step),
            optimizer_module.register_optimizer_step_post_hook(self.after_step),
        ]

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.hook is not None and not self.off and (self._forwards or self.roots.count):
            self.hook.enter("optimizer")

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.off:
            return
        try:
            if self.hook is None:
                self._begin(optimizer)
            elif self._forwards or self.roots.count:
                self._step(optimizer)  # several optimizers, or one by parts, make one step
        except Exception as error:
            self._give_up(error)

    def _begin(self, optimizer: Any) -> None:
        """The first step is over: find the model, and report from here on."""
        from ftdash.monitor.hook import Hook

        model = owner(optimizer)
        if somebody_reports() or model is None:
            self.stop()
            return
        self.hook = Hook.start()
        self.hook.describe(model)
        self.hook.watch_experts(model)
        self._handles += [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._handles += [loss.register_forward_hook(self._after_loss) for loss in loss_modules(model)]
        self.hook.start_steps()
        self.hook.step(loss=self.roots.take(), lr=_rate(optimizer))
        self.hook.enter("data")

    def _before_forward(self, model: Any, args: Any) -> None:
        if not self.off and model.training:
            self.hook.enter("forward")

    def _after_forward(self, model: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if self.off or not model.training:
            return
        try:
            self._forwards += 1
            self._tokens = self._tokens + tokens_of(args, kwargs)
            self._add_loss(loss_of(output))
            self.hook.enter("backward")
        except Exception as error:
            self._give_up(error)

    def _after_loss(self, module: Any, args: Any, output: Any) -> None:
        """A loss module beside the model gave a value that learning starts from."""
        if self.off or not getattr(output, "requires_grad", False):
            return
        try:
            self._add_loss(loss_of(output))
        except Exception as error:
            self._give_up(error)

    def _add_loss(self, loss: Any) -> None:
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            self._losses += 1

    def _step(self, optimizer: Any) -> None:
        started_from = self.roots.take()
        loss = self._loss / self._losses if self._losses else started_from
        if self._losses and started_from is not None:
            loss = _not_finite_if_either(loss, started_from)
        self.hook.step(loss=loss, tokens=self._tokens, lr=_rate(optimizer))
        self._forwards, self._losses, self._loss, self._tokens = 0, 0, None, 0
        self.hook.enter("data")

    def stop(self) -> None:
        """Report nothing from here on."""
        self.off = True
        self.roots.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _give_up(self, error: BaseException) -> None:
        self.stop()
        if self.hook is not None:
            text = f"telemetry of this script ended: {type(error).__name__}: {error}"
            self.hook.event("warning", "own-script", text)

    # Trainers

    def offer_callback(self, trainer_module: ModuleType) -> None:
        """transformers' Trainer is there: put the callback into its list of defaults."""
        from ftdash.monitor.inject.trainer import callback_class

        trainer_module.DEFAULT_CALLBACKS.append(callback_class(self))


def owner(optimizer: Any) -> Any:
    """The outermost module that holds the optimizer's parameters.

    Optimizers of DeepSpeed and FSDP1 hold flat copies that no module owns: then the outermost module in
    training with the most trainable parameters. None when there is no module.
    """
    import torch

    modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in inner]
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    sizes = []
    for root in roots:
        learning = [parameter for parameter in root.parameters() if parameter.requires_grad]
        owned = sum(id(parameter) in wanted for parameter in learning)
        size = sum(int(getattr(p, "ds_numel", 0) or p.numel()) for p in learning)
        if size:
            sizes.append((owned, root.training, size, root))
    return max(sizes, key=lambda entry: entry[:3])[3] if sizes else None


def loss_modules(model: Any) -> list[Any]:
    """Torch's loss modules (CrossEntropyLoss and the like) that stand beside the model, not inside it."""
    from torch.nn.modules.loss import _Loss

    inside = {id(module) for module in model.modules()}
    return [item for item in gc.get_objects() if issubclass(type(item), _Loss) and id(item) not in inside]


def somebody_reports() -> bool:
    """True when the script started a hook of its own."""
    from ftdash.monitor.hook import Hook

    return any(type(item) is Hook and item.run_dir is not None for item in gc.get_objects())


def tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Label tokens of one forward: labels that count, else the attention mask, else the input ids; or 0.

    The answer may be a tensor on the model's device: nothing here waits for it.
    """
    named = dict(kwargs)
    for argument in args:
        if isinstance(argument, Mapping):
            named.update(argument)
    for name in ("labels", "shift_labels"):
        if (labels := named.get(name)) is not None:
            return (labels != IGNORED_LABEL).sum()
    if (mask := named.get("attention_mask")) is not None and mask.dim() == 2:
        return mask.sum()
    candidates: Iterable[Any] = (named.get("input_ids"), *args)
    for item in candidates:
        if hasattr(item, "is_floating_point") and not item.is_floating_point() and item.dim() in (1, 2):
            return item.numel()
    return 0


def loss_of(output: Any) -> Any:
    """The scalar loss in a model's output (a field `loss`, or the output itself), or None."""
    found: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return found if hasattr(found, "numel") and found.numel() == 1 and found.is_floating_point() else None


def _not_finite_if_either(loss: Any, started_from: Any) -> Any:
    """The model's loss; what backward started from where that is not finite: the script added to the loss."""
    import torch

    if loss.device != started_from.device:
        return loss
    loss = loss.reshape(())
    return torch.where(torch.isfinite(started_from), loss, started_from.to(loss.dtype))


def _rate(optimizer: Any) -> float | None:
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return None if rate is None else float(rate)


def python_path(own: str) -> str:
    """PYTHONPATH that arms a launcher and all it starts, before the entries that were there."""
    startup = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
    return os.pathsep.join([startup, *([own] if own else [])])
