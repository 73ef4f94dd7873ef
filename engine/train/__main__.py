"""`python -m ftdash.engine.train`: parse, prepare the process, train, and end with a truthful exit code.

Exit codes: 0 done (or stopped on request, with a checkpoint), 1 an error, 2 bad input, 3 a library fell back.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from typing import NoReturn

from ftdash.engine.train import gloo_fsdp, options, verify
from ftdash.engine.train.options import Options, TrainError
from ftdash.monitor.hook import Hook


def main(argv: list[str] | None = None) -> int:
    chosen, deepspeed = options.parse(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # DeepSpeed calls collectives by names that torch is retiring, several hundred times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    if chosen.smoke:
        from ftdash.engine.train import smoke

        return smoke.run()
    with Hook.start(expert_every=chosen.expert_every) as hook:
        try:
            _train(chosen, deepspeed, hook)
        except TrainError as error:
            fell_back = isinstance(error, verify.Fallback)
            hook.event("error", "fell-back" if fell_back else "bad-input", str(error))
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 3 if fell_back else 2
        finally:
            _leave_group()
    return 0


def _train(chosen: Options, deepspeed: str | None, hook: Hook) -> None:
    asked = verify.asked_strategy(chosen, deepspeed)
    if chosen.tp > 1 or chosen.ep > 1:
        from ftdash.engine.train import loop

        loop.run(chosen, asked, hook)
        return
    if gloo_fsdp.wanted() and not chosen.on_gpu:
        gloo_fsdp.apply()
    from ftdash.engine.train import sft

    sft.run(chosen, asked, deepspeed, hook)


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end(status: int) -> NoReturn:
    """End this process after all that Python does at an end, but without tearing the interpreter down.

    Threads of torch's process groups can abort a rank there that has long finished and saved ("terminate
    called without an active exception", seen under gloo): the launcher would call the run failed.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
