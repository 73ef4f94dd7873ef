"""Checks of training scripts: what only one rank reaches, what comes in the wrong order, what is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind, words
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.pyscript import Call, Script
from ftdash.engine.check.registry import check

# Calls that meet the other ranks whatever the backend is.
_COLLECTIVE = words(
    "evaluate predict gather gather_for_metrics gather_object wait_for_everyone barrier all_reduce "
    "all_gather all_gather_object all_gather_into_tensor reduce_scatter broadcast_object_list reduce "
    "full_tensor summon_full_params get_model_state_dict get_optimizer_state_dict full_optim_state_dict"
)
# Their state_dict() is this rank's own, whatever the model is.
_OWN_STATE = re.compile(r"optim|sched|scaler|ema|sampler|loader|tokenizer", re.I)
_BARRIERS = frozenset({"wait_for_everyone", "barrier"})
_PLAIN_OWNERS = re.compile(
    r"^(functools|itertools|torch|np|numpy|pd|re|metric|evaluator|math|asyncio|accuracy)$|metric"
)


@check
def one_rank_only(bundle: Bundle) -> Iterator[Finding]:
    """A collective that one rank enters hangs it: saving a sharded model, evaluating, gathering.

    Seen in kyuz0/amd-strix-halo-llm-finetuning#6, pytorch/pytorch#143536, huggingface/transformers#31532.
    """
    backend = bundle.backend
    shards = backend is not None and backend.shards
    for document, script, call in bundle.script_calls():
        if not call.main_only:
            continue
        where = document.at(call.line)
        guard = _short(call.main_only)
        if call.last in _BARRIERS and any(
            other.last in _BARRIERS and other.guard.startswith("!") for other in script.calls
        ):
            continue  # the others wait at a barrier of their own: one rank goes first
        if _meets(call, script):
            yield error(
                "collective-on-one-rank",
                where,
                f"{call.name}() is reached by one rank only ({guard}), and waits there for the others",
                "call it on every rank; keep only printing and logging under the condition",
            )
        elif call.last in ("save_model", "save_state", "get_state_dict", "save_checkpoint") or (
            call.last == "state_dict" and shards and call.owner and not _OWN_STATE.search(call.owner)
        ):
            report = error if shards else (note if backend is not None else warning)
            effect = (
                f"under {backend.label} it gathers shards, and the other ranks never come"
                if shards and backend
                else "it hangs as soon as the model is sharded (FSDP, ZeRO-3)"
            )
            yield report(
                "save-on-one-rank",
                where,
                f"{call.name}() is reached by one rank only ({guard}): {effect}",
                "call it on every rank: it writes where it must",
            )
        elif call.last == "generate" and call.owner:
            report = error if shards else (note if backend is not None else warning)
            yield report(
                "generate-on-one-rank",
                where,
                f"{call.name}() is reached by one rank only ({guard}): a sharded model gathers in forward, "
                "and the "
                "other ranks never come",
                "generate on every rank (synced_gpus=True under ZeRO-3), and print on one",
            )
        elif call.last == "save_pretrained" and shards and backend and "state_dict" not in call.kwargs:
            if "tok" in call.owner or "process" in call.owner or "config" in call.owner:
                continue
            yield error(
                "save-on-one-rank",
                where,
                f"{call.name}() is reached by one rank only ({guard}), where {backend.label} left it shards "
                "or "
                "placeholders",
                "state_dict=accelerator.get_state_dict(model) on every rank first, then "
                "save_pretrained(state_dict=…)",
            )


def _meets(call: Call, script: Script) -> bool:
    if call.last not in _COLLECTIVE:
        return False
    owner = call.owner.rsplit(".", 1)[-1]
    if call.last in ("evaluate", "predict"):
        return script.is_trainer(call.owner)
    if call.last in ("barrier", "all_reduce", "all_gather", "reduce_scatter", "reduce"):
        return owner in ("dist", "distributed", "accelerator", "comm") or call.last not in (
            "reduce",
            "all_gather",
        )
    if call.last == "gather":
        return "accelerator" in call.owner or owner in ("dist", "distributed")
    return not _PLAIN_OWNERS.search(owner)


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
        visible = shell.variables.get("CUDA_VISIBLE_DEVICES")
        if visible:
            gpus = max(gpus, len([part for part in visible[0].text.split(",") if part.strip().isdigit()]))
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


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
