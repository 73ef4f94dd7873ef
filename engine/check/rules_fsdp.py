"""Checks of FSDP sections: version and flags, wrapping, state dicts, recomputation, loading."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import partial

from ftdash.engine.check.bundle import Bundle, is_false, is_true
from ftdash.engine.check.documents import Kind, Sourced, words
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.pyscript import UNKNOWN
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_values import unknown_value

FSDP1_ONLY = {
    "sharding_strategy": "write fsdp_reshard_after_forward instead",
    "use_orig_params": "remove it: FSDP2 always keeps the original parameters",
    "backward_prefetch": "remove it: FSDP2 always prefetches like BACKWARD_PRE",
    "backward_prefetch_policy": "remove it: FSDP2 always prefetches like BACKWARD_PRE",
    "forward_prefetch": "remove it: accelerate has none under FSDP2",
    "sync_module_states": "remove it: FSDP2 needs none",
    "limit_all_gathers": "remove it: FSDP2 always limits them",
}
_KEYS = frozenset(FSDP1_ONLY) | words(
    "version reshard_after_forward auto_wrap_policy transformer_layer_cls_to_wrap "
    "cpu_ram_efficient_loading state_dict_type offload_params activation_checkpointing "
    "activation_checkpointing_offload min_num_params ignored_modules ignored_params final_state_dict_type "
    "cpu_offload cpu_offload_pin_memory mixed_precision_policy xla xla_fsdp_v2 xla_fsdp_settings "
    "xla_fsdp_grad_ckpt transformer_cls_names_to_wrap param_init_fn"
)


def _sections(bundle: Bundle) -> Iterator[tuple[Callable[[str], str], dict[str, object]]]:
    """Every FSDP section: where a key of it stands, and its values."""
    for document in bundle.documents:
        if document.kind in (Kind.ACCELERATE, Kind.AXOLOTL, Kind.TRAINER):
            if document.kind is Kind.ACCELERATE and document.distributed_type != "FSDP":
                continue
            if section := document.section("fsdp_config"):
                yield partial(document.where, "fsdp_config"), section
        elif document.kind is Kind.FSDP:
            yield document.where, document.data
    for document, call in bundle.argument_calls():
        config = call.kwargs.get("fsdp_config")
        if isinstance(config, dict):
            known = {str(key): value for key, value in config.items() if value is not UNKNOWN}
            yield partial(_always, document.at(call.line)), known
    for document, shell, launch in bundle.launches():
        given = {
            text.split("=")[0].lstrip("-").replace("-", "_"): launch.option(text.split("=")[0])
            for text in launch.argv
            if text.startswith("--fsdp_")
        }
        if launch.launcher == "accelerate" and given:
            values = {key: shell.expand(value or "") for key, value in given.items()}
            yield partial(_always, document.at(launch.line)), dict(values)


def _always(where: str, _key: str) -> str:
    return where


def _bare(key: str) -> str:
    return key.removeprefix("fsdp_")


def is_hybrid(strategy: object) -> bool:
    """HYBRID_SHARD and its ZERO2 form, by name or by torch's number (ShardingStrategy)."""
    return "HYBRID" in str(strategy).upper() or str(strategy) in ("4", "5")


@check
def fsdp1_flags_under_version_2(bundle: Bundle) -> Iterator[Finding]:
    """Flags that FSDP2 has not are dropped (huggingface/accelerate#3394, #3923)."""
    if bundle.backend is None or bundle.backend.name != "fsdp2":
        return
    for locate, section in _sections(bundle):
        for key, value in section.items():
            where = locate(key)
            name = _bare(key)
            if name == "sharding_strategy" and is_hybrid(value):
                yield error(
                    "fsdp2-hybrid-shard-lost",
                    where,
                    f"{key}: {value} is dropped under fsdp_version 2: the run shards over all ranks, across "
                    "nodes",
                    "add parallelism_config with dp_replicate_size (nodes) and dp_shard_size (ranks of a "
                    "node)",
                )
            elif name == "sync_module_states" and str(value).lower() == "false":
                if is_true(bundle.fsdp_option("cpu_ram_efficient_loading")):
                    yield error(
                        "fsdp2-old-flag",
                        where,
                        f"{key}: false with fsdp_cpu_ram_efficient_loading: true is refused by accelerate "
                        "launch",
                        FSDP1_ONLY[name],
                    )
            elif name in FSDP1_ONLY and value is not None:
                yield warning(
                    "fsdp2-old-flag",
                    where,
                    f"{key}: {value} belongs to FSDP1 and is dropped under fsdp_version 2",
                    FSDP1_ONLY[name],
                )
            elif name == "reshard_after_forward" and str(value).lower() not in ("true", "false"):
                yield error(
                    "fsdp2-reshard-value",
                    where,
                    f"{key}: {value} is FSDP1's spelling; fsdp_version 2 takes true or false",
                    "true frees gathered layers after forward (FULL_SHARD), false keeps them (SHARD_GRAD_OP)",
                )


@check
def fsdp2_keys_under_version_1(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.ACCELERATE):
        section = document.section("fsdp_config")
        if document.distributed_type != "FSDP" or not section:
            continue
        version = document.get("fsdp_config", "fsdp_version")
        if version and str(version.value) == "2":
            continue
        reshard = document.get("fsdp_config", "fsdp_reshard_after_forward")
        # `accelerate config` writes the strategy's name under this key for FSDP1 too.
        if reshard and str(reshard.value).lower() in ("true", "false"):
            yield error(
                "fsdp2-keys-without-version",
                reshard.where,
                f"fsdp_reshard_after_forward: {reshard.value} without fsdp_version: 2: accelerate defaults "
                "to "
                "version 1, which ignores it",
                "add fsdp_version: 2 to fsdp_config",
            )
        elif version is None:
            yield note(
                "fsdp-version-unset",
                document.where("fsdp_config"),
                "fsdp_version is not set, so accelerate takes version 1, which torch has deprecated",
                "convert it: ftdash configs --convert FILE",
            )


@check
def renamed_prefetch(bundle: Bundle) -> Iterator[Finding]:
    if bundle.backend is None or bundle.backend.name != "fsdp1":
        return
    for locate, section in _sections(bundle):
        for key in section:
            if _bare(key) == "backward_prefetch_policy":
                yield warning(
                    "fsdp-renamed-key",
                    locate(key),
                    f"{key} was renamed: accelerate ignores it",
                    "write fsdp_backward_prefetch",
                )


@check
def unknown_fsdp_keys(bundle: Bundle) -> Iterator[Finding]:
    for locate, section in _sections(bundle):
        for key in section:
            if _bare(key) not in _KEYS:
                near = difflib.get_close_matches(_bare(key), _KEYS, 1, 0.8)
                hint = f"did you mean fsdp_{near[0]}?" if near else "remove it, or check its spelling"
                yield warning(
                    "fsdp-unknown-key",
                    locate(key),
                    f"{key} is no FSDP option of accelerate: it is ignored without a word",
                    hint,
                )


# accelerate/utils/constants.py; torch's ShardingStrategy by number. LOCAL_STATE_DICT is FSDP1's only.
_STRATEGIES = words("FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2 1 2 3 4 5")
_VALUES = {
    "version": words("1 2"),
    "auto_wrap_policy": words("TRANSFORMER_BASED_WRAP SIZE_BASED_WRAP NO_WRAP"),
    "state_dict_type": words("FULL_STATE_DICT SHARDED_STATE_DICT LOCAL_STATE_DICT"),
    "sharding_strategy": _STRATEGIES,
    "backward_prefetch": words("BACKWARD_PRE BACKWARD_POST NO_PREFETCH NONE"),
}


@check
def fsdp_values(bundle: Bundle) -> Iterator[Finding]:
    second = bundle.backend is not None and bundle.backend.name == "fsdp2"
    for locate, section in _sections(bundle):
        for key, value in section.items():
            known = _VALUES.get(_bare(key))
            if known is None or value is None or isinstance(value, dict | list) or "$" in str(value):
                continue
            if second and _bare(key) == "state_dict_type":
                known -= {"LOCAL_STATE_DICT"}
            if str(value).upper() not in known:
                yield unknown_value(locate(key), key, value, known)


@check
def wrapping(bundle: Bundle) -> Iterator[Finding]:
    if bundle.backend is None or not bundle.backend.name.startswith("fsdp"):
        return
    policy = bundle.fsdp_option("auto_wrap_policy")
    if policy and str(policy.value).upper() == "NO_WRAP":
        yield warning(
            "fsdp-no-wrap",
            policy.where,
            "NO_WRAP makes the whole model one unit: every rank gathers all of it at once",
            "use TRANSFORMER_BASED_WRAP with the decoder layer class",
        )
    wrapped = bundle.fsdp_option("transformer_layer_cls_to_wrap")
    if wrapped is None or bundle.model is None or not bundle.model[0].layer_class:
        return
    names = wrapped.value if isinstance(wrapped.value, list) else str(wrapped.value).split(",")
    names = [str(name).strip() for name in names if str(name).strip()]
    shape, named_at = bundle.model
    if names and all(not _belongs(name, shape.layer_class) for name in names):
        yield error(
            "fsdp-wrong-layer-class",
            wrapped.where,
            f"{', '.join(names)} is no layer of {shape.name} ({named_at}), whose layer is "
            f"{shape.layer_class}",
            f"fsdp_transformer_layer_cls_to_wrap: {shape.layer_class}",
        )


def _belongs(name: str, layer_class: str) -> bool:
    """A class of the same model family: its own layer, or another module of it such as its attention."""
    family = layer_class.removesuffix("DecoderLayer").removesuffix("Block").removesuffix("Layer")
    return name == layer_class or name.startswith(family)


@check
def checkpointing_twice(bundle: Bundle) -> Iterator[Finding]:
    """The trainer refuses its own recomputation on top of FSDP's."""
    ours = bundle.fsdp_option("activation_checkpointing")
    theirs = bundle.argument("gradient_checkpointing", "activation_checkpointing")
    if is_true(ours) and is_true(theirs) and ours and theirs:
        # Axolotl drops one of the two by itself.
        yield (note if bundle.of(Kind.AXOLOTL) else error)(
            "checkpointing-twice",
            theirs.where,
            f"activation checkpointing is on twice: in fsdp_config ({ours.where}) and in the trainer's "
            "arguments",
            "keep fsdp_activation_checkpointing, and set the trainer's own to False",
        )


@check
def sharded_save_writes_nothing(bundle: Bundle) -> Iterator[Finding]:
    """Under SHARDED_STATE_DICT, trainer.save_model() writes no model and raises nothing."""
    if bundle.backend is None or not bundle.backend.name.startswith("fsdp"):
        return
    kind = bundle.fsdp_option("state_dict_type")
    if kind is None or "SHARDED" not in str(kind.value).upper():
        return
    for document, script, call in bundle.script_calls():
        full = any(
            other.last == "set_state_dict_type"
            and "FULL" in str((*other.args, *other.kwargs.values())).upper()
            for other in script.calls
        )
        if call.last == "save_model" and not full:
            yield warning(
                "save-model-writes-nothing",
                document.at(call.line),
                f"{call.name}() writes no model under SHARDED_STATE_DICT ({kind.where}), without an error",
                'call trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT") before '
                "it, "
                "or merge a checkpoint: ftdash checkpoint convert",
            )


@check
def full_state_dict_of_large_model(bundle: Bundle) -> Iterator[Finding]:
    """Gathering a large model to rank 0 is where runs die at their first save (pytorch/pytorch#110479)."""
    kind = bundle.fsdp_option("state_dict_type")
    if kind is None or bundle.model is None or "FULL" not in str(kind.value).upper():
        return
    shape = bundle.model[0]
    gathered = 2 * shape.total_params
    if gathered > 40e9:
        yield warning(
            "save-gathers-whole-model",
            kind.where,
            f"FULL_STATE_DICT gathers all of {shape.name} ({gathered / 2**30:.0f} GiB in bf16, twice that "
            "in fp32) "
            "in rank 0's host memory at every save",
            "use SHARDED_STATE_DICT, and merge once at the end: ftdash checkpoint convert",
        )


@check
def adapter_save_gathers_base(bundle: Bundle) -> Iterator[Finding]:
    """Under ZeRO-3 the 16-bit gather collects the frozen base to save a small adapter (FastChat#1457)."""
    backend = bundle.backend
    if backend is None or backend.stage != 3 or bundle.adapters is None or bundle.model is None:
        return
    shape = bundle.model[0]
    for document in bundle.of(Kind.DEEPSPEED):
        found = document.get("zero_optimization", "stage3_gather_16bit_weights_on_model_save")
        if is_true(found) and found and 2 * shape.total_params > 40e9:
            yield warning(
                "save-gathers-whole-model",
                found.where,
                f"each save gathers all of {shape.name} ({2 * shape.total_params / 2**30:.0f} GiB in bf16) "
                "on rank "
                "0, though only adapters are kept",
                "set it to false and convert the last checkpoint, or plan the host memory",
            )


@check
def every_rank_loads(bundle: Bundle) -> Iterator[Finding]:
    """Without RAM-efficient loading every local rank reads the whole model (transformers#25107)."""
    found = bundle.fsdp_option("cpu_ram_efficient_loading")
    if not is_false(found) or found is None:
        return
    size, report = "", note
    if bundle.model:
        weights = 2 * bundle.model[0].total_params
        ranks = bundle.world.value if bundle.world else 1
        size = f": {weights / 2**30:.0f} GiB in bf16 for each of {ranks}"
        report = warning if weights * ranks > 400e9 else note
    yield report(
        "every-rank-loads",
        found.where,
        "cpu_ram_efficient_loading is off: every rank of a node reads the whole model into host "
        f"memory{size}",
        "set fsdp_cpu_ram_efficient_loading: true",
    )


@check
def offload_with_efficient_config(bundle: Bundle) -> Iterator[Finding]:
    """Axolotl and others: FSDP and DeepSpeed at once."""
    for document in bundle.of(Kind.AXOLOTL):
        fsdp = document.get("fsdp") or document.get("fsdp_config")
        deepspeed = document.get("deepspeed")
        if fsdp and deepspeed and fsdp.value:
            yield error(
                "two-backends",
                deepspeed.where,
                f"deepspeed and fsdp ({fsdp.where}) are both set",
                "keep one of them",
            )
    arguments: tuple[Sourced | None, Sourced | None] = (bundle.argument("fsdp"), bundle.argument("deepspeed"))
    fsdp, deepspeed = arguments
    if fsdp and deepspeed and fsdp.value and deepspeed.value and not bundle.of(Kind.AXOLOTL):
        yield error(
            "two-backends",
            deepspeed.where,
            f"deepspeed and fsdp ({fsdp.where}) are both set",
            "keep one of them",
        )


@check
def efficient_loading(bundle: Bundle) -> Iterator[Finding]:
    """Only rank 0 reads the weights: the others get theirs when FSDP1 synchronises module states."""
    if bundle.backend is None or bundle.backend.name != "fsdp1":
        return
    loads, syncs = bundle.fsdp_option("cpu_ram_efficient_loading"), bundle.fsdp_option("sync_module_states")
    if is_true(loads) and loads and is_false(syncs) and syncs:
        yield error(
            "efficient-loading-unsynchronised",
            syncs.where,
            f"fsdp_sync_module_states is false, and fsdp_cpu_ram_efficient_loading ({loads.where}) leaves "
            "every "
            "rank but the first with empty weights: accelerate refuses both",
            "fsdp_sync_module_states: true",
        )
