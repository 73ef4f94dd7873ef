"""What makes accelerate's FSDP real on gloo: without it, FSDP on a CPU-only machine is DDP, without a word.

accelerate turns its distributed type to FSDP for every accelerator's multi-process type, but not for
MULTI_CPU. This wraps `AcceleratorState.__init__` to do the same there. It is applied only where torch sees no
GPU, and only for accelerate releases that it was tried with.
"""

from __future__ import annotations

import os
from typing import Any

from ftdash.engine.train.options import TrainError

TRIED_ACCELERATE = ("1.15.0",)


def wanted() -> bool:
    """Whether the launcher's environment asks for FSDP over several processes."""
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return fsdp and int(os.environ.get("WORLD_SIZE", "1")) > 1


def apply() -> None:
    """Wrap AcceleratorState. Raises TrainError beside a GPU or for an accelerate that was not tried."""
    import accelerate
    import torch
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    if torch.cuda.is_available():
        raise TrainError("FSDP on gloo is for machines without a GPU; with one, leave --device cpu away")
    if accelerate.__version__ not in TRIED_ACCELERATE:
        raise TrainError(
            f"FSDP without a GPU was tried with accelerate {', '.join(TRIED_ACCELERATE)}, "
            f"not with {accelerate.__version__}"
        )
    if getattr(AcceleratorState.__init__, "ftdash", False):
        return
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = DistributedType.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    init.ftdash = True  # type: ignore[attr-defined]
    AcceleratorState.__init__ = init
