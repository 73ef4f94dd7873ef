"""Why single rows are far off, as far as their sources tell; a row without an entry is not understood."""

from __future__ import annotations

_KBIT_INPUT = "k-bit linears that carry no adapter kept their inputs in that bitsandbytes; today's keep none"
_EARLY_2024 = (
    "code of early 2024: fp32 logits returned by the model and alive through backward, no expandable segments"
)
_FAST_VERSION = "whole-graph compiler that chooses what to save; no flag says which graph"

WHY = {
    "M011": "loss-parallel logits of 131k tokens and eager DTensor copies around them",
    "M014": "the number of stages a rank under interleaving is not stated (two assumed)",
    "M018": "262k tokens over CP 8: ring attention's key/value blocks in flight are not modelled",
    "M025": "a bug that the source names: selective checkpointing saved whole weights",
    "M026": "eager float8 kept copies of every input and weight; the source says +34 GiB",
    "M029": _EARLY_2024,
    "M035": _FAST_VERSION,
    "M040": _FAST_VERSION,
    "M044": "micro-batch read from a config, not stated; grouped experts of an early version",
    "M056": _EARLY_2024,
    "M057": _EARLY_2024,
    "M058": _EARLY_2024,
    "M059": _EARLY_2024,
    "M064": _EARLY_2024 + "; no loss parallelism, so whole logits on every rank",
    "M065": _EARLY_2024 + "; no loss parallelism, so whole logits on every rank",
    "M093": "embedding and head are units of their own there, so the root unit stays small",
    "M109": "an unpacked data set: sequences are far shorter than the 4,096 in the settings",
    "M115": "the peak is torchao's quantisation at load, not training",
    "M129": "512 tokens: what is left is the allocator's slack on small blocks",
    "M155": _KBIT_INPUT,
    "M156": _KBIT_INPUT,
    "M159": _KBIT_INPUT,
    "M162": "LoRA dropout of 0.05, whose masks and copies no flag asks for",
    "M164": "LoRA dropout of 0.05, whose masks and copies no flag asks for",
    "M166": _KBIT_INPUT,
    "M168": _KBIT_INPUT,
    "M170": _KBIT_INPUT,
    "M172": "the head is not tied there: another 0.5 GiB",
    "M173": _KBIT_INPUT + "; the head is not tied there",
    "M176": _KBIT_INPUT + "; the head is not tied there",
    "M222": "below its own model states by the published 6 + 12/n: some state must be smaller than said",
    "M230": "FP8 recipe: what Transformer Engine keeps in 8 bits is not modelled",
    "M253": "nvidia-smi with an uneven routing; 41 GiB are states and activations",
    "S002": "1.5 GiB of it is LoRA dropout of 0.1; the rest is not understood",
}
