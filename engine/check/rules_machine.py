"""What depends on this machine: always a note, since configs are often checked where they do not run."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind, Sourced
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_host import available_bytes

if TYPE_CHECKING:
    from ftdash.engine.checkpoint.recognise import Checkpoint

# Megatron-LM's options, and the shorter ones of Megatron-DeepSpeed and of DeepSpeed's examples.
_TENSOR_OPTIONS = ("--tensor-model-parallel-size", "--tensor-parallel-size", "--autotp_size")
_PIPELINE_OPTIONS = (
    "--pipeline-model-parallel-size",
    "--pipeline-parallel-size",
    "--pipe-parallel-size",
)


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
        elif path.parent.is_dir() and re.search(r"[/-]", str(found.value)) and "$" not in str(found.value):
            yield _not_there(path, found)
    universal = any(
        document.get("checkpoint", "load_universal") and document.data["checkpoint"]["load_universal"] is True
        for document in bundle.of(Kind.DEEPSPEED)
    )
    # MiCS numbers the ranks inside each shard group: the files do not tell the number of groups.
    mics = any(
        (size := document.get("zero_optimization", "mics_shard_size")) and size.value != -1
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
        elif checkpoint.kind is CheckpointKind.FSDP_LOCAL:
            yield from _other_local_world(bundle, checkpoint, where)
        elif checkpoint.kind is CheckpointKind.DEEPSPEED and not universal and not mics:
            yield from _other_world(bundle, checkpoint, where)


def _not_there(path: Path, named: Sourced) -> Finding:
    from ftdash.engine.checkpoint.recognise import last_whole

    last = last_whole(path.parent)
    return warning(
        "resume-missing",
        named.where,
        f"resume_from_checkpoint names {named.value}, which is not in {path.parent.name}/",
        f"the last whole one there is {last.path.name}" if last else "correct the path",
    )


def _other_local_world(bundle: Bundle, checkpoint: Checkpoint, where: str) -> Iterator[Finding]:
    if bundle.world and bundle.world.value != checkpoint.ranks:
        yield error(
            "checkpoint-world-size",
            where,
            f"{checkpoint.path.name} is a LOCAL_STATE_DICT of {checkpoint.ranks} ranks, and "
            f"{bundle.world.value} are started ({bundle.world.where})",
            f"resume with {checkpoint.ranks} ranks, and save with SHARDED_STATE_DICT",
        )


def _other_world(bundle: Bundle, checkpoint: Checkpoint, where: str) -> Iterator[Finding]:
    """DeepSpeed compares data-parallel sizes only; its file names count them apart from mp_rank_NN.

    What the files leave unsaid about tensor and pipeline parallelism is taken to be the checkpoint's: then
    its ranks times the model-parallel ones must be the world.
    """
    if not (bundle.world and checkpoint.ranks):
        return
    started, stated = bundle.world.value, _model_parallel(bundle)
    split = prod(size.value for size in stated)
    same_split = checkpoint.model_ranks == split or (len(stated) < 2 and checkpoint.model_ranks % split == 0)
    if started == checkpoint.ranks * checkpoint.model_ranks and same_split:
        return
    held = f"{checkpoint.ranks} data-parallel ranks"
    if checkpoint.model_ranks > 1:
        held += f" times {checkpoint.model_ranks} model-parallel ones (mp_rank_NN)"
    now = f"{started} are started ({bundle.world.where})"
    if split > 1:
        now += f", {split} to a model ({stated[0].where})"
    yield error(
        "checkpoint-world-size",
        where,
        f"{checkpoint.path.name} holds the shards of {held}, and {now}",
        "convert it: ftdash checkpoint convert --to universal, and set load_universal",
    )


def _model_parallel(bundle: Bundle) -> list[Sourced]:
    """The tensor and the pipeline size of the run, each as far as a file states it."""
    tensor: list[Sourced] = []
    pipeline: list[Sourced] = []
    for document, shell, launch in bundle.launches():
        for sizes, options in ((tensor, _TENSOR_OPTIONS), (pipeline, _PIPELINE_OPTIONS)):
            if (size := shell.number(launch.option(*options))) is not None:
                sizes.append(Sourced(size, document.at(launch.line)))
    for document in bundle.of(Kind.DEEPSPEED):
        tensor += filter(None, [document.get("tensor_parallel", "autotp_size")])
        pipeline += filter(None, [document.get("pipeline", "stages")])
    for document, _, call in bundle.script_calls():
        if call.last == "PipelineModule" and "num_stages" in call.kwargs:
            pipeline.append(Sourced(call.kwargs["num_stages"], document.at(call.line)))
    for plan in bundle.plans:
        tensor.append(Sourced(plan.value.get("tp", 1), plan.where))
        pipeline.append(Sourced(plan.value.get("pp", 1), plan.where))
    known = (
        [size for size in sizes if type(size.value) is int and size.value > 0] for sizes in (tensor, pipeline)
    )
    return [sizes[0] for sizes in known if sizes]


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
