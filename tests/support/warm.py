"""Compiles the DeepSpeed CPU operators that the tests use, once for this machine and user."""

from __future__ import annotations

import os
import sys
import time

from ftdash.engine.configs.commands import own_path


def main() -> int:
    """Build each operator, saying how long it took; exit 0 also where DeepSpeed is not installed."""
    os.environ["PATH"] = own_path(os.environ)
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder, ShareMemCommBuilder
    except ImportError as error:
        print(f"nothing to warm: {error}")
        return 0
    for builder in (ShareMemCommBuilder(), CPUAdamBuilder()):
        started = time.monotonic()
        builder.load(verbose=False)
        print(f"{builder.name}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
