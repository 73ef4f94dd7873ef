"""Checks of settings that only Axolotl's and LLaMA-Factory's own validation knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ftdash.engine.check.bundle import Bundle, is_true
from ftdash.engine.check.documents import Document, Kind
from ftdash.engine.check.findings import Finding, error, warning
from ftdash.engine.check.registry import check

_ATTENTION = (
    "flash_attention",
    "sdp_attention",
    "xformers_attention",
    "flex_attention",
    "s2_attention",
    "attn_implementation",
)
_METHODS = {
    Kind.AXOLOTL: ("adapter", ("lora", "qlora", "llama-adapter")),
    Kind.TRAINER: ("finetuning_type", ("lora", "oft", "freeze", "full")),
}


def _on(document: Document, name: str) -> bool:
    return is_true(document.get(name))


@check
def method_names(bundle: Bundle) -> Iterator[Finding]:
    """Both readers take these names in small letters only; a newer one may know more than these."""
    for kind, (key, known) in _METHODS.items():
        for document in bundle.of(kind):
            found = document.get(key)
            if found is None or str(found.value) in known:
                continue
            near = difflib.get_close_matches(str(found.value).lower(), known, 1, 0.75)
            if near:
                yield error(
                    "value-unknown",
                    found.where,
                    f"{key} is {found.value}: one of {', '.join(known)}",
                    f"did you mean {near[0]}?",
                )


@check
def bits_of_the_base(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.AXOLOTL):
        four, eight = _on(document, "load_in_4bit"), _on(document, "load_in_8bit")
        adapter = document.get("adapter")
        if four and eight:
            yield error(
                "two-quantisations",
                document.where("load_in_8bit"),
                f"load_in_8bit beside load_in_4bit ({document.where('load_in_4bit')})",
                "one of the two",
            )
        elif adapter and adapter.value == "qlora" and not four and not _on(document, "gptq"):
            yield error(
                "qlora-without-4bit",
                adapter.where,
                "adapter: qlora, and load_in_4bit is not on" + (" but load_in_8bit is" if eight else ""),
                "load_in_4bit: true, or adapter: lora",
            )


@check
def adapter_without_targets(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.AXOLOTL):
        adapter = document.get("adapter")
        if adapter is None or adapter.value not in ("lora", "qlora") or document.get("lora_model_dir"):
            continue
        if not any(
            document.get(name) and document.get(name).value  # type: ignore[union-attr]
            for name in ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
        ):
            yield error(
                "adapter-without-targets",
                adapter.where,
                f"adapter: {adapter.value}, and nothing says on which layers",
                "lora_target_linear: true, or lora_target_modules",
            )


@check
def packed_rows(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.AXOLOTL):
        found = document.get("sample_packing")
        if found and is_true(found) and not any(document.get(name) for name in _ATTENTION):
            yield warning(
                "packing-attention",
                found.where,
                "sample_packing without an attention that keeps packed samples apart: they see one another",
                "flash_attention: true, or flex_attention: true",
            )


@check
def exclusive_schedules(bundle: Bundle) -> Iterator[Finding]:
    for document in bundle.of(Kind.AXOLOTL):
        for one, other in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
            first, second = document.get(one), document.get(other)
            if first and second and first.value and second.value:
                yield error(
                    "schedule-twice",
                    first.where,
                    f"{one} beside {other} ({second.where}): Axolotl refuses both at once",
                    f"remove {one} or {other}",
                )


@check
def eight_bit_optimizer_under_fsdp(bundle: Bundle) -> Iterator[Finding]:
    """bitsandbytes' 8-bit state is no DTensor, and lies on the GPU (axolotl/utils/schemas/validation.py)."""
    for document in bundle.of(Kind.AXOLOTL):
        optimizer, backend = document.get("optimizer"), bundle.backend
        if optimizer is None or backend is None or not backend.name.startswith("fsdp"):
            continue
        first = backend.name == "fsdp1"
        offloads = first and is_true(bundle.fsdp_option("offload_params"))
        whole = str(optimizer.value) in ("adamw_8bit", "adamw_bnb_8bit") and not first
        if whole or (offloads and "8bit" in str(optimizer.value)):
            yield warning(
                "8bit-optimizer-fsdp",
                optimizer.where,
                f"{optimizer.value} under {backend.label} ({backend.where})"
                + (" with offload_params" if offloads else "")
                + ": Axolotl refuses it, for bitsandbytes' state is not sharded",
                "adamw_torch_8bit or adamw_torch_fused",
            )
