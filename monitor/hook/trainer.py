"""The hook for transformers' Trainer and everything built on it: one callback, phases from model hooks.

    trainer = Trainer(..., callbacks=[FtdashCallback()])

`data` runs from the end of a step to the next forward, `forward` and `backward` are told apart by hooks on
the model, `optimizer` begins before the optimizer's step. Times are the host's; a GPU works behind them.

Between the batches and the forward the Trainer gathers the number of label tokens from all ranks
(average_tokens_across_devices), where every rank waits for the one whose data is late. That wait is `sync`,
or all would look as slow at loading as the slowest.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers import TrainerCallback

from ftdash.monitor.hook.core import Hook


class FtdashCallback(TrainerCallback):
    """Feeds one Hook from a Trainer. `describe=False` leaves the meta record to the caller."""

    def __init__(self, hook: Hook | None = None, *, describe: bool = True, expert_every: int = 10) -> None:
        self.hook = hook or Hook.start(expert_every=expert_every)
        self._own_hook = hook is None
        self._describe = describe
        self._tokens: Any = 0
        self._logged_step = -1
        self._handles: list[Any] = []
        self._gather: Any = None  # Accelerator's own, while ours stands in its place

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        hook = self.hook
        if model is None:
            return
        if self._describe:
            hook.describe(
                model,
                distributed_type=_distributed_type(),
                max_steps=state.max_steps,
                micro_batch=args.per_device_train_batch_size,
                grad_accum=args.gradient_accumulation_steps,
                seq_len=int(getattr(args, "max_length", 0) or 0),
                output_dir=os.path.abspath(args.output_dir) if args.output_dir else "",
            )
        hook.watch_experts(model)
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]
        self._time_gathers()
        hook.start_steps(state.global_step)
        hook.enter("data")

    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        self.hook.enter("forward")
        labels = kwargs.get("labels", kwargs.get("shift_labels"))
        if labels is not None:
            self._tokens = self._tokens + (labels != -100).sum()

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if model.training:
            self.hook.enter("backward")

    def _time_gathers(self) -> None:
        from accelerate import Accelerator

        self._leave_gathers()
        hook, plain = self.hook, Accelerator.gather

        @functools.wraps(plain)
        def gather(accelerator: Any, tensor: Any) -> Any:
            if hook.phase_name != "data":
                return plain(accelerator, tensor)
            with hook.phase("sync"):
                return plain(accelerator, tensor)

        self._gather, Accelerator.gather = plain, gather

    def _leave_gathers(self) -> None:
        from accelerate import Accelerator

        if self._gather is not None:
            Accelerator.gather, self._gather = self._gather, None

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.enter("data")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.enter("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.enter("log")
        if not control.should_log:
            self._record(state, {})
            self._next(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs and state.global_step != self._logged_step:
            self._logged_step = state.global_step
            self._record(state, logs)
            self._next(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.enter("save" if control.should_save else "data")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.hook.enter("data")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave_gathers()
        self.hook.enter("end")
        if self._own_hook:
            self.hook.close()

    def _record(self, state: Any, logs: dict[str, Any]) -> None:
        self.hook.step(
            step=state.global_step,
            epoch=state.epoch or 0.0,
            loss=logs.get("loss"),
            lr=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            aux_loss=logs.get("aux_loss"),
            tokens=self._tokens,
        )
        self._tokens = 0

    def _next(self, control: Any) -> None:
        self.hook.enter("eval" if control.should_evaluate else "save" if control.should_save else "data")


def _distributed_type() -> str:
    """What accelerate says it runs; empty before it was set up."""
    from accelerate.state import PartialState

    return str(PartialState._shared_state.get("distributed_type", "")).rpartition(".")[2]
