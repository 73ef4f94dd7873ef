"""The loss of any loop: the tensors that backward starts from, whoever computed them.

A value is added up on its device and read by nobody before the step's record. Backward is often given a part
of the loss: divided by the number of micro-batches, or scaled for fp16. Both are undone where they can be
told.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

LOSS_SCALE = 256.0  # a constant factor from here on is loss scaling (DeepSpeed's fp16), not a weight


class Roots:
    """What backward started from since the last `take`."""

    def __init__(self) -> None:
        self.count = 0
        self._sum: Any = None
        self._divided = 0  # of them, how many were a loss divided by a constant, and by which one
        self._divisor = 1.0
        self._unscaled: tuple[Any, Any] | None = None  # what GradScaler made, and from what
        self._off = False

    def listen(self, autograd: ModuleType) -> None:
        """Hear `torch.autograd.backward`, which `Tensor.backward` calls by this name."""
        backward = autograd.backward

        @functools.wraps(backward)
        def heard(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if grad_tensors is None and not self._off:
                try:
                    self._add(tensors)
                except Exception:  # a training loop never fails for being watched
                    self._off = True
            return backward(tensors, grad_tensors, *args, **kwargs)

        autograd.backward = heard  # type: ignore[attr-defined]

    def listen_to_scaler(self, amp: ModuleType) -> None:
        """Hear torch's GradScaler, whose product is not the loss."""
        scale = amp.GradScaler.scale

        @functools.wraps(scale)
        def heard(scaler: Any, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            self._unscaled = (scaled, outputs)
            return scaled

        amp.GradScaler.scale = heard

    def take(self) -> Any:
        """The mean loss of the micro-batches since the last call, None without one; may be on a device."""
        count, total, whole = self.count, self._sum, self._divided == self.count == self._divisor
        self.count, self._sum, self._divided, self._divisor = 0, None, 0, 1.0
        return total if total is None or whole else total / count

    def stop(self) -> None:
        self._off, self._sum, self._unscaled = True, None, None

    def _add(self, tensors: Any) -> None:
        root = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
        if not hasattr(root, "grad_fn") or root.numel() != 1 or not root.is_floating_point():
            return
        if self._unscaled is not None and self._unscaled[0] is root:
            root = self._unscaled[1]
        self._unscaled = None
        value, factor = root.detach().reshape(()), constant_factor(root.grad_fn)
        if factor >= LOSS_SCALE:
            value = value / factor
        elif 0 < factor < 1 and math.isclose(1 / factor, round(1 / factor), rel_tol=1e-6):
            self._divided += 1
            self._divisor = float(round(1 / factor))
        self._sum = value if self._sum is None else self._sum + value
        self.count += 1


def constant_factor(node: Any) -> float:
    """The number that a tensor was multiplied or divided by last, 1 where that was no Python number."""
    name = type(node).__name__
    if not name.startswith(("MulBackward", "DivBackward")):
        return 1.0
    other = getattr(node, "_saved_other", None)
    # A Python number is kept as a tensor of the host; a tensor of the device is not waited for.
    if other is None or other.numel() != 1 or other.requires_grad or other.device.type != "cpu":
        return 1.0
    number = float(other)
    return (1 / number if number else 1.0) if name.startswith("Div") else number
