"""Checks of training scripts: what comes in the wrong order, what is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check


@check
def data_parallel(bundle: Bundle) -> Iterator[Finding]:
    """One process and one GIL drive all GPUs; TRL refuses it from 1.15 on."""
    for document, script, call in bundle.script_calls():
        if call.last == "DataParallel":
            trl = "trl" in script.imports
            yield (error if trl else warning)(
                "data-parallel",
                document.at(call.line),
                "nn.DataParallel drives all GPUs from one process" + (": TRL refuses it" if trl else ""),
                "drop it and start with accelerate launch or torchrun: DDP comes by itself",
            )
    for document, shell, launch in bundle.launches():
        gpus = shell.gpus_per_node or 0
        if visible := shell.environment(launch, "CUDA_VISIBLE_DEVICES"):
            gpus = max(gpus, len([part for part in visible.split(",") if part.strip().isdigit()]))
        one_task = (shell.tasks_per_node or 1) == 1
        trains = any(
            script_document.path.name in " ".join(launch.argv)
            and {"transformers", "trl"} & bundle.scripts[script_document.path].imports
            for script_document in bundle.of(Kind.SCRIPT)
        )
        if launch.launcher == "python" and gpus > 1 and one_task and (trains or bundle.backend is not None):
            yield warning(
                "plain-python-launch",
                document.at(launch.line),
                f"python starts one process for {gpus} GPUs: the trainer falls back to nn.DataParallel",
                f"torchrun --standalone --nproc-per-node {gpus}, or accelerate launch",
            )


@check
def arguments_after_model(bundle: Bundle) -> Iterator[Finding]:
    """ZeRO-3 partitions at load only once the trainer's arguments exist (transformers' DeepSpeed guide)."""
    if bundle.backend is None or bundle.backend.stage != 3:
        return
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        arguments = [call for found, call in bundle.argument_calls() if found is document]
        parsed = [
            call
            for call in script.calls
            if call.last
            in ("parse_args_into_dataclasses", "parse_args_and_config", "HfDeepSpeedConfig", "Accelerator")
            or call.last == "parse_dict"
        ]
        if not arguments:
            continue
        order = {id(call): index for index, call in enumerate(script.calls)}
        first = min(order[id(call)] for call in arguments + parsed)
        for call in script.calls:
            if (
                call.last == "from_pretrained"
                and re.search(r"Model|ForCausalLM", call.owner)
                and order[id(call)] < first
            ):
                yield warning(
                    "arguments-after-model",
                    document.at(call.line),
                    f"{call.name}() runs before the trainer's arguments exist (line "
                    f"{arguments[0].line}): under "
                    "ZeRO-3 every rank loads the whole model",
                    f"build {arguments[0].last} first, then load the model",
                )


@check
def old_tensor_parallel_call(bundle: Bundle) -> Iterator[Finding]:
    for document, _, call in bundle.script_calls():
        if call.last == "from_pretrained" and "tp_plan" in call.kwargs:
            yield warning(
                "tp-plan-outside",
                document.at(call.line),
                "tp_plan is handed to from_pretrained: deprecated since transformers 5.16",
                'distributed_config=DistributedConfig(tp_size=N, tp_plan="auto")',
            )


@check
def device_map_under_launcher(bundle: Bundle) -> Iterator[Finding]:
    """device_map="auto" spreads one model over all GPUs, in every process of a distributed run."""
    if not bundle.distributed:
        return
    for document, _, call in bundle.script_calls():
        if call.last == "from_pretrained" and call.kwargs.get("device_map") in (
            "auto",
            "balanced",
            "sequential",
        ):
            where = bundle.backend.where if bundle.backend else (bundle.world.where if bundle.world else "")
            yield error(
                "device-map-distributed",
                document.at(call.line),
                f'device_map="{call.kwargs["device_map"]}" in a distributed run ({where}): the trainer '
                "refuses it",
                "remove device_map: each rank places its own part",
            )


@check
def save_of_load_time_sharded(bundle: Bundle) -> Iterator[Finding]:
    """A model sharded at load time cannot resume: only the model may be saved."""
    for document, _, call in bundle.script_calls():
        if call.last != "DistributedConfig":
            continue
        arguments = list(bundle.argument_calls())
        if not arguments:
            continue
        only, strategy = bundle.argument("save_only_model"), bundle.argument("save_strategy")
        if (only and only.value is True) or (strategy and str(strategy.value).lower() in ("no", "none")):
            continue
        yield warning(
            "load-time-sharding-resume",
            document.at(call.line),
            "a model sharded by DistributedConfig at load time cannot resume: its optimizer state is not "
            "saved whole",
            'save_only_model=True, or save_strategy="no"',
        )
