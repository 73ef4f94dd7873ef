"""Reads published measurements and turns each one's settings, written as prose, into a plan by general
rules."""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ftdash.engine.model.load import load_config_file, load_preset, preset_names
from ftdash.engine.plan import Plan

MEASURED = Path(__file__).parent.parent / "data" / "measured.csv"
# Runs looked up when the planner was done; their settings were written down before any was planned.
AFTERWARDS = MEASURED.with_name("measured_afterwards.csv")
# Looked up once more after that, in sources that neither of the two names.
THIRD = MEASURED.with_name("measured_third.csv")
MODELS = MEASURED.parent / "models"  # config.json files of measured models that have no preset


class Inexpressible(Exception):
    """Settings that no plan can say: the reason, for the report."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published run. `peak_gib` and `tokens_per_s` are None where the source gives none."""

    id: str
    source: str
    confidence: str
    fields: dict[str, str]
    peak_gib: float | None
    mem_kind: str  # "reserved", "allocated" or "device"
    tokens_per_s: float | None

    @property
    def trusted(self) -> bool:
        return self.confidence in ("high", "medium")


def read(path: Path = MEASURED) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                id=record["id"],
                source=record["source"],
                confidence=record["confidence"],
                fields=record,
                peak_gib=_number(record["peak_gib"]),
                mem_kind=_mem_kind(record["mem_kind"]),
                tokens_per_s=_number(record["tok_s_per_gpu"]),
            )
            for record in csv.DictReader(file)
        ]


# Half of the 39 sources that were there before any constant was fitted have a smaller SHA-256. The other
# half, and every source added since, is only ever reported.
FITTED_BELOW = "75"


def is_fitted(source: str) -> bool:
    """Whether constants may be fitted to a source: by the SHA-256 of its name, decided before any fitting."""
    return hashlib.sha256(source.encode()).hexdigest() < FITTED_BELOW


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


def _mem_kind(text: str) -> str:
    """What the source measured. An unstated peak is taken as allocated, PyTorch's default peak counter."""
    if "nvidia-smi" in text or "per-GPU" in text or "INVERSE" in text:
        return "device"
    return (
        "reserved"
        if "max_reserved" in text or "peak reserved" in text or "mem_reserved" in text
        else "allocated"
    )


def plan_of(row: Row) -> Plan:
    """The plan of a row's settings. Raises Inexpressible with the reason."""
    f = row.fields
    fields: dict[str, object] = {
        **_model(f["model"]),
        "gpu": _gpu(f["gpu"]),
        "gpus": _first_int(f["world_size"]),
    }
    fields |= _parallelism(f)
    fields |= _method(f)
    fields |= _precision(f)
    fields |= _batch(f, fields)
    fields["checkpointing"] = _checkpointing(f["act_ckpt"])
    fields["save_every_product"] = "graph default" in f["act_ckpt"]
    fields["fused_norms"] = "a100_80gb_liger" in row.source
    fields["compile"] = _compiled(f["compile"])
    fields["whole_graph"] = "graph" in f["compile"] and "CUDA graphs" not in f["compile"]
    fields["loss"] = _loss(f["loss_impl"])
    if "loss" in f["compile"] and fields["loss"] == "full":
        fields["loss"] = "compiled"
    fields["attention"] = _attention(f["attention"])
    fields |= _optimizer(f["optimizer"])
    fields |= _offload(f)
    fields |= _framework(row)
    return Plan.from_dict(fields)


# What a framework does that its user knows and its runs do not repeat, with the public source of each.
_TORCHTITAN_HOLDS_LOGITS_UNTIL = "2024-06-12"  # pytorch/torchtitan#391: `del pred` before backward
_TORCHTITAN_WRAPS_EMBEDDINGS_FROM = "2025-07-28"  # pytorch/torchtitan#1094
_TORCHTITAN_FUSES_QKV_FROM = "2026-06-24"  # pytorch/torchtitan#3714
_TRANSFORMERS_LOOPS_UNTIL = (
    "2025-12"  # 5.0's first candidate, with grouped products (huggingface/transformers)
)
_TRANSFORMERS_UPCASTS_UNTIL = "2024-09"  # huggingface/transformers 4.45 leaves the logits in 16 bits
_BITSANDBYTES_KEEPS_INPUTS_UNTIL = "2024-07"  # bitsandbytes 0.43.2, of the 23rd of that month; LitGPT
# pinned an older one until after October 2024 (Lightning-AI/litgpt#710, #1767).
# These runs use transformers' Trainer, whose compute_loss returns the loss alone and lets go of the logits.
_TRAINER = ("huggingface/peft", "QwenLM", "fms-acceleration", "LongLoRA", "axolotl", "ms-swift")


def _framework(row: Row) -> dict[str, object]:
    f, date = row.fields, row.fields["source_date"]
    fields: dict[str, object] = {}
    if "torchtitan" in row.source:
        fields["wrap_embeddings"] = date >= _TORCHTITAN_WRAPS_EMBEDDINGS_FROM[:7]
        fields["fused_qkv"] = date > _TORCHTITAN_FUSES_QKV_FROM[:7]
        if date <= _TORCHTITAN_HOLDS_LOGITS_UNTIL[:7]:  # the one source of that month is of its 6th day
            fields["loss"] = "upcast"
    if "torchtune" in row.source and f["model"].endswith("70B") and "FSDP" in f["parallelism"]:
        fields["wrap_embeddings"] = f["method"].startswith("full")  # `custom_sharded_layers` of 70B_full.yaml
    if "embeddings wrapped" in f["parallelism"]:
        fields["wrap_embeddings"] = True
    if "litgpt" in row.source:
        fields["untied_head"] = True  # `tie_embeddings` is empty in every config of its hub
        if not f["method"].startswith("full"):
            fields["lora_dropout"] = 0.05  # `lora_dropout` of its hub, and the default of finetune/lora.py
        if f["method"].startswith("QLoRA"):
            fields["kbit_upcast"] = (
                "norms"  # fitted: its 4-bit runs keep as much as if norms answered in fp32
            )
    if "Megatron-Bridge" in row.source:
        fields |= _recipe(f)
    held = not any(trainer in row.source for trainer in _TRAINER)
    old = date < _BITSANDBYTES_KEEPS_INPUTS_UNTIL or "litgpt" in row.source
    fields["old_bitsandbytes"] = "bnb" in f["method"] and old
    # Its Mixtral and Qwen-MoE run their experts in a loop before 5; Llama 4 and gpt-oss multiply batches.
    batched = f["model"].startswith(("Llama-4", "gpt-oss"))
    fields["expert_loop"] = "HF" in f["act_ckpt"] and date < _TRANSFORMERS_LOOPS_UNTIL and not batched
    # It checkpointed re-entrantly before 5; everybody else puts PyTorch's wrapper inside the FSDP unit.
    fields["reentrant"] = not held
    if "HF CE fp32 logits" in f["loss_impl"] and held and date < _TRANSFORMERS_UPCASTS_UNTIL:
        fields["loss"] = "upcast"
    if "outputs held" in f["loss_impl"] and fields.get("loss") is None and f["method"].startswith("QLoRA"):
        fields["loss"] = "upcast"  # an fp32 head's logits live as long as what the model returned
    if "no prepare_model_for_kbit_training" in f["notes"] or "axolotl" in row.source:
        # axolotl keeps embeddings and head in 16 bits and turns norms back (monkeypatch/peft/utils.py,
        # loaders/model.py).
        fields["kbit_upcast"] = "none"
    if "fsdp_qlora" in row.source:
        fields["lora_dropout"] = 0.1  # the default of its train.py
    if found := re.search(r"LoRA dropout (0\.\d+)", f["notes"]):
        fields["lora_dropout"] = float(found.group(1))
    return fields


def _recipe(f: dict[str, str]) -> dict[str, object]:
    """What the recipe that a Megatron-Bridge measurement ran sets beyond the settings it repeats."""
    if f["model"].startswith("Moonlight") and f["method"].startswith("full"):
        # moonlight_16b_pretrain_config: "precision-aware optimizer with bf16 gradients/moments"
        return {"optimizer": "adamw-bf16", "reduce_dtype": "bf16"}
    if f["model"].startswith("Llama-3-") and "SFT" in f["method"]:
        # scripts/performance/configs/llama/llama3_llm_finetune.py: grad_reduce_in_fp32 = False
        return {"reduce_dtype": "bf16"}
    return {}


def _model(text: str) -> dict[str, object]:
    """The preset of a model, or its config.json among the tests' data."""
    if "Mamba" in text:
        raise Inexpressible("a Mamba hybrid: its state-space layers are not modelled")
    bare = re.sub(r"\(.*?\)", "", text).strip().lower().replace(" ", "-")
    if bare.startswith("deepseek-v3-671b"):
        bare = "deepseek-v3"
    if bare in preset_names():
        return {"model": bare}
    config = MODELS / f"{bare}.json"
    if not config.exists():
        raise Inexpressible(f"no preset for {text}")
    return {"config": str(config)}


GPUS = (
    (r"H100-96GB|HBM2e", "h100-hbm2e-96g"),
    (r"H100", "h100-sxm-80g"),
    (r"H200", "h200-sxm-141g"),
    (r"GB200", "gb200-184g"),
    (r"B200", "b200-180g"),
    (r"A800", "a800-80g"),
    (r"A100-40", "a100-40g"),
    (r"A100", "a100-80g"),
    (r"A10G", "a10g-24g"),
    (r"L40S", "l40s-48g"),
    (r"4090", "rtx4090-24g"),
    (r"3090", "rtx3090-24g"),
    (r"A6000", "rtxa6000-48g"),
    (r"A5000", "rtxa5000-24g"),
    (r"^24GB", "rtx4090-24g"),
    (r"^48GB", "rtxa6000-48g"),
    (r"^80GB", "h100-sxm-80g"),
    (r"^T4", "t4-16g"),
)


def _gpu(text: str) -> str:
    for pattern, name in GPUS:
        if re.search(pattern, text):
            return name
    raise Inexpressible(f"GPU {text!r} is not known")


def _first_int(text: str) -> int:
    found = re.search(r"\d+", text)
    if found is None:
        raise Inexpressible(f"no number in {text!r}")
    return int(found.group())


def _degree(name: str, text: str) -> int:
    found = re.search(rf"\b{name} (\d+)", text)
    return int(found.group(1)) if found else 1


def _parallelism(f: dict[str, str]) -> dict[str, object]:
    text = f["parallelism"]
    fields: dict[str, object] = {name: _degree(name.upper(), text) for name in ("tp", "cp", "pp", "ep")}
    if "NO_SHARD" in text:
        fields["strategy"] = "ddp"
    elif found := re.search(r"ZeRO-(\d)", text):
        fields["strategy"] = f"zero{found.group(1)}"
    elif "distributed optimizer" in f["optimizer"]:
        fields["strategy"] = "megatron"
    elif "no reshard" in text:
        fields["strategy"] = "fsdp-no-reshard"
    elif "FSDP1" in text:
        fields["strategy"] = "fsdp1"
    elif "FSDP" in text or "CP" in text:
        fields["strategy"] = "fsdp"
    elif text == "1 GPU":
        fields["strategy"] = "none"
    else:
        raise Inexpressible(f"parallelism {text!r} is not stated fully")
    fields["unsharded_init"] = "before sharding" in text
    if "SP/TP" in text:
        fields["tp"] = _degree("SP/TP", text)
    if "Interleaved" in text:
        fields |= {"pp_schedule": "interleaved", "virtual_stages": 2}
    if found := re.search(r"VPP (\d+)", text):
        fields |= {"pp_schedule": "interleaved", "virtual_stages": int(found.group(1))}
    return fields


def _method(f: dict[str, str]) -> dict[str, object]:
    text = f["method"]
    if text.startswith("full"):
        return {"method": "full"}
    fields: dict[str, object] = {
        "method": "lora",
        "lora_rank": _first_int(f["lora_rank"]),
        "dora": "DoRA" in text,
    }
    if text.startswith("QLoRA"):
        fields["method"] = "qlora"
        # torchao's NF4 and bitsandbytes without "-dq" differ: torchao quantises the scales as well.
        fields["quant"] = "nf4-dq" if "dq" in text or "torchao" in text or text == "QLoRA NF4" else "nf4"
        if "GPTQ4" in text:
            fields["quant"] = "gptq4"
        fields["quant_storage"] = "bf16"
        fields["quantize_experts"] = "experts quantised" in text
    fields["lora_targets"] = _targets(f["lora_targets"], f["model"])
    return fields


def _targets(text: str, model: str) -> tuple[str, ...]:
    """Module names as the model spells them. A fused projection stands for every part of it that is named."""
    named = _model(model)
    shape = load_preset(str(named["model"])) if "model" in named else load_config_file(str(named["config"]))
    names = {x.name for group in shape.groups for x in group.layer.linears}
    if "all" in text:
        return ("all-linear",)
    wanted: list[str] = []
    for word, parts in {
        "q": ("q_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn"),
        "k": ("k_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn"),
        "v": ("v_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn"),
        "qkv": ("qkv_proj",),
        "output_proj": ("o_proj",),
        "MLP": ("gate_proj", "up_proj", "down_proj"),
        "up": ("up_proj",),
        "down": ("down_proj",),
        "gate": ("gate_proj",),
        "gate_up": ("gate_up_proj",),
    }.items():
        if re.search(rf"(^|[^a-z_]){word}($|[^a-z_])", text):
            wanted += [part for part in parts if part in names]
    if "recipe default" in text:
        wanted = ["q_proj", "v_proj"]
    if not wanted:
        raise Inexpressible(f"LoRA targets {text!r} are not stated")
    return tuple(dict.fromkeys(wanted))


def _precision(f: dict[str, str]) -> dict[str, object]:
    text = f["precision"].lower()
    fields: dict[str, object] = {}
    if "float8" in text and "bf16 (pure)" in text:
        raise Inexpressible(
            "8-bit products over weights and optimizer states in bf16: --precision fp8 means fp32"
        )
    if "fp32 adapters" in text:
        fields["adapter_dtype"] = "fp32"
    if "fp32 of all not quantised" in text:
        fields["kbit_upcast"] = "all"
    if "grad_reduce_in_fp32 = False" in f["optimizer"]:
        fields["reduce_dtype"] = "bf16"
    if "nvfp4" in text:
        fields["precision"] = "nvfp4"
    elif "mxfp8" in text:
        fields["precision"] = "mxfp8"
    elif "fp8" in text or "float8" in text:
        fields["precision"] = "fp8"
    elif re.search(r"pure|no fp32 master|bf16-true|full bf16", text) or (
        f["method"].startswith("QLoRA") and text == "bf16"
    ):
        fields["precision"] = "bf16"
    elif text.startswith("fp16"):
        fields["precision"] = "fp16-mixed"
    else:
        fields["precision"] = "bf16-mixed"
    if "torchtitan" in f["source"]:
        fields["reduce_dtype"] = "fp32"  # torchtitan's default, `mixed_precision_reduce`
    return fields


def _batch(f: dict[str, str], fields: dict[str, object]) -> dict[str, object]:
    seq = re.search(r"\d+", f["seq_len"].replace(",", ""))
    dynamic = "alpaca dynamic" in f["seq_len"]
    if dynamic:
        # Alpaca's samples are short: 512 is the longest that torchtune's tutorials report for it.
        seq_len, micro = 512, 2
    elif seq is None:
        raise Inexpressible("sequence length not stated")
    else:
        seq_len = int(seq.group())
        if not re.search(r"\d", f["micro_batch"]):
            raise Inexpressible("micro-batch not stated")
        micro = 0
    text = f["micro_batch"]
    accum = 1
    micro_batches = None
    if not dynamic:
        micro = _first_int(text)
    if found := re.search(r"local batch (\d+)", text):
        micro_batches = _pipeline_micro_batches(f, int(found.group(1)), int(fields["pp"]))  # type: ignore[call-overload]
        micro = int(found.group(1)) // micro_batches
    if "global or micro not stated" in text:
        raise Inexpressible("whether the batch is global or per GPU is not stated")
    accum_text = f["grad_accum"]
    if found := re.search(r"GBS (\d+)", accum_text):
        world = int(fields["gpus"])  # type: ignore[call-overload]
        parallel = 1
        for name in ("tp", "cp", "pp"):
            parallel *= int(fields[name])  # type: ignore[call-overload]
        accum = max(1, int(found.group(1)) // (micro * world // parallel))
    elif found := re.search(r"effective (\d+)", accum_text):
        accum = max(1, int(found.group(1)) // (micro * int(fields["gpus"])))  # type: ignore[call-overload]
    elif re.fullmatch(r"\d+", accum_text.strip()):
        accum = int(accum_text)
    batch: dict[str, object] = {"micro_batch": micro, "seq_len": seq_len, "grad_accum": accum}
    if found := re.search(r"longest of a micro-batch; mean (\d+)", f["seq_len"]):
        batch |= {"batching": "longest", "mean_len": int(found.group(1))}
    if micro_batches:
        batch["micro_batches"] = micro_batches
    elif int(fields["pp"]) > 1:  # type: ignore[call-overload]
        batch["micro_batches"] = accum
    return batch


# torchtitan's `pipeline_parallel_microbatch_size`, default 1, replaced `pipeline_parallel_microbatches`,
# default the pipeline's degree, in the spring of 2025 (torchtitan, distributed/pipeline.py).
MICRO_BATCH_OF_ONE = "2025-04"


def _pipeline_micro_batches(f: dict[str, str], local_batch: int, pp: int) -> int:
    """Into how many micro-batches a pipeline cuts a local batch where the source names only that."""
    return pp if f["source_date"] < MICRO_BATCH_OF_ONE else local_batch


def _checkpointing(text: str) -> str:
    lowered = text.lower()
    if lowered.startswith(("none", "selective: none")):
        return "none"
    if "selective" in lowered or "sac" in lowered:
        # Recomputing the attention core alone keeps everything else: flash attention does that anyway.
        if "every 2nd layer" in lowered:
            raise Inexpressible("checkpointing of every second layer")
        return "none" if "core_attn" in lowered else "selective"
    return "full"


def _attention(text: str) -> str:
    if text.startswith("eager"):
        return "eager"
    return "sdpa" if "memory-efficient" in text else "flash"


def _compiled(text: str) -> bool:
    """torchtitan's graph_trainer rearranges its graph and runs PyTorch's own kernels: its backend defaults to
    aot_eager, later only attention goes through Inductor (experiments/graph_trainer/configs.py)."""
    return bool(re.match(r"yes|block|model|loss", text)) and "loss only" not in text


def _loss(text: str) -> str:
    lowered = text.lower()
    if "compiled" in lowered and "chunked" not in lowered:
        return "compiled"
    if "unchunked" in lowered:
        return "full"
    if "chunked" in lowered:
        return "chunked"
    if "fused" in lowered or "cut c" in lowered:
        return "fused"
    return "native" if re.search("of (bf16|the) logits", lowered) else "full"


def _optimizer(text: str) -> dict[str, object]:
    lowered = text.lower()
    name = "adamw-foreach" if "foreach" in lowered else "adamw"
    if "paged" in lowered:
        name = "paged-adamw-8bit"
    elif "8bit" in lowered or "8-bit" in lowered:
        name = "adamw-8bit"
    elif "4bit" in lowered:
        name = "adamw-4bit"
    elif "muon" in lowered:
        name = "muon"
    return {"optimizer": name, "optimizer_in_backward": "optimizer_in_bwd" in lowered}


def _offload(f: dict[str, str]) -> dict[str, object]:
    text = f["offload"].lower()
    fields: dict[str, object] = {
        "activation_offload": "activation" in text or "activation offload" in f["act_ckpt"]
    }
    if "params" in text:
        fields["offload"] = "all"
    elif re.search(r"optimizer cpu 100", text):
        fields["offload"] = "optimizer"
    return fields
