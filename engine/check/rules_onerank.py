"""Checks of what one rank alone reaches: calls that meet the other ranks there wait for ever."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from ftdash.engine.check.backend import Backend
from ftdash.engine.check.bundle import Bundle
from ftdash.engine.check.documents import Kind, words
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.objects import Role
from ftdash.engine.check.reach import Reach, Reached
from ftdash.engine.check.registry import check

_DIST = words(
    "barrier monitored_barrier all_reduce all_gather all_gather_object all_gather_into_tensor broadcast "
    "broadcast_object_list reduce reduce_scatter reduce_scatter_tensor gather gather_object scatter "
    "scatter_object_list all_to_all all_to_all_single new_group all_reduce_coalesced all_gather_coalesced"
)
_DIST_MODULES = ("torch.distributed.", "deepspeed.comm.", "torch.distributed.distributed_c10d.")
_ACCELERATE = words(
    "gather gather_object broadcast broadcast_object_list reduce pad_across_processes wait_for_everyone"
)
# Written without a module whose name is known: only names that mean nothing else.
_DIST_BY_NAME = words(
    "all_reduce all_gather_object all_gather_into_tensor reduce_scatter broadcast_object_list "
    "wait_for_everyone barrier"
)
_BARRIERS = words("barrier monitored_barrier wait_for_everyone synchronize")
_TRAINER = words("train evaluate predict evaluation_loop prediction_loop hyperparameter_search")
_TRAINER_SAVES = words("save_model push_to_hub get_state_dict")
_ACCELERATOR = words(
    "gather gather_for_metrics reduce pad_across_processes wait_for_everyone backward check_trigger "
    "main_process_first local_main_process_first"
)
_ACCELERATOR_SAVES = words("save_state save_model get_state_dict load_state clip_grad_norm_")
_STATE = words("wait_for_everyone main_process_first local_main_process_first")
_ENGINE = words(
    "save_checkpoint load_checkpoint save_16bit_model train_batch eval_batch backward step save_fp16_model"
)
_SHARDED_CHECKPOINT = words(
    "get_model_state_dict get_state_dict get_optimizer_state_dict set_model_state_dict "
    "set_state_dict set_optimizer_state_dict full_optim_state_dict optim_state_dict"
)
_GATHERED = (
    "GatheredParameters",
    "summon_full_params",
    "state_dict_type",
    "unshard_model",
    "unwrap_model_for",
)
_UNSHARDED_BRANCH = re.compile(r"^else of (?!not ).*(fsdp|deepspeed|zero_?3|shard)", re.IGNORECASE)
_SHARDS_NOW = words("train prepare prepare_model fully_shard FSDP FullyShardedDataParallel initialize")


class _Meets(StrEnum):
    ALWAYS = "collective-on-one-rank"
    WHEN_SAVING_SHARDS = "save-on-one-rank"
    WHEN_GENERATING = "generate-on-one-rank"


@dataclass(frozen=True, slots=True)
class _Kind:
    meets: _Meets
    only_sharded: bool = False  # not worth a word while every rank has the whole model
    by_name: bool = False  # nothing but its name or annotation says what the object is


@check
def one_rank_only(bundle: Bundle) -> Iterator[Finding]:
    """A collective that one rank enters hangs it: saving a sharded model, evaluating, gathering.

    Seen in kyuz0/amd-strix-halo-llm-finetuning#6, pytorch/pytorch#143536, huggingface/transformers#31532.
    """
    for document in bundle.of(Kind.SCRIPT):
        reach = Reach(bundle.scripts[document.path].tree)
        told: set[tuple[int, str]] = set()
        for call in reach.calls:
            if not call.one_rank or (call.node.lineno, call.last) in told:
                continue
            kind = _kind(call, reach, bundle.backend)
            if kind is None or _met_by_the_others(call, reach):
                continue
            told.add((call.node.lineno, call.last))
            yield from _finding(call, kind, bundle.backend, document.at(call.node.lineno))


def _finding(call: Reached, kind: _Kind, backend: Backend | None, where: str) -> Iterator[Finding]:
    name, guard = call.name, _short(call.guard)
    shards = backend is not None and backend.shards
    if kind.only_sharded and not shards:
        return
    report = (warning if kind.by_name else error) if shards else (note if backend is not None else warning)
    if kind.meets is _Meets.ALWAYS:
        yield error(
            str(kind.meets),
            where,
            f"{name}() is reached by one rank only ({guard}), and waits there for the others",
            "call it on every rank; keep only printing and logging under the condition",
        )
    elif kind.meets is _Meets.WHEN_GENERATING:
        yield report(
            str(kind.meets),
            where,
            f"{name}() is reached by one rank only ({guard}): a sharded model gathers in forward, and the "
            "other ranks never come",
            "generate on every rank (synced_gpus=True under ZeRO-3), and print on one",
        )
    elif call.last in ("save_pretrained", "state_dict") and backend is not None:
        yield report(
            str(kind.meets),
            where,
            f"{name}() is reached by one rank only ({guard}), where {backend.label} left it shards or "
            "placeholders",
            "state_dict=accelerator.get_state_dict(model) on every rank first, then "
            "save_pretrained(state_dict=…)",
        )
    else:
        effect = (
            f"under {backend.label} it gathers shards, and the other ranks never come"
            if shards and backend is not None
            else "it hangs as soon as the model is sharded (FSDP, ZeRO-3)"
        )
        yield report(
            str(kind.meets),
            where,
            f"{name}() is reached by one rank only ({guard}): {effect}",
            "call it on every rank: it writes where it must",
        )


def _kind(call: Reached, reach: Reach, backend: Backend | None) -> _Kind | None:
    """How a call meets the other ranks, by what its owner is; None when it does not, or nobody can tell."""
    path = reach.objects.path(call.node.func)
    if found := _by_module(path, call):
        return found
    if call.owner is None:
        return _forward(call, reach)
    if reach.objects.function_of(call.node.func, call.scope) is not None:
        return None  # a method of the script: its own calls are judged
    owner = reach.objects.role(call.owner, call.scope)
    if owner.alone:
        return None
    role = owner.role if owner.role is not Role.UNKNOWN else _by_name(call.owner)
    if role is Role.TRAINER:
        if owner.role is Role.UNKNOWN and call.last == "train":
            return None  # what else trains is often called a trainer, and not by every rank
        return _listed(call.last, _TRAINER, _TRAINER_SAVES)
    if role is Role.ACCELERATOR:
        return _listed(call.last, _ACCELERATOR, _ACCELERATOR_SAVES)
    if role is Role.STATE:
        return _listed(call.last, _STATE, frozenset())
    if role in (Role.MODEL, Role.ENGINE):
        found = _of_model(call, role, backend)
        if found is None or (found.only_sharded and _before_sharding(call, reach, backend)):
            return None
        return replace(found, by_name=owner.role is Role.UNKNOWN or owner.declared)
    if call.last == "full_tensor":
        return _Kind(_Meets.ALWAYS)
    if (
        owner.role is Role.UNKNOWN
        and call.last in _DIST_BY_NAME
        and "." not in path.removesuffix(f".{call.last}")
    ):
        return _Kind(_Meets.ALWAYS)
    return None


def _by_module(path: str, call: Reached) -> _Kind | None:
    """Functions of torch.distributed, DeepSpeed and accelerate, by the module they are imported from."""
    module, _, last = path.rpartition(".")
    if last in _DIST and path.startswith(_DIST_MODULES):
        return None if _in_a_group(call) else _Kind(_Meets.ALWAYS)
    if path.startswith("torch.distributed.checkpoint."):
        if last in ("save", "load", "async_save", "save_state_dict", "load_state_dict"):
            return _Kind(_Meets.ALWAYS)
        return _Kind(_Meets.WHEN_SAVING_SHARDS, True) if last in _SHARDED_CHECKPOINT else None
    if path.startswith("accelerate.") and last in _ACCELERATE:
        return _Kind(_Meets.ALWAYS)
    if last in ("GatheredParameters", "summon_full_params"):
        return _Kind(_Meets.WHEN_SAVING_SHARDS, True)
    if not module and last in _DIST_BY_NAME:
        return _Kind(_Meets.ALWAYS)
    return None


def _in_a_group(call: Reached) -> bool:
    """Whether the collective names a process group of its own, which the condition may belong to."""
    return any(
        keyword.arg == "group"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        for keyword in call.node.keywords
    )


def _by_name(owner: ast.expr) -> Role:
    """What an object that nothing in the script tells about is, by the last part of its name."""
    text = ast.unparse(owner)
    last = text.rsplit(".", 1)[-1].lower()
    if last.endswith("trainer") and "token" not in last:
        return Role.TRAINER
    if last.endswith("accelerator"):
        return Role.ACCELERATOR
    if last in ("model_engine", "ds_engine", "deepspeed_engine"):
        return Role.ENGINE
    if last == "model" or (last.endswith("_model") and "ema" not in last) or last in ("fsdp_model", "policy"):
        return Role.MODEL
    return Role.UNKNOWN


def _listed(name: str, always: frozenset[str], sharded: frozenset[str]) -> _Kind | None:
    if name in always:
        return _Kind(_Meets.ALWAYS)
    return _Kind(_Meets.WHEN_SAVING_SHARDS) if name in sharded else None


def _of_model(call: Reached, role: Role, backend: Backend | None) -> _Kind | None:
    if role is Role.ENGINE and call.last in _ENGINE:
        return _Kind(_Meets.ALWAYS)
    if _whole_here(call):
        return None
    if call.last == "generate":
        return _Kind(_Meets.WHEN_GENERATING)
    if call.last == "save_pretrained":
        whole = any(keyword.arg == "state_dict" for keyword in call.node.keywords)
        return None if whole else _Kind(_Meets.WHEN_SAVING_SHARDS, True)
    if call.last == "state_dict" and backend is not None and backend.name == "fsdp1":
        return _Kind(_Meets.WHEN_SAVING_SHARDS, True)
    return None


def _whole_here(call: Reached) -> bool:
    """Whether the weights are gathered around the call, or it stands in the branch of unsharded models."""
    return any(
        _UNSHARDED_BRANCH.search(context) or any(name in context for name in _GATHERED)
        for context in call.within
    )


def _before_sharding(call: Reached, reach: Reach, backend: Backend | None) -> bool:
    """FSDP shards when the model is wrapped or training starts; ZeRO-3 already when it is loaded."""
    if backend is None or not backend.name.startswith("fsdp"):
        return False
    sharding = [index for index, other in enumerate(reach.calls) if other.last in _SHARDS_NOW]
    return bool(sharding) and reach.calls.index(call) < sharding[0]


def _forward(call: Reached, reach: Reach) -> _Kind | None:
    """`model(batch)`: the forward of a sharded model gathers its weights layer by layer."""
    named = isinstance(call.node.func, ast.Name) and call.last not in reach.objects.imports
    if not named or not (call.node.args or call.node.keywords) or _whole_here(call):
        return None
    found = reach.objects.role(call.node.func, call.scope)
    sharded = found.role in (Role.MODEL, Role.ENGINE) and not found.alone
    return _Kind(_Meets.WHEN_GENERATING, True) if sharded else None


def _met_by_the_others(call: Reached, reach: Reach) -> bool:
    """Whether the other branch makes the same call: a broadcast's two sides, one rank that goes first."""
    same = _BARRIERS if call.last in _BARRIERS else {call.last}
    return any(other.last in same and other.guard.startswith("!") for other in reach.calls)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
