"""The hook itself: three lines in a training loop, and every rank can be watched and asked where it stands.

    hook = Hook.start(model=model)                  # reads FTDASH_RUN_DIR and RANK; does nothing without them
    with hook.phase("forward"): ...                 # data, forward, backward, optimizer, save, eval
    hook.step(loss=loss, tokens=n)                  # one record; tensors are read back without a pause
    hook.close()

Nothing here raises into training: a failure switches the part that failed off and is told once, as an event.
Needs the standard library and torch only; `ftdash.monitor.records` describes what is written.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ftdash.monitor.beat import BeatWriter
from ftdash.monitor.hook import process
from ftdash.monitor.hook.writer import LineWriter
from ftdash.monitor.hostname import node_name

if TYPE_CHECKING:
    import torch

RUN_DIR_ENV = "FTDASH_RUN_DIR"
FORMAT_VERSION = 1
TIMED_PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = ("save", "eval")  # not part of a step's time
_MAX_UNREAD = 16  # records waiting for the device


class _Phase:
    """One reusable `with` block for one phase name."""

    __slots__ = ("_hook", "_name", "_outer")

    def __init__(self, hook: Hook, name: str) -> None:
        self._hook = hook
        self._name = name
        self._outer = ""

    def __enter__(self) -> None:
        outer = self._hook.phase_name
        self._outer = "" if outer == "start" else outer
        self._hook.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._hook.enter(self._outer)


class _Unread:
    """Device tensors on their way to the host, and the record that waits for them."""

    __slots__ = ("event", "finish", "host")

    def __init__(self, tensor: torch.Tensor, finish: Any) -> None:
        import torch

        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()
        self.finish = finish


class Hook:
    """One rank's telemetry. Make it with `Hook.start`; every public method is safe to call at any time."""

    def __init__(self, run_dir: str | os.PathLike[str] | None, rank: int) -> None:
        self.rank = rank
        self.run_dir = Path(run_dir) if run_dir else None
        self.phase_name = ""
        self.step_number = 0
        self.tokens_seen = 0  # label tokens of this rank; on a GPU, a step or two behind
        self.expert_every = 10
        self._writer: LineWriter | None = None
        self._beat: BeatWriter | None = None
        self._stacks: Any = None
        self._counter: Any = None
        self._phases: dict[str, _Phase] = {}
        self._spent: dict[str, float] = {}
        self._phase_since = self._step_since = time.perf_counter()
        self._unread: deque[_Unread] = deque()
        self._cuda_device: int | None = None
        self._told: set[str] = set()
        self._closed = False

    @classmethod
    def start(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        *,
        model: torch.nn.Module | None = None,
        expert_every: int = 10,
        **meta: Any,
    ) -> Hook:
        """A running hook. Without a run directory (argument or FTDASH_RUN_DIR) it does nothing, at no cost.

        With `model`, its parameters are described in the meta record and the tokens per expert of its MoE
        layers are counted, read back every `expert_every` steps. `meta` are fields of `records.Meta`; when
        neither `model` nor `meta` is given the caller writes the meta record later, with `describe`.
        """
        if rank is None:
            rank = process.own_rank()
        hook = cls(run_dir or os.environ.get(RUN_DIR_ENV) or None, rank)
        hook.expert_every = max(1, expert_every)
        hook._open()
        if model is not None or meta:
            hook.describe(model, **meta)
        if model is not None:
            hook.watch_experts(model)
        return hook

    def _open(self) -> None:
        if self.run_dir is None:
            return
        telemetry = self.run_dir / "telemetry"
        refused: Exception | None = None
        try:
            telemetry.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._beat = BeatWriter(telemetry / f"rank-{self.rank}.beat")
        except Exception as error:
            refused = error
        with contextlib.suppress(Exception):
            last = self._beat.close if self._beat is not None else None
            self._writer = LineWriter(telemetry / f"rank-{self.rank}.jsonl", last=last)
        if refused is not None:
            self._fail("heartbeat", refused)
        stacks = self.run_dir / "stacks" / f"faulthandler-rank-{self.rank}.txt"
        self._stacks = process.dump_stacks_on_signal(stacks)
        process.allow_ptrace()
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            process.serve_flight_recorder(self.run_dir / "control", self.rank)
        with contextlib.suppress(Exception):
            import torch

            if torch.cuda.is_available():
                self._cuda_device = torch.cuda.current_device()
        atexit.register(self.close)
        self.enter("start")

    def phase(self, name: str) -> _Phase:
        """`with hook.phase("forward"):` times the block and beats at both ends."""
        block = self._phases.get(name)
        if block is None:
            block = self._phases[name] = _Phase(self, name)
        return block

    def enter(self, name: str) -> None:
        """Leave the current phase and enter another; the empty name means between phases."""
        now = time.perf_counter()
        if self.phase_name == "start":  # what came before the loop (loading, compiling) is no part of a step
            self._spent.clear()
            self._step_since = now
        else:
            self._spent[self.phase_name] = self._spent.get(self.phase_name, 0.0) + now - self._phase_since
        self._phase_since = now
        self.phase_name = name
        if self._beat is not None:
            self._beat.beat(self.step_number, name)

    def start_steps(self, step: int = 0) -> None:
        """Start the clock of the step after `step` now."""
        self.step_number = step
        self._reset_clock()

    def _reset_clock(self) -> None:
        self._spent.clear()
        self._phase_since = self._step_since = time.perf_counter()

    def step(
        self,
        *,
        loss: Any = None,
        tokens: Any = 0,
        lr: float | None = None,
        grad_norm: Any = None,
        aux_loss: Any = None,
        epoch: float = 0.0,
        step: int | None = None,
    ) -> None:
        """Record one finished optimizer step. `loss`, `tokens`, `grad_norm` and `aux_loss` may be tensors.

        `tokens` are the label tokens that this rank saw. The step's time runs from the last call, without
        the time spent in `save` and `eval` phases.
        """
        try:
            self._step(step, loss, tokens, lr, grad_norm, aux_loss, epoch)
        except Exception as error:
            self._fail("step", error)

    def _step(
        self, step: int | None, loss: Any, tokens: Any, lr: Any, grad_norm: Any, aux_loss: Any, epoch: float
    ) -> None:
        self.enter(self.phase_name)
        self.step_number = self.step_number + 1 if step is None else step
        spent = self._spent
        step_s = self._phase_since - self._step_since - sum(spent.get(name, 0.0) for name in PAUSES)
        record: dict[str, Any] = {"kind": "step", "t": time.time(), "v": FORMAT_VERSION}
        record["step"], record["epoch"] = self.step_number, float(epoch)
        record["step_s"] = round(step_s, 6)
        for name in TIMED_PHASES:
            if value := spent.get(name):
                record[f"{name}_s"] = round(value, 6)
        if lr is not None:
            record["lr"] = float(lr)
        if self._cuda_device is not None:
            self._add_memory(record)
        self._reset_clock()
        values = {"loss": loss, "tokens": tokens, "grad_norm": grad_norm, "aux_loss": aux_loss}
        self._emit_step(record, {key: value for key, value in values.items() if value is not None}, step_s)
        if self._counter is not None:
            self._count_experts()
        while self._unread and self._unread[0].event.query():
            self._finish_one()
        if self._beat is not None:
            self._beat.beat(self.step_number, self.phase_name)

    def _add_memory(self, record: dict[str, Any]) -> None:
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict(self._cuda_device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        record["allocated"], record["peak"] = allocated["current"], allocated["peak"]
        record["reserved"], record["peak_reserved"] = reserved["current"], reserved["peak"]

    def _emit_step(self, record: dict[str, Any], values: Mapping[str, Any], step_s: float) -> None:
        def finish(numbers: list[float]) -> None:
            for key, number in zip(values, numbers, strict=True):
                record[key] = int(number) if key == "tokens" else float(number)
            self.tokens_seen += record.get("tokens", 0)
            if step_s > 0:
                record["tokens_per_s"] = round(record.get("tokens", 0) / step_s, 3)
            self._put(record)

        on_device = [value for value in values.values() if getattr(value, "is_cuda", False)]
        if not on_device:
            finish([_number(value) for value in values.values()])
            return
        import torch

        device = on_device[0].device
        columns = [torch.as_tensor(value).detach().reshape(()) for value in values.values()]
        stacked = torch.stack([column.to(device, torch.double, non_blocking=True) for column in columns])
        self._read_later(stacked, lambda host: finish(host.tolist()))

    def _count_experts(self) -> None:
        self._counter.add_up()
        if self._counter.trouble:
            self._tell("experts-uncounted", self._counter.trouble)
        if self.step_number % self.expert_every == 0:
            self._emit_experts()

    def _emit_experts(self) -> None:
        taken = self._counter.take()
        if taken is None:
            return
        step, t = self.step_number, time.time()

        def finish(host: torch.Tensor) -> None:
            head = {"kind": "experts", "t": t, "v": FORMAT_VERSION, "step": step}
            counter = self._counter
            rows = host.tolist()
            if not any(map(any, rows)):
                return
            for layer, experts, counts in zip(counter.layers, counter.experts, rows, strict=True):
                self._put({**head, "layer": layer, "counts": counts[:experts]})

        if taken.is_cuda:
            self._read_later(taken, finish)
        else:
            finish(taken)

    def _read_later(self, tensor: torch.Tensor, finish: Any) -> None:
        if len(self._unread) >= _MAX_UNREAD:
            self._finish_one()
        self._unread.append(_Unread(tensor, finish))

    def _finish_one(self) -> None:
        unread = self._unread.popleft()
        unread.event.synchronize()
        unread.finish(unread.host)

    def _put(self, record: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.put(record)

    def event(self, severity: str, code: str, text: str) -> None:
        """Tell a person something. `severity`: note, warning, error."""
        head = {"kind": "event", "t": time.time(), "v": FORMAT_VERSION, "rank": self.rank}
        self._put({**head, "severity": severity, "code": code, "text": text})

    def describe(self, model: torch.nn.Module | None = None, **meta: Any) -> None:
        """Write the meta record: who this rank is, what really runs. `meta` are fields of `records.Meta`."""
        if self._writer is None:
            return
        try:
            self._put({**self._identity(), **_parameters(model), **meta})
        except Exception as error:
            self._fail("meta", error)

    def _identity(self) -> dict[str, Any]:
        import torch

        dist = torch.distributed
        ready = dist.is_available() and dist.is_initialized()
        device, uuid = "cpu", ""
        if self._cuda_device is not None:
            device = f"cuda:{self._cuda_device}"
            uuid = f"GPU-{torch.cuda.get_device_properties(self._cuda_device).uuid}"
        return {
            "kind": "meta",
            "t": time.time(),
            "v": FORMAT_VERSION,
            "rank": self.rank,
            "local_rank": int(os.environ.get("LOCAL_RANK", "0") or 0),
            "world_size": dist.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", "1") or 1),
            "host": node_name(),
            "pid": os.getpid(),
            "device": device,
            "device_uuid": uuid,
            "backend": dist.get_backend() if ready else "",
            "collective_timeout_s": process.collective_timeout_s() if ready else 0.0,
            "versions": {"torch": torch.__version__},
        }

    def watch_experts(self, model: torch.nn.Module) -> int:
        """Count the tokens of every MoE layer from now on; returns the number of layers found."""
        if self._writer is None:
            return 0
        try:
            from ftdash.monitor.hook.experts import ExpertCounter

            counter = ExpertCounter(model)
        except Exception as error:
            self._fail("experts", error)
            return 0
        if counter.trouble:
            self._tell("experts-uncounted", counter.trouble)
        self._counter = counter if counter.layers else None
        return len(counter.layers)

    def _tell(self, code: str, text: str) -> None:
        """A warning, once."""
        if code not in self._told:
            self._told.add(code)
            self.event("warning", code, text)

    def _fail(self, part: str, error: BaseException) -> None:
        if part not in self._told:
            self._told.add(part)
            text = f"telemetry: {part} failed: {type(error).__name__}: {error}"
            self.event("warning", f"hook-{part}", text)

    def close(self) -> None:
        """Write what is left (waiting at most two seconds for the disk) and let go of everything."""
        if self._closed or self.run_dir is None:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if self._counter is not None:
                self._emit_experts()
                self._counter.close()
            while self._unread:
                self._finish_one()
        except Exception as error:
            self._fail("close", error)
        self.enter("end")
        self._beat = None  # closed by the writer's thread, which alone may wait for the disk
        if self._writer is not None:
            self._writer.close()
        process.forget_stack_dumps(self._stacks)

    def __enter__(self) -> Hook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.event("error", "exception", f"{type(error).__name__}: {error}")
        self.close()


def _number(value: Any) -> float:
    """A number or a one-element tensor on the host as a float."""
    detach = getattr(value, "detach", None)
    return float(detach() if detach else value)


def _parameters(model: torch.nn.Module | None) -> dict[str, Any]:
    """Counts of a model's parameters, global ones where a library shards them, and its MoE layers."""
    if model is None:
        return {}
    from torch.distributed.tensor import DTensor

    from ftdash.monitor.hook.experts import chosen_count, expert_count, find_routers

    total = trainable = sharded = 0
    for parameter in model.parameters():
        size = int(getattr(parameter, "ds_numel", 0) or parameter.numel())
        total += size
        trainable += size if parameter.requires_grad else 0
        sharded += isinstance(parameter, DTensor)
    found = {
        "wrapped_class": type(model).__name__,
        "total_params": total,
        "trainable_params": trainable,
        "dtensor_params": sharded,
    }
    if routers := [router for _, router in find_routers(model)]:
        found["moe_layers"] = len(routers)
        found["expert_count"] = expert_count(routers[0])
        found["top_k"] = chosen_count(routers[0])
    return found
