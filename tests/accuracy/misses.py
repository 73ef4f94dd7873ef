"""Why single rows are more than 10 % off in memory, as far as their sources tell; a test keeps it whole."""

from __future__ import annotations

_EARLY_2024 = (
    "code of early 2024: fp32 logits returned by the model and alive through backward, no expandable segments"
)
_NO_LOSS_PARALLEL = _EARLY_2024 + "; no loss parallelism, so whole logits on every rank"
_WHOLE_GRAPH = "whole-graph compiler that chooses what to save and runs no streams; no flag says which graph"
_UNTIED = "LitGPT unties the head, 0.5 to 0.7 GiB in 16 bits"
_MOE_LOSS = "logits of 32k tokens are a third of it; this compiled loss may keep fewer copies than others"

WHY = {
    "M011": "131k tokens under TP 8: asynchronous TP needs 4 GiB less, so gathered copies are missing",
    "M018": "262k tokens over CP 8: ring attention's key/value blocks in flight are not modelled",
    "M025": "a bug that the source names: selective checkpointing saved whole weights",
    "M026": "eager float8 keeps copies of every input and weight; the source says +34 GiB",
    "M029": _EARLY_2024,
    "M033": "code of late 2025: embedding and head are units of their own, so the root unit is smaller; the "
    "rest is not understood",
    "M035": _WHOLE_GRAPH,
    "M036": _WHOLE_GRAPH,
    "M037": _WHOLE_GRAPH,
    "M040": _WHOLE_GRAPH,
    "M044": _MOE_LOSS,
    "M045": _MOE_LOSS,
    "M055": "not understood: unsharded gradients between micro-batches are half of the plan",
    "M056": _EARLY_2024,
    "M058": _EARLY_2024,
    "M064": _NO_LOSS_PARALLEL,
    "M065": _NO_LOSS_PARALLEL,
    "M093": "torchtune shards embedding and head as units of their own, so the root unit stays small",
    "M109": "an unpacked data set: sequences are far shorter than the 4,096 in the settings",
    "M115": "the peak is torchao's quantisation at load: 9.1 GB are reserved before the first step",
    "M129": "512 tokens: four times as many need hardly more there, so the peak lies outside a step",
    "M162": "LoRA dropout of 0.05, whose masks and copies no flag asks for; LitGPT fuses q, k and v",
    "M172": _UNTIED,
    "M173": _UNTIED,
    "M176": _UNTIED,
    "M222": "below its own model states by the published 6 + 12/n: some state must be smaller than said",
    "M230": "FP8 recipe: what Transformer Engine keeps in 8 bits is not modelled",
    "M253": "nvidia-smi with uneven routing in 16 GPUs' all-to-alls; 41 GiB are states and activations",
    "S002": "0.6 GiB of it is LoRA dropout of 0.1; the rest is not understood",
}
