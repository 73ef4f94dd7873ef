"""Checks of LoRA and quantised bases: storage dtypes, recomputation, adapters under sharding, versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftdash.engine.check.bundle import Bundle, call_option, dtype_name, is_false, is_true
from ftdash.engine.check.documents import Kind, Sourced
from ftdash.engine.check.findings import Finding, error, note, warning
from ftdash.engine.check.pyscript import UNKNOWN
from ftdash.engine.check.registry import check


def _config_option(bundle: Bundle, *keys: str) -> Sourced | None:
    for kind in (Kind.AXOLOTL, Kind.TRAINER):
        for document in bundle.of(kind):
            if found := document.get(*keys):
                return found
    return None


def _four_bit(bundle: Bundle) -> Sourced | None:
    """Where 4-bit loading is asked for."""
    found = call_option(bundle, ("BitsAndBytesConfig", "from_pretrained"), "load_in_4bit")
    found = found or bundle.argument("load_in_4bit", "use_4bit")
    if found is None:
        return _bits(bundle, 4)
    return found if is_true(found) or found.value == "" else None


def _bits(bundle: Bundle, bits: int) -> Sourced | None:
    """LLaMA-Factory's quantization_bit, where it asks for so many."""
    found = bundle.argument("quantization_bit")
    return Sourced(True, found.where) if found and found.value == bits else None


def _model_dtype(bundle: Bundle) -> Sourced | None:
    return call_option(bundle, ("from_pretrained",), "dtype", "torch_dtype")


@check
def quant_storage(bundle: Bundle) -> Iterator[Finding]:
    """FSDP shards floating-point tensors: packed weights must be stored in the model's own dtype.

    Unequal dtypes are 'Must flatten tensors with uniform dtype' under FSDP1 (hiyouga/LlamaFactory#3853).
    """
    four_bit, backend = _four_bit(bundle), bundle.backend
    fsdp = backend is not None and backend.name.startswith("fsdp")
    storage = call_option(bundle, ("BitsAndBytesConfig",), "bnb_4bit_quant_storage") or bundle.argument(
        "bnb_4bit_quant_storage"
    )
    storage = storage or _config_option(bundle, "bnb_config_kwargs", "bnb_4bit_quant_storage")
    if four_bit is None or not (fsdp or storage):
        return
    version1 = backend is not None and backend.name == "fsdp1"
    report = error if version1 else warning
    stored = dtype_name(storage.value) if storage else "uint8"
    # Axolotl and LLaMA-Factory set the storage dtype themselves under FSDP.
    managed = bool(bundle.of(Kind.AXOLOTL)) or any(
        document.get("finetuning_type") for document in bundle.of(Kind.TRAINER)
    )
    if fsdp and stored in ("uint8", "int8") and not (managed and storage is None):
        effect = (
            "FSDP1 cannot flatten packed integers"
            if version1
            else "FSDP2 leaves packed integers whole on every rank: the quantised base is not sharded"
        )
        asked = (
            f"bnb_4bit_quant_storage {stored}" if storage else "4-bit weights in the default uint8 storage"
        )
        yield report(
            "quant-storage",
            (storage or four_bit).where,
            f"{asked} under {backend.label if backend else 'FSDP'}: {effect}",
            "bnb_4bit_quant_storage=torch.bfloat16, and the same dtype for the model",
        )
        return
    if storage is None or stored in ("uint8", "int8"):
        return
    dtype = _model_dtype(bundle)
    if dtype and dtype_name(dtype.value) not in (stored, "auto"):
        yield report(
            "quant-storage-dtype",
            dtype.where,
            f"the model's dtype is {dtype_name(dtype.value)}, the packed weights are stored as {stored} "
            f"({storage.where}): one FSDP unit needs one dtype",
            f"dtype=torch.{stored} in from_pretrained",
        )
    for name, other in (("fp16", "float16"), ("bf16", "bfloat16")):
        precision = bundle.argument(name)
        if is_true(precision) and precision and stored != other:
            yield report(
                "quant-storage-dtype",
                precision.where,
                f"{name} training with packed weights stored as {stored} ({storage.where})",
                f"store and train in one dtype: bnb_4bit_quant_storage=torch.{other}",
            )
    for document in bundle.of(Kind.ACCELERATE):
        mixed = document.get("mixed_precision")
        if mixed and dtype_name(mixed.value) in ("float16", "bfloat16") and dtype_name(mixed.value) != stored:
            yield report(
                "quant-storage-dtype",
                mixed.where,
                f"mixed_precision {mixed.value} with packed weights stored as {stored} ({storage.where})",
                f"mixed_precision and storage in one dtype: torch.{dtype_name(mixed.value)}",
            )


@check
def eight_bit_under_sharding(bundle: Bundle) -> Iterator[Finding]:
    found = call_option(bundle, ("BitsAndBytesConfig", "from_pretrained"), "load_in_8bit") or bundle.argument(
        "load_in_8bit"
    )
    found = found or _bits(bundle, 8)
    backend = bundle.backend
    if not is_true(found) or found is None or backend is None or not backend.shards:
        return
    # FSDP2 leaves integer parameters out of its groups; the other two stop on them. Axolotl has its own way.
    whole = backend.name == "fsdp2" or bool(bundle.of(Kind.AXOLOTL))
    yield (warning if whole else error)(
        "int8-under-sharding",
        found.where,
        f"8-bit weights are integers: {backend.label} ({backend.where}) "
        + ("keeps them whole on every rank" if whole else "cannot shard them"),
        "use 4-bit with bnb_4bit_quant_storage=torch.bfloat16, or an unquantised base",
    )


@check
def reentrant_checkpointing(bundle: Bundle) -> Iterator[Finding]:
    """DDP marks a LoRA parameter ready twice under re-entrant recomputation (peft#313, trl#921)."""
    kwargs = bundle.argument("gradient_checkpointing_kwargs")
    where, reentrant = "", None
    if kwargs and isinstance(kwargs.value, dict):
        where, reentrant = kwargs.where, kwargs.value.get("use_reentrant")
    direct = call_option(bundle, ("gradient_checkpointing_enable",), "gradient_checkpointing_kwargs")
    if direct and isinstance(direct.value, dict):
        where, reentrant = direct.where, direct.value.get("use_reentrant")
    if str(reentrant).lower() != "true" or bundle.adapters is None:
        return
    backend = bundle.backend
    if backend is not None and backend.name == "zero":
        return  # TRL itself turns it on for LoRA under ZeRO-3
    if (backend is not None and backend.name == "fsdp1") or (backend is None and not bundle.scripts):
        yield note(
            "use-reentrant",
            where,
            "use_reentrant=True with adapters: inputs need gradients, or the recomputed blocks learn nothing",
            'gradient_checkpointing_kwargs={"use_reentrant": False}',
        )
        return
    yield warning(
        "use-reentrant",
        where,
        "use_reentrant=True with adapters: DDP stops with 'mark a variable ready only once', and FSDP2 "
        "gathers twice",
        'gradient_checkpointing_kwargs={"use_reentrant": False}',
    )


@check
def unused_parameters(bundle: Bundle) -> Iterator[Finding]:
    found, recompute = (
        bundle.argument("ddp_find_unused_parameters"),
        bundle.argument("gradient_checkpointing"),
    )
    if not is_true(found) or not is_true(recompute) or found is None:
        return
    kwargs = bundle.argument("gradient_checkpointing_kwargs")
    plain = (
        kwargs and isinstance(kwargs.value, dict) and str(kwargs.value.get("use_reentrant")).lower() == "true"
    )
    yield (warning if plain else note)(
        "ddp-find-unused",
        found.where,
        "ddp_find_unused_parameters with gradient checkpointing: re-entrant blocks mark parameters ready "
        "twice",
        'ddp_find_unused_parameters=False, or gradient_checkpointing_kwargs={"use_reentrant": False}',
    )


@check
def adapters_behind_checkpoint_wrappers(bundle: Bundle) -> Iterator[Finding]:
    """FSDP's recomputation wraps layers, and PEFT 0.21.2 then finds no adapter to save in them.

    Seen on two gloo ranks: checkpoints and the final adapter are empty files, and nothing is said.
    """
    ours = bundle.fsdp_option("activation_checkpointing")
    backend = bundle.backend
    if not is_true(ours) or ours is None or bundle.adapters is None:
        return
    if backend is None or not backend.name.startswith("fsdp"):
        return
    peft = bundle.versions.get("peft")
    certain = peft is not None and peft.value.startswith("0.21.")
    # Axolotl brings its own PEFT release and its own way of saving.
    report = error if certain else note if bundle.of(Kind.AXOLOTL) else warning
    yield report(
        "adapter-saved-empty",
        ours.where,
        f"fsdp_activation_checkpointing with adapters ({bundle.adapters.where}): PEFT "
        f"{peft.value if peft else '0.21.2'} saves an empty adapter, without an error",
        "set it to false, and the trainer's gradient_checkpointing=True",
    )


@check
def adapter_switch_under_fsdp2(bundle: Bundle) -> Iterator[Finding]:
    """Changes of requires_grad must reach the shards (PEFT's FSDP guide)."""
    if bundle.backend is None or bundle.backend.name != "fsdp2":
        return
    for document, script, call in bundle.script_calls():
        if call.last not in ("set_adapter", "disable_adapter", "disable_adapters", "enable_adapters"):
            continue
        if any(other.last == "reshard" for other in script.calls):
            continue
        yield warning(
            "adapter-switch-fsdp2",
            document.at(call.line),
            f"{call.name}() under FSDP2 ({bundle.backend.where}) changes requires_grad on gathered "
            "parameters only",
            "call module.reshard() on every FSDP module after it",
        )


@check
def trained_embeddings(bundle: Bundle) -> Iterator[Finding]:
    """modules_to_save trains a full copy with gradient and optimizer state (huggingface/peft#2898)."""
    found = call_option(bundle, ("LoraConfig",), "modules_to_save") or _config_option(
        bundle, "lora_modules_to_save"
    )
    found = found or _config_option(bundle, "additional_target") or bundle.argument("lora_modules_to_save")
    if found is None:
        return
    names = found.value if isinstance(found.value, list) else str(found.value).split(",")
    wide = [str(name).strip() for name in names if str(name).strip() in ("embed_tokens", "lm_head", "wte")]
    if not wide:
        return
    size = ""
    if bundle.model:
        shape = bundle.model[0]
        count = shape.vocab * shape.hidden * (1 if shape.tied_embeddings else len(wide))
        size = f": {count:,} parameters, {16 * count / 2**30:.1f} GiB with gradient and Adam in fp32"
    yield warning(
        "modules-to-save",
        found.where,
        f"modules_to_save trains {' and '.join(wide)} in full{size}",
        "for a few new tokens use trainable_token_indices (not under ZeRO-3)",
    )


@check
def kbit_preparation(bundle: Bundle) -> Iterator[Finding]:
    """Norms and embeddings become fp32, and so do activations (bitsandbytes#1569, peft#3265)."""
    for document, _, call in bundle.script_calls():
        if call.last == "prepare_model_for_kbit_training":
            yield note(
                "kbit-preparation",
                document.at(call.line),
                "prepare_model_for_kbit_training turns norms, embeddings and head to fp32: activations grow "
                "with "
                "them, and long sequences can need more than a bf16 base",
                "compare with ftdash plan --method qlora and --method lora at your sequence length",
            )


@check
def lora_on_tensor_parallel(bundle: Bundle) -> Iterator[Finding]:
    parallel = None
    for document, _, call in bundle.script_calls():
        if call.last == "DistributedConfig" and (call.kwargs.get("tp_size") or call.kwargs.get("tp_plan")):
            parallel = document.at(call.line)
        if call.last == "from_pretrained" and "tp_plan" in call.kwargs:
            parallel = document.at(call.line)
    for plan in bundle.plans:
        if isinstance(tp := plan.value.get("tp"), int) and tp > 1:
            parallel = plan.where
    if parallel is None or bundle.adapters is None:
        return
    for package, least in (("peft", "0.21.1"), ("transformers", "5.17")):
        if old := bundle.older(package, least):
            yield error(
                "lora-tp-version",
                old.where,
                f"LoRA on a tensor-parallel base ({parallel}) needs {package} {least} or newer, not "
                f"{old.value}",
                f"{package}>={least}",
            )


@check
def old_trl_auxiliary_loss(bundle: Bundle) -> Iterator[Finding]:
    """Before TRL 1.15 the auxiliary loss grew with world size and accumulation."""
    old = bundle.older("trl", "1.15")
    if old is None:
        return
    coefficient = router_coefficient(bundle)
    moe = bool(bundle.model and bundle.model[0].is_moe)
    if moe or (coefficient and coefficient.value):
        yield warning(
            "trl-auxiliary-loss",
            old.where,
            f"TRL {old.value} scales a mixture's auxiliary loss with world size and accumulation",
            "trl>=1.15",
        )


def router_coefficient(bundle: Bundle) -> Sourced | None:
    """The coefficient of the load-balancing loss, wherever it is set."""
    found = bundle.argument("router_aux_loss_coef") or call_option(
        bundle, ("from_pretrained", "from_config"), "router_aux_loss_coef"
    )
    if found:
        return found
    for document in bundle.of(Kind.SCRIPT):
        for name, value, line in bundle.scripts[document.path].assigned:
            if name.endswith("router_aux_loss_coef") and isinstance(value, int | float):
                return Sourced(value, document.at(line))
    return _config_option(bundle, "overrides_of_model_config", "router_aux_loss_coef")


@check
def router_logits_off(bundle: Bundle) -> Iterator[Finding]:
    """transformers computes the auxiliary loss only when output_router_logits is on."""
    coefficient = router_coefficient(bundle)
    logits = _router_logits(bundle)
    if is_false(logits) and logits and (coefficient is None or coefficient.value):
        if coefficient is None and not (bundle.model and bundle.model[0].is_moe):
            return
        yield warning(
            "router-logits-off",
            logits.where,
            "output_router_logits is off: the load-balancing loss is not computed"
            + (
                f", though its coefficient is {coefficient.value} ({coefficient.where})"
                if coefficient
                else ""
            ),
            "set output_router_logits=True, or the coefficient to 0",
        )
    # TRL's SFT turns the logits on by itself once the coefficient is not 0.
    elif coefficient and coefficient.value and logits is None and not _trl(bundle):
        yield warning(
            "router-logits-off",
            coefficient.where,
            f"router_aux_loss_coef is {coefficient.value}, but output_router_logits stays at its default, "
            "off: "
            "the load-balancing loss is not computed",
            "set output_router_logits=True",
        )


def _trl(bundle: Bundle) -> bool:
    return any("trl" in bundle.scripts[document.path].imports for document in bundle.of(Kind.SCRIPT))


def _router_logits(bundle: Bundle) -> Sourced | None:
    found = call_option(bundle, ("from_pretrained", "from_config"), "output_router_logits")
    if found:
        return found
    for document, _, call in bundle.script_calls():
        nested: Any = call.kwargs.get("model_init_kwargs")
        if isinstance(nested, dict) and "output_router_logits" in nested:
            return Sourced(nested["output_router_logits"], document.at(call.line))
    for document in bundle.of(Kind.SCRIPT):
        for name, value, line in bundle.scripts[document.path].assigned:
            if name.endswith("output_router_logits") and value is not UNKNOWN:
                return Sourced(value, document.at(line))
    for keys in (
        ("overrides_of_model_config", "output_router_logits"),
        ("model_config", "output_router_logits"),
        ("model_init_kwargs", "output_router_logits"),
        ("output_router_logits",),
    ):
        if found := _config_option(bundle, *keys):
            return found
    return None


@check
def unmerged_expert_adapters(bundle: Bundle) -> Iterator[Finding]:
    """Serving engines do not apply adapters on 3-D expert weights: merge first (PEFT's LoRA guide)."""
    targets = call_option(bundle, ("LoraConfig",), "target_parameters") or bundle.argument(
        "lora_target_parameters"
    )
    for document in bundle.of(Kind.ADAPTER):
        targets = targets or document.get("target_parameters")
    if targets is None or not any("expert" in str(name) for name in _names(targets.value)):
        return
    calls = {call.last for _, _, call in bundle.script_calls()}
    if calls & {"merge_and_unload", "merge_adapter"}:
        return
    serves = any(
        "vllm" in bundle.scripts[document.path].imports for document in bundle.of(Kind.SCRIPT)
    ) or any(
        word in bundle.shells[document.path].text
        for document in bundle.of(Kind.SHELL)
        for word in ("vllm serve", "--enable-lora", "sglang")
    )
    report = warning if serves else note
    yield report(
        "expert-adapters-unmerged",
        targets.where,
        "adapters on expert weights are never merged here, and serving engines do not apply them",
        "model.merge_and_unload() before serving",
    )


@check
def expert_rank(bundle: Bundle) -> Iterator[Finding]:
    """A rank-r adapter on each expert multiplies the trainable parameters by their number."""
    targets = call_option(bundle, ("LoraConfig",), "target_parameters")
    if (
        targets is None
        or bundle.model is None
        or not any("expert" in str(name) for name in _names(targets.value))
    ):
        return
    rank, pattern = (
        call_option(bundle, ("LoraConfig",), "r"),
        call_option(bundle, ("LoraConfig",), "rank_pattern"),
    )
    shape = bundle.model[0]
    experts = max((group.layer.moe.experts for group in shape.groups if group.layer.moe), default=0)
    if (
        rank
        and pattern is None
        and isinstance(rank.value, int)
        and experts
        and rank.value > max(1, rank.value // experts)
    ):
        yield note(
            "expert-rank",
            targets.where,
            f"rank {rank.value} on each of {experts} experts: PEFT suggests {max(1, rank.value // experts)} "
            "through "
            "rank_pattern",
            f"rank_pattern for the expert parameters, with rank {max(1, rank.value // experts)}",
        )


@check
def fsdp2_upcast(bundle: Bundle) -> Iterator[Finding]:
    """accelerate below 1.13 turns the whole module to fp32 under FSDP2 (accelerate#3844)."""
    old = bundle.older("accelerate", "1.13")
    if old and bundle.adapters and bundle.backend and bundle.backend.name == "fsdp2":
        yield warning(
            "fsdp2-upcast",
            old.where,
            f"accelerate {old.value} turns frozen weights to fp32 under FSDP2 with mixed precision: a LoRA "
            "base "
            "doubles",
            "accelerate>=1.13",
        )


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
