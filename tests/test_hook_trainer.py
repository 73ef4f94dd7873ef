"""The Trainer's callback in one process: what counts as loading data, and what as waiting for other ranks."""

from __future__ import annotations

from types import SimpleNamespace

from ftdash.monitor import records
from ftdash.monitor.hook import Hook, core


def test_waiting_for_the_token_count_of_other_ranks_is_not_loading_data(tmp_path, monkeypatch):
    from accelerate import Accelerator
    from torch.nn import Linear

    from ftdash.monitor.hook.trainer import FtdashCallback

    clock = [100.0]
    monkeypatch.setattr(core.time, "perf_counter", lambda: clock[0])

    def spend(seconds):
        clock[0] += seconds

    def gather(accelerator, tensor):
        spend(5.0)
        return tensor

    monkeypatch.setattr(Accelerator, "gather", gather)
    hook = Hook.start(tmp_path, 0)
    callback = FtdashCallback(hook, describe=False)
    state, control = SimpleNamespace(global_step=0, max_steps=1, epoch=0.0), SimpleNamespace(should_log=False)
    control.should_evaluate = control.should_save = False
    callback.on_train_begin(None, state, control, model=Linear(1, 1))
    spend(1.0)
    assert Accelerator.gather(None, 7) == 7
    spend(0.5)
    hook.enter("forward")
    Accelerator.gather(None, 7)  # as a loss may do that is a mean over ranks: part of the forward
    state.global_step = 1
    callback.on_step_end(None, state, control)
    callback.on_train_end(None, state, control)
    hook.close()
    assert Accelerator.gather is gather
    lines = (tmp_path / "telemetry" / "rank-0.jsonl").read_bytes().splitlines()
    (step,) = [record for record in map(records.decoder.decode, lines) if isinstance(record, records.Step)]
    assert (step.data_s, step.forward_s, step.step_s) == (1.5, 5.0, 11.5)
