"""What depends on this machine: always a note, since configs are often checked where they do not run."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind, Sourced
from ftdash.engine.check.findings import Finding, error, note
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_host import available_bytes


@check
def port_taken(bundle: Bundle) -> Iterator[Finding]:
    found: list[Sourced] = []
    for document in bundle.of(Kind.ACCELERATE):
        if port := document.get("main_process_port"):
            found.append(port)
    for document, shell, launch in bundle.launches():
        if (port_text := launch.option("--master_port", "--main_process_port")) and (
            number := shell.number(port_text)
        ):
            found.append(Sourced(number, document.at(launch.line)))
    for port in found:
        if isinstance(port.value, int) and 0 < port.value < 65536 and _listening(port.value):
            yield note(
                "port-taken",
                port.where,
                f"port {port.value} is taken on this machine now",
                "choose another, or 0 (accelerate) or --standalone (torchrun) on one node",
            )


def _listening(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


@check
def shards_and_world(bundle: Bundle) -> Iterator[Finding]:
    """A DeepSpeed checkpoint resumes on the data-parallel size that wrote it (deepspeedai/DeepSpeed#2898)."""
    from ftdash.engine.checkpoint.recognise import CheckpointKind, inspect

    resumes = [(document.path, document.name) for document in bundle.of(Kind.CHECKPOINT)]
    for found, document in _resume_paths(bundle):
        path = document.path.parent / str(found.value)
        if path.is_dir():
            resumes.append((path, found.where))
    universal = any(
        document.get("checkpoint", "load_universal") and document.data["checkpoint"]["load_universal"] is True
        for document in bundle.of(Kind.DEEPSPEED)
    )
    for path, where in resumes:
        checkpoint = inspect(path)
        if checkpoint is None:
            continue
        if not checkpoint.whole:
            yield error(
                "checkpoint-incomplete",
                where,
                f"{path.name} is half written: {checkpoint.problem}",
                "resume from the last whole one: ftdash checkpoint ls",
            )
        elif (
            checkpoint.kind is CheckpointKind.DEEPSPEED
            and not universal
            and bundle.world
            and checkpoint.ranks
        ) and checkpoint.ranks != bundle.world.value:
            yield error(
                "checkpoint-world-size",
                where,
                f"{path.name} holds the shards of {checkpoint.ranks} data-parallel ranks, and "
                f"{bundle.world.value} are started ({bundle.world.where})",
                "convert it: ftdash checkpoint convert --to universal, and set load_universal",
            )


def _resume_paths(bundle: Bundle) -> Iterator[tuple[Sourced, Document]]:
    if (found := bundle.argument("resume_from_checkpoint")) and isinstance(found.value, str):
        yield found, bundle.documents[0]
    for document, _, call in bundle.script_calls():
        value = call.kwargs.get("resume_from_checkpoint")
        if call.last == "train" and isinstance(value, str):
            yield Sourced(value, document.at(call.line)), document


@check
def host_memory(bundle: Bundle) -> Iterator[Finding]:
    """Optimizer offload keeps 12 or 16 bytes a parameter in host memory (ZeRO-Offload, arXiv:2101.06840)."""
    if bundle.model is None or bundle.adapters is not None:
        return
    shape = bundle.model[0]
    for document in bundle.of(Kind.DEEPSPEED):
        optimizer = document.get("zero_optimization", "offload_optimizer", "device")
        if optimizer is None or optimizer.value != "cpu":
            continue
        param = document.get("zero_optimization", "offload_param", "device")
        per_param = 18 if param and param.value == "cpu" else 16
        needed = per_param * shape.total_params
        free = available_bytes()
        if free and needed > free:
            yield note(
                "host-memory",
                optimizer.where,
                f"offloading {shape.name} keeps {needed / 2**30:.0f} GiB in host memory over all nodes; "
                "this machine "
                f"has {free / 2**30:.0f} GiB free",
                "check the host memory of the nodes that will run it",
            )
