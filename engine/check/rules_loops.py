"""Checks of loops that people write themselves, on DDP or on an Accelerator."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ftdash.engine.check.bindings import dotted
from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Document, Kind
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.pyscript import Call, Script
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_values import unknown_value

_WRAPPERS = ("DistributedDataParallel", "DDP")


def _wrapped(bundle: Bundle) -> Iterator[tuple[Document, Script, list[Call]]]:
    """Scripts that wrap a model in DDP by hand, with those calls."""
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        # The name alone may be anything's: torch's stands behind an import.
        wraps = [call for call in script.named(*_WRAPPERS) if "torch" in script.imports]
        if wraps and not any(script.named("Accelerator", "prepare")):
            yield document, script, wraps


@check
def own_device_of_each_rank(bundle: Bundle) -> Iterator[Finding]:
    """Without a device of its own every rank works on GPU 0."""
    for document, script, wraps in _wrapped(bundle):
        for call in wraps:
            ids = call.kwargs.get("device_ids")
            if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], int):
                yield error(
                    "one-device-for-all",
                    document.at(call.line),
                    f"device_ids=[{ids[0]}] in every rank: all of them work on GPU {ids[0]}",
                    'device_ids=[int(os.environ["LOCAL_RANK"])]',
                )
        sets = any(script.named("set_device", "set_device_index", "device")) or "cuda:" in document.text
        bare = [call for call in script.named("cuda") if not call.args and not call.kwargs]
        if bare and not sets and "CUDA_VISIBLE_DEVICES" not in document.text:
            yield error(
                "one-device-for-all",
                document.at(bare[0].line),
                f"{bare[0].name}() without torch.cuda.set_device: every rank puts its model on GPU 0",
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before it',
            )


@check
def process_group(bundle: Bundle) -> Iterator[Finding]:
    for document, _, wraps in _wrapped(bundle):
        if not re.search(
            r"init_process_group|init_distributed|init_device_mesh|from .*import \*", document.text
        ):
            local = re.search(r"^from (?!torch|os|sys|time|math|json|typing|argparse)", document.text, re.M)
            yield (note if local else error)(
                "no-process-group",
                document.at(wraps[0].line),
                "a model is wrapped in DDP, and no process group is made here before it",
                'torch.distributed.init_process_group("nccl") first',
            )


@check
def sampler_and_shuffle(bundle: Bundle) -> Iterator[Finding]:
    """torch's DataLoader refuses both at once."""
    for document, _, call in bundle.script_calls():
        sampler = any(
            word.arg == "sampler" and not (isinstance(word.value, ast.Constant) and word.value.value is None)
            for word in call.node.keywords
        )
        given = {word.arg: word.value for word in call.node.keywords if word.arg}
        shuffle = given.get("shuffle")
        if (
            call.last == "DataLoader"
            and sampler
            and isinstance(shuffle, ast.Constant)
            and shuffle.value is True
        ):
            yield error(
                "sampler-and-shuffle",
                document.at(call.line),
                "DataLoader takes a sampler or shuffle=True, not both",
                "remove shuffle: the sampler shuffles",
            )


@check
def accelerator_precision(bundle: Bundle) -> Iterator[Finding]:
    for document, _, made in _accelerated(bundle):
        for word in made.node.keywords:
            if word.arg == "mixed_precision" and isinstance(word.value, ast.Constant):
                known = ("no", "fp16", "bf16", "fp8")
                if word.value.value not in (None, *known):
                    yield unknown_value(document.at(made.line), word.arg, word.value.value, known)


@check
def own_data_of_each_rank(bundle: Bundle) -> Iterator[Finding]:
    """DDP averages gradients; dividing the data is the sampler's work (torch's DistributedSampler)."""
    for document, script, _ in _wrapped(bundle):
        divides = ("IterableDataset", "split_dataset_by_node", ".shard(")
        for call in script.named("DataLoader"):
            names = {word.arg for word in call.node.keywords}
            shuffled = call.kwargs.get("shuffle") is True
            if names & {"sampler", "batch_sampler", None} or not shuffled:
                continue
            if any(word in document.text for word in divides):
                continue
            yield warning(
                "same-data-on-every-rank",
                document.at(call.line),
                "a DataLoader without a DistributedSampler under DDP: every rank goes through all of the "
                "data",
                "sampler=DistributedSampler(dataset), and shuffle=False",
            )
        yield from _epochs(document, script)


def _epochs(document: Document, script: Script) -> Iterator[Finding]:
    samplers = [
        call for call in script.named("DistributedSampler") if call.kwargs.get("shuffle", True) is not False
    ]
    epochs = [
        node
        for node in ast.walk(script.tree)
        if isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and "epoch" in node.target.id.lower()
    ]
    if samplers and epochs and not any(script.named("set_epoch")):
        yield warning(
            "same-order-every-epoch",
            document.at(samplers[0].line),
            "DistributedSampler shuffles by its epoch, and set_epoch() is never called: every epoch has "
            "the same "
            "order",
            f"sampler.set_epoch({epochs[0].target.id}) at the start of each epoch",  # type: ignore[attr-defined]
        )


@check
def names_of_a_wrapped_model(bundle: Bundle) -> Iterator[Finding]:
    for document, script, wraps in _wrapped(bundle):
        names = {call.target for call in wraps if call.target}
        for call in script.named("save"):
            state = call.node.args[0] if call.node.args else None
            held = dotted(state.func) if isinstance(state, ast.Call) else ""
            if held.removesuffix(".state_dict") in names and held.endswith(".state_dict"):
                owner = held.removesuffix(".state_dict")
                yield warning(
                    "wrapped-names-saved",
                    document.at(call.line),
                    f"{owner} is DDP's wrapper: every key of what is saved begins with 'module.', and the "
                    "plain "
                    "model does not load it",
                    f"{owner}.module.state_dict()",
                )


def _accelerated(bundle: Bundle) -> Iterator[tuple[Document, Script, Call]]:
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        if made := next(script.named("Accelerator"), None):
            yield document, script, made


@check
def backward_of_the_accelerator(bundle: Bundle) -> Iterator[Finding]:
    """accelerator.backward divides by the accumulation, scales for fp16 and steps DeepSpeed's engine."""
    for document, script, made in _accelerated(bundle):
        calls = list(script.named("backward"))
        if not calls or any(call.args or call.kwargs for call in calls):
            continue  # accelerator.backward(loss), in whatever name the accelerator is held
        yield warning(
            "backward-past-accelerator",
            document.at(calls[0].line),
            f"{calls[0].name}() beside an Accelerator (line {made.line}): neither accumulation nor loss "
            "scaling "
            "nor DeepSpeed hear of it",
            "accelerator.backward(loss)",
        )


@check
def optimizer_not_prepared(bundle: Bundle) -> Iterator[Finding]:
    """An optimizer made before the model is sharded holds the parameters of before."""
    for document, script, _ in _accelerated(bundle):
        prepared = {
            dotted(argument.value if isinstance(argument, ast.Starred) else argument)
            for call in script.named("prepare", "prepare_optimizer")
            for argument in call.node.args
        }
        if not prepared:
            continue
        steps = {call.owner for call in script.named("step")}
        for call in script.calls:
            torch_optimizer = "optim" in call.owner or call.last in ("AdamW", "Adam", "SGD", "AdamW8bit")
            if torch_optimizer and call.target in steps - prepared and call.args:
                yield error(
                    "optimizer-not-prepared",
                    document.at(call.line),
                    f"{call.target} is not handed to accelerator.prepare(): it steps parameters of before "
                    "the model "
                    "was wrapped, on every micro-step",
                    f"prepare(model, {call.target}, ...)",
                )


@check
def accumulation_not_entered(bundle: Bundle) -> Iterator[Finding]:
    """gradient_accumulation_steps counts inside `with accelerator.accumulate(model)` only."""
    for document, script, made in _accelerated(bundle):
        steps = made.kwargs.get("gradient_accumulation_steps")
        if not isinstance(steps, int) or steps < 2:
            continue
        if not any(script.named("backward")) or any(
            script.named("accumulate", "no_sync", "join_uneven_inputs")
        ):
            continue
        yield warning(
            "accumulation-not-entered",
            document.at(made.line),
            f"gradient_accumulation_steps={steps}, and accelerator.accumulate() is never entered: the loss "
            "is "
            f"divided by {steps} and the optimizer steps every time",
            "with accelerator.accumulate(model): around the micro-step",
        )


@check
def clipping_past_the_accelerator(bundle: Bundle) -> Iterator[Finding]:
    for document, script, made in _accelerated(bundle):
        if any(script.named("unscale_gradients")):
            continue
        for call in script.named("clip_grad_norm_"):
            if "nn.utils" in call.owner:
                yield warning(
                    "clipping-past-accelerator",
                    document.at(call.line),
                    f"torch's clip_grad_norm_ beside an Accelerator (line {made.line}): it clips gradients "
                    "that "
                    "fp16 has scaled, and of FSDP's shards each rank its own",
                    "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
                )
