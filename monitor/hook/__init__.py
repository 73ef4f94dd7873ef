"""What a rank tells of itself from inside the training process: steps, phases, tokens per expert, stacks."""

from ftdash.monitor.hook.core import Hook

__all__ = ["Hook"]
