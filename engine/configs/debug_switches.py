"""Debug switches of NCCL and torch.distributed, as changes from the default, each with its price."""

from __future__ import annotations

from dataclasses import dataclass

from ftdash.engine.configs.types import ConfigError


@dataclass(frozen=True, slots=True)
class Switch:
    """`variables` are set together; `default` is what the library does without them."""

    name: str
    variables: tuple[tuple[str, str], ...]
    what: str
    default: str
    price: str

    @property
    def assignment(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables)


def _switch(
    name: str, value: str | tuple[tuple[str, str], ...], what: str, default: str, price: str
) -> Switch:
    variables = (tuple(value.split("=", 1)),) if isinstance(value, str) else value
    return Switch(name, variables, what, default, price)  # type: ignore[arg-type]


# Defaults and effects: NVIDIA's NCCL environment reference, torch.distributed's documentation, and
# ProcessGroupNCCL.hpp of torch 2.13.
SWITCHES: tuple[Switch, ...] = (
    _switch(
        "nccl-info",
        "NCCL_DEBUG=INFO",
        "NCCL says at start which devices, rings and transports it uses (NVLink, PCIe, InfiniBand, sockets)",
        "WARN and errors only",
        "some hundred lines a rank at start, nothing per step",
    ),
    _switch(
        "nccl-subsystems",
        "NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH",
        "narrows NCCL_DEBUG=INFO to start, network and topology",
        "INIT, BOOTSTRAP, ENV",
        "COLL as well would log every collective: gigabytes",
    ),
    _switch(
        "torch-detail",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "every collective is checked for shape and order over all ranks before it runs",
        "OFF",
        "an extra gloo round for each collective: steps can take several times as long; some versions "
        "(torch 2.13: DDP over gloo) crash with it",
    ),
    _switch(
        "torch-info",
        "TORCH_DISTRIBUTED_DEBUG=INFO",
        "DDP names unused parameters and says what it built",
        "OFF",
        "small",
    ),
    _switch(
        "async-errors-off",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
        "a failed collective no longer ends the process, so that it can be looked at",
        "on (3): an error or timeout tears the process down",
        "the job can hang for ever",
    ),
    _switch(
        "no-p2p",
        "NCCL_P2P_DISABLE=1",
        "GPU-to-GPU copies go through host memory: shows whether direct access is broken",
        "direct access wherever the topology allows",
        "all traffic inside a node slows to PCIe through the host; for diagnosis only",
    ),
    _switch(
        "p2p-nvlink-only",
        "NCCL_P2P_LEVEL=NVL",
        "direct access over NVLink only, never over PCIe",
        "chosen by topology",
        "slower between GPUs that PCIe alone connects",
    ),
    _switch(
        "no-infiniband",
        "NCCL_IB_DISABLE=1",
        "sockets instead of InfiniBand or RoCE: shows whether the fabric is at fault",
        "InfiniBand where it is found",
        "traffic between nodes at the speed of TCP; for diagnosis only",
    ),
    _switch(
        "flight-recorder",
        (
            ("TORCH_FR_BUFFER_SIZE", "20000"),
            ("TORCH_NCCL_TRACE_BUFFER_SIZE", "20000"),  # the name before torch 2.9
            ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
            ("TORCH_FR_DUMP_ON_TIMEOUT", "1"),
        ),
        "keeps the last 20,000 collectives of each rank and writes them when one times out",
        "2,000 entries, dumped on timeout",
        "some tens of megabytes of host memory a rank",
    ),
    _switch(
        "fast-watchdog",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=120",
        "the watchdog gives up on a stuck process after two minutes",
        "480 s",
        "a slow save or a first compilation can be mistaken for a hang",
    ),
    _switch(
        "launch-blocking",
        "CUDA_LAUNCH_BLOCKING=1",
        "kernels run one by one, so that an error names the line that caused it",
        "kernels run asynchronously",
        "communication no longer hides behind compute: steps can take twice as long",
    ),
)


def environment(names: list[str]) -> list[str]:
    """NAME=VALUE assignments of the named switches. Raises ConfigError naming the ones there are."""
    return [f"{variable}={value}" for variable, value in variables(names)]


def variables(names: list[str]) -> tuple[tuple[str, str], ...]:
    """What the named switches set. Raises ConfigError naming the ones there are."""
    known = {switch.name: switch for switch in SWITCHES}
    assignments: dict[str, str] = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"--debug-switches {name}: one of {', '.join(known)}")
        for variable, value in known[name].variables:
            if assignments.get(variable, value) != value:
                raise ConfigError(f"--debug-switches: two of them set {variable}")
            assignments[variable] = value
    return tuple(assignments.items())
