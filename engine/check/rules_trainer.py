"""Checks of what a Trainer is given: its arguments together, its collator and labels, names that are gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ftdash.engine.check.bindings import dotted
from ftdash.engine.check.bundle import Bundle, call_option, dtype_name, is_true
from ftdash.engine.check.documents import Document, Kind, words
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.pyscript import Call, Script
from ftdash.engine.check.registry import check
from ftdash.engine.check.rules_values import unknown_value

# Names that current releases refuse with a TypeError: what they are called now, and the library's first
# release without them.
_RENAMED_ARGUMENTS = {
    "evaluation_strategy": ("eval_strategy", "transformers", "4.46"),
    "no_cuda": ("use_cpu", "transformers", "5.0"),
    "max_seq_length": ("max_length", "trl", "0.20"),
}
_RENAMED_IN_TRAINER = {
    "tokenizer": ("processing_class", "transformers", "5.0"),
    "max_seq_length": ("max_length in SFTConfig", "trl", "0.16"),
    "dataset_text_field": ("dataset_text_field in SFTConfig", "trl", "0.16"),
    "packing": ("packing in SFTConfig", "trl", "0.16"),
}
_TRAINER = re.compile(r"^(SFT|DPO|GRPO|KTO|Reward|RLOO|Seq2Seq)?Trainer$")


@check
def renamed_arguments(bundle: Bundle) -> Iterator[Finding]:
    """Classes of these names from elsewhere keep their own; unsloth patches the old names in."""
    for document, script, call in bundle.script_calls():
        if not _of_library(script, call) or "unsloth" in script.imports:
            continue
        if _TRAINER.match(call.last):
            yield from _renamed(bundle, document, call, _RENAMED_IN_TRAINER)
        elif call.last in ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"):
            yield from _renamed(bundle, document, call, _RENAMED_ARGUMENTS)


def _of_library(script: Script, call: Call) -> bool:
    if "." in call.name:
        return call.name.split(".")[0] in ("transformers", "trl")
    return any(_imported_from(script, call.last, package) for package in ("transformers", "trl"))


def _renamed(
    bundle: Bundle, document: Document, call: Call, names: dict[str, tuple[str, str, str]]
) -> Iterator[Finding]:
    for old, (new, library, since) in names.items():
        if old not in call.kwargs or bundle.older(library, since):
            continue
        yield warning(
            "argument-gone",
            document.at(call.line),
            f"{call.last} takes no {old} any more: {library} {since} and newer stop with a TypeError",
            f"{new}, or pin {library}<{since}",
        )


@check
def best_model_at_end(bundle: Bundle) -> Iterator[Finding]:
    """The best evaluation needs a checkpoint of its own (TrainingArguments.__post_init__)."""
    wanted = bundle.argument("load_best_model_at_end")
    if wanted is None or not is_true(wanted):
        return
    evaluates = bundle.argument("eval_strategy", "evaluation_strategy")
    saves = bundle.argument("save_strategy")
    when = [
        str(found.value).lower() if found else default
        for found, default in ((evaluates, "no"), (saves, "steps"))
    ]
    if "best" in when:
        return
    if when[0] != when[1]:
        yield error(
            "best-model-strategies",
            wanted.where,
            f"load_best_model_at_end with eval_strategy {when[0]} and save_strategy {when[1]}: they must be "
            "the same",
            f"save_strategy={when[0]}" if when[0] != "no" else f"eval_strategy={when[1]}",
        )
        return
    each, save = bundle.argument("eval_steps"), bundle.argument("save_steps")
    if when[0] != "steps" or each is None or save is None:
        return
    whole = isinstance(each.value, int) and isinstance(save.value, int) and each.value > 0
    if whole and save.value % each.value:
        yield error(
            "best-model-strategies",
            save.where,
            f"save_steps {save.value} is no multiple of eval_steps {each.value}, and "
            "load_best_model_at_end needs that",
            f"save_steps={max(1, round(save.value / each.value)) * each.value}",
        )


@check
def evaluation_without_data(bundle: Bundle) -> Iterator[Finding]:
    strategy = bundle.argument("eval_strategy", "evaluation_strategy")
    if strategy is None or str(strategy.value).lower() not in ("steps", "epoch"):
        return
    for document, _, call in bundle.script_calls():
        if not _TRAINER.match(call.last) or len(call.args) > 3:
            continue
        names = {word.arg for word in call.node.keywords}
        if "eval_dataset" not in names and None not in names and "train_dataset" in names:
            yield error(
                "evaluation-without-data",
                document.at(call.line),
                f"eval_strategy is {strategy.value} ({strategy.where}), and {call.last} gets no eval_dataset",
                'eval_dataset=..., or eval_strategy="no"',
            )


@check
def warmup_over_steps(bundle: Bundle) -> Iterator[Finding]:
    warmup, total = bundle.argument("warmup_steps"), bundle.argument("max_steps")
    for document in bundle.of(Kind.DEEPSPEED):
        warmup = document.get("scheduler", "params", "warmup_num_steps") or warmup
        total = document.get("scheduler", "params", "total_num_steps") or total
    if warmup is None or total is None:
        return
    if isinstance(warmup.value, int) and isinstance(total.value, int) and 0 < total.value < warmup.value:
        yield warning(
            "warmup-longer-than-run",
            warmup.where,
            f"{warmup.value} warmup steps, and {total.value} steps altogether ({total.where}): the "
            "learning rate "
            "never reaches its peak",
            f"at most {max(1, total.value // 10)} warmup steps, a tenth of the run",
        )


@check
def fp16_weights_under_fp16_scaling(bundle: Bundle) -> Iterator[Finding]:
    """The gradient scaler refuses fp16 gradients: 'Attempting to unscale FP16 gradients'."""
    scaled = bundle.argument("fp16")
    if (
        scaled is None
        or not is_true(scaled)
        or bundle.adapters
        or (bundle.backend and bundle.backend.name == "zero")
    ):
        return
    loaded = call_option(bundle, ("from_pretrained",), "dtype", "torch_dtype")
    if loaded and dtype_name(loaded.value) == "float16":
        yield error(
            "fp16-weights-scaled",
            loaded.where,
            f"weights are loaded in fp16 and trained with fp16=True ({scaled.where}): the gradient scaler "
            "stops "
            "with 'Attempting to unscale FP16 gradients'",
            "dtype=torch.float32 with fp16=True, or bf16 for both",
        )


@check
def collator(bundle: Bundle) -> Iterator[Finding]:
    """transformers' collator masks words by default, and leaves padding out of the loss."""
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        if not _causal(script) or _imported_from(script, "DataCollatorForLanguageModeling", "trl"):
            continue
        for call in script.named("DataCollatorForLanguageModeling"):
            masks = call.kwargs.get("mlm", call.args[1] if len(call.args) > 1 else True)
            if masks is True and not any(word.arg is None for word in call.node.keywords):
                yield error(
                    "masked-language-model",
                    document.at(call.line),
                    "DataCollatorForLanguageModeling masks words (mlm is True by default) for a causal "
                    "model: it "
                    "learns nothing useful, or the tokenizer has no mask token",
                    "mlm=False",
                )
            padded = _padded_with_eos(script)
            if padded:
                yield warning(
                    "end-token-not-learnt",
                    document.at(padded),
                    "pad_token is eos_token, and the collator leaves every padding token out of the loss: "
                    "the "
                    "model never learns to stop",
                    "a padding token of its own, or labels made by your own collator",
                )


@check
def labels(bundle: Bundle) -> Iterator[Finding]:
    """A plain Trainer pads and makes no labels: the model then returns no loss."""
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        if not _causal(script) or "label" in document.text or "compute_loss" in document.text:
            continue
        tokenizes = any(call.last == "map" for call in script.calls) and "AutoTokenizer" in document.text
        for call in script.named("Trainer"):
            names = {word.arg for word in call.node.keywords}
            if tokenizes and None not in names and "data_collator" not in names:
                yield warning(
                    "no-labels",
                    document.at(call.line),
                    "neither the data set nor a collator gives labels here: Trainer stops, for the model "
                    "returns no loss",
                    "DataCollatorForLanguageModeling(tokenizer, mlm=False)",
                )


@check
def packing_attention(bundle: Bundle) -> Iterator[Finding]:
    """Packed rows keep their samples apart only with attention that takes their lengths (TRL's SFT guide)."""
    packs = bundle.argument("packing", "padding_free")
    kind = bundle.argument("attn_implementation") or call_option(
        bundle, ("from_pretrained",), "attn_implementation"
    )
    if packs is None or not is_true(packs) or kind is None:
        return
    if str(kind.value) in ("sdpa", "eager"):
        yield warning(
            "packing-attention",
            kind.where,
            f"packing ({packs.where}) with {kind.value} attention: samples packed into one row see one "
            "another",
            'attn_implementation="flash_attention_2", or packing=False',
        )


@check
def quantised_without_adapters(bundle: Bundle) -> Iterator[Finding]:
    """Packed weights take no gradient: transformers' Trainer refuses a purely quantised model."""
    bits = call_option(bundle, ("BitsAndBytesConfig",), "load_in_4bit", "load_in_8bit")
    if bits is not None and is_true(bits):
        trainers = [
            (document, call)
            for document, script, call in bundle.script_calls()
            if _TRAINER.match(call.last) and _only_model(script)
        ]
        if trainers and not any(_adapts(call) for _, _, call in bundle.script_calls()):
            document, call = trainers[0]
            yield error(
                "quantised-without-adapters",
                document.at(call.line),
                f"the base is quantised ({bits.where}) and no adapter is put on it: the trainer refuses it",
                "peft_config=LoraConfig(...), or load the base unquantised",
            )
    for document in bundle.of(Kind.TRAINER):
        found, how = document.get("quantization_bit"), document.get("finetuning_type")
        if found and how and str(how.value) in ("full", "freeze"):
            yield error(
                "quantised-without-adapters",
                found.where,
                f"quantization_bit {found.value} with finetuning_type {how.value}: quantised weights train "
                "through "
                "LoRA only",
                "finetuning_type: lora, or remove quantization_bit",
            )


def _adapts(call: Call) -> bool:
    """Whether a call puts adapters on a model, or may: what `**options` holds is not always known."""
    if _TRAINER.match(call.last):
        return any(word.arg in (None, "peft_config") for word in call.node.keywords)
    return call.last in ("get_peft_model", "add_adapter", "load_adapter") or "Peft" in call.owner


def _only_model(script: Script) -> bool:
    """Whether the script loads one causal model, so that the quantised one is the one that trains."""
    return sum(call.last == "from_pretrained" and "Model" in call.owner for call in script.calls) == 1


@check
def quantised_compute(bundle: Bundle) -> Iterator[Finding]:
    compute = call_option(bundle, ("BitsAndBytesConfig",), "bnb_4bit_compute_dtype")
    if compute is None:
        return
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        trained = bundle.argument(name)
        if trained and is_true(trained) and dtype_name(compute.value) in {"bfloat16", "float16"} - {dtype}:
            yield warning(
                "quantised-compute-dtype",
                compute.where,
                f"4-bit layers compute in {dtype_name(compute.value)}, and training is {name} "
                f"({trained.where}): "
                "every layer casts, and fp16 overflows where bf16 does not",
                f"bnb_4bit_compute_dtype=torch.{dtype}",
            )


@check
def quantisation_type(bundle: Bundle) -> Iterator[Finding]:
    """Written out only: the default of an option may be what a condition around the call leaves out."""
    for document, _, call in bundle.script_calls():
        for word in call.node.keywords if call.last == "BitsAndBytesConfig" else ():
            given = word.value.value if isinstance(word.value, ast.Constant) else "nf4"
            if word.arg == "bnb_4bit_quant_type" and given not in ("nf4", "fp4"):
                yield unknown_value(document.at(call.line), word.arg, given, ("nf4", "fp4"))


@check
def merge_into_quantised(bundle: Bundle) -> Iterator[Finding]:
    """Merging rounds the adapter to the base's four bits (PEFT's quantization guide)."""
    bits = call_option(bundle, ("BitsAndBytesConfig",), "load_in_4bit")
    if bits is None or not is_true(bits):
        return
    for document in bundle.of(Kind.SCRIPT):
        script = bundle.scripts[document.path]
        again = [call for call in script.named("from_pretrained") if "Model" in call.owner]
        for call in script.named("merge_and_unload"):
            if len(again) == 1:
                yield warning(
                    "merge-into-quantised",
                    document.at(call.line),
                    f"merge_and_unload() on the 4-bit base ({bits.where}): the adapter is rounded to 4 "
                    "bits, and "
                    "the merged model answers worse than the one trained",
                    "load the base again in bf16, put the saved adapter on it, and merge there",
                )


def _causal(script: Script) -> bool:
    return any(call.last == "from_pretrained" and "CausalLM" in call.owner for call in script.calls)


def _imported_from(script: Script, name: str, package: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == package
        and any(alias.name == name for alias in node.names)
        for node in ast.walk(script.tree)
    )


def _padded_with_eos(script: Script) -> int:
    """The line that makes a tokenizer's end token its padding token; 0 if none does."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]).endswith(".pad_token"):
            taken = dotted(node.value).endswith(".eos_token")
            if taken:
                return node.lineno
    return 0


def _modules_named(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


@check
def adapter_targets(bundle: Bundle) -> Iterator[Finding]:
    """PEFT stops when no module has one of the names, and passes by those that match nothing."""
    from ftdash.engine.model.lora import adapted_names

    targets = call_option(bundle, ("LoraConfig",), "target_modules") or bundle.argument("lora_target_modules")
    for document in bundle.of(Kind.AXOLOTL):
        targets = targets or document.get("lora_target_modules")
    if targets is None or bundle.model is None:
        return
    names, (shape, where) = _modules_named(targets.value), bundle.model
    known = {*adapted_names(shape, ("all-linear",)), "lm_head", "embed_tokens", "wte", "wpe"}
    plain = [name for name in names if re.fullmatch(r"\w+", name)]
    # Fused and routed names differ by release: only names that another family has and this one has not.
    strange = [name for name in plain if name in _FAMILY_NAMES - known]
    if not strange or len(plain) < len(names):
        return
    nothing = len(strange) == len(names)
    yield (error if nothing else warning)(
        "adapter-targets",
        targets.where,
        f"{', '.join(strange)}: no layer of {shape.name} ({where}) has "
        + ("these names, and PEFT stops" if nothing else "such a name: no adapter there, without a word"),
        f"one of {', '.join(sorted(known - {'wte', 'wpe'}))}",
    )


# Names of linear layers in one family of decoders or another.
_FAMILY_NAMES = words(
    "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj query_key_value dense_h_to_4h dense_4h_to_h "
    "dense "
    "c_attn c_proj c_fc Wqkv qkv_proj gate_up_proj out_proj fc1 fc2 w1 w2 w3"
)


# Arguments that count something, and their least value.
_COUNTS = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "lora_r": 1, "lora_rank": 1}


@check
def counts(bundle: Bundle) -> Iterator[Finding]:
    ranks = call_option(bundle, ("LoraConfig",), "r")
    found = [("r", ranks, 1), *((name, bundle.argument(name), least) for name, least in _COUNTS.items())]
    for name, count, least in found:
        if count and type(count.value) is int and count.value < least:
            yield error("count-too-small", count.where, f"{name} is {count.value}", f"{least} or more")
    rate = bundle.argument("learning_rate")
    if rate and isinstance(rate.value, float) and rate.value >= 0.1:
        yield warning(
            "learning-rate",
            rate.where,
            f"learning_rate is {rate.value}: fine-tuning takes 1e-6 to 1e-3",
            "2e-5 for all weights, 2e-4 for adapters, to begin with",
        )
