"""Finds a plan's model: a preset, a config.json, or a typical shape for a bare parameter count."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ftdash import presets
from ftdash.engine.model.config import LARGEST_TOTAL, HubConfig, ModelError
from ftdash.engine.model.shape import ModelShape

if TYPE_CHECKING:
    from ftdash.engine.plan import Plan

__all__ = [
    "ModelError",
    "from_config",
    "from_params",
    "load_config_file",
    "load_preset",
    "preset_names",
    "resolve",
]

# Published shapes that a bare count is interpolated between: parameters, layers, hidden, FFN width,
# KV heads, vocabulary (Llama 3 and Qwen2.5 model cards).
_TYPICAL = (
    (1e6, 2, 64, 256, 2, 4_096),
    (1.5e7, 6, 288, 768, 2, 16_384),
    (1.1e9, 22, 2048, 5632, 4, 32_000),
    (3.2e9, 28, 3072, 8192, 8, 64_000),
    (8.0e9, 32, 4096, 14336, 8, 128_256),
    (1.4e10, 48, 5120, 13824, 8, 128_256),
    (3.2e10, 64, 5120, 27648, 8, 128_256),
    (7.05e10, 80, 8192, 28672, 8, 128_256),
    (4.05e11, 126, 16384, 53248, 8, 128_256),
    (3.0e12, 160, 36864, 147456, 8, 128_256),
)
LEAST_TOTAL = 100_000


@cache
def preset_names() -> tuple[str, ...]:
    """The presets' names, sorted."""
    return tuple(sorted(path.stem for path in (presets.FOLDER / "models").glob("*.json")))


# Parts of a hub name that do not change the shape: tuning stage, context length, release date.
_SAME_SHAPE = frozenset(
    [
        "hf",
        "instruct",
        "it",
        "pt",
        "base",
        "chat",
        "meta",
        "preview",
        "thinking",
        "4k",
        "8k",
        "32k",
        "128k",
        "2410",
        "2407",
        "0924",
        "1124",
        "0425",
        "0325",
        "0414",
        "2501",
        "2507",
        "0905",
        "0711",
    ]
)


def _bare(name: str) -> str:
    words = name.lower().rsplit("/")[-1].replace("_", ".").split("-")
    return "-".join(word for word in words if word not in _SAME_SHAPE)


@cache
def _bare_names() -> dict[str, str]:
    return {_bare(name): name for name in reversed(preset_names())}


@cache
def load_preset(name: str) -> ModelShape:
    """The shape of a preset, also under its full hub name. Raises ModelError naming close presets."""
    chosen = name if name in preset_names() else _bare_names().get(_bare(name))
    if chosen is None:
        import difflib

        near = difflib.get_close_matches(_bare(name), preset_names(), 5, 0.4) or list(preset_names()[:5])
        raise ModelError(
            f"--model {name}: no such preset; near: {', '.join(near)} ({len(preset_names())} in all,"
            " or --config FILE, or --params N)"
        )
    config = _preset_config(chosen)
    return replace(_build(config, chosen, f"preset {chosen}"), source=config["source"])


def _preset_config(name: str) -> dict[str, Any]:
    return msgspec.json.decode((presets.FOLDER / "models" / f"{name}.json").read_bytes())


def load_config_file(path: str | Path) -> ModelShape:
    """The shape in a hub config.json (or a folder that holds one), named after its folder or file."""
    file = Path(path)
    config = _read_json(file)
    named = file.resolve() if file.is_dir() else file.resolve().parent
    name = named.name if file.is_dir() or file.name == "config.json" else file.stem
    return replace(_build(config, name, f"--config {path}"), source=str(path))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        file = path / "config.json" if path.is_dir() else path
        config = msgspec.json.decode(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise ModelError(f"--config {path}: {error.strerror or error}; a Hugging Face config.json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"--config {path}: not JSON: {error}") from None
    except RecursionError:
        raise ModelError(f"--config {path}: nested too deeply for a Hugging Face config.json") from None
    if not isinstance(config, Mapping):
        raise ModelError(f"--config {path}: not a JSON object but a {type(config).__name__}")
    return config


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the transformers class builds from a hub config's keys. Raises ModelError."""
    return _build(config, name, name)


def _build(config: Mapping[str, Any], name: str, where: str) -> ModelShape:
    from ftdash.engine.model.families import BUILDERS
    from ftdash.engine.model.families.multimodal import is_multimodal, multimodal

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{where}: key 'model_type' is missing: such as llama, qwen3, mixtral")
    reader = HubConfig(config, where)
    if model_type in BUILDERS:
        shape = BUILDERS[model_type](reader)
    elif is_multimodal(reader):
        shape = multimodal(reader, BUILDERS)
    else:
        import difflib

        near = difflib.get_close_matches(model_type, BUILDERS, 5, 0.5) or ["llama", "qwen3", "mixtral"]
        raise ModelError(
            f"{where}: model_type {model_type!r} cannot be placed: {len(BUILDERS)} decoder types are known, "
            f"such as {', '.join(near)}; --params N plans a typical decoder of its size"
        )
    return replace(shape, name=name, stored_as=_stored_as(config))


def _stored_as(config: Mapping[str, Any]) -> str:
    """The quantisation of the stored weights: gptq, awq, bitsandbytes, fp8, mxfp4 …; "" for plain ones."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    return method if isinstance(method, str) else ""


@lru_cache(maxsize=256)
def from_params(n: float) -> ModelShape:
    """A dense GQA SwiGLU decoder of typical proportions whose total is exactly `n`.

    Layers and widths are interpolated between published models; FFN width and vocabulary take up the
    rest in whole steps, and what remains (below 0.1 %) stands in `other_params`. Raises ModelError.
    """
    if not LEAST_TOTAL <= n <= LARGEST_TOTAL or n != int(n):
        raise ModelError(
            f"--params {n:g}: a whole number of parameters from {LEAST_TOTAL:g} to {LARGEST_TOTAL:g}"
        )
    total = int(n)
    layers, hidden, kv_heads, vocab = _proportions(total)
    head_dim = 128 if hidden >= 2048 else 64 if hidden >= 256 else 16

    def shape(width: int, vocab: int = vocab) -> ModelShape:
        config = {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // head_dim,
            "num_key_value_heads": min(kv_heads, hidden // head_dim),
            "head_dim": head_dim,
            "vocab_size": vocab,
        }
        return _build(config, f"{total / 1e9:.4g}B", f"--params {n:g}")

    # Whole multiples, so that every usual tensor-parallel degree divides them.
    step = 64 if hidden >= 1024 else 8
    per_step = shape(2 * step).total_params - shape(step).total_params
    width = (total - shape(step).total_params) // per_step * step + step
    if width < step:
        raise ModelError(f"--params {n:g}: too few for a decoder: from {LEAST_TOTAL:.0e}")
    vocab += (total - shape(width).total_params) // (2 * hidden * step) * step
    fitted = shape(width, vocab)
    return replace(
        fitted,
        other_params=fitted.other_params + total - fitted.total_params,
        source="typical dense decoder of this size",
    )


def _proportions(total: int) -> tuple[int, int, int, int]:
    """Layers, hidden, KV heads and vocabulary between the two nearest published sizes, on a log scale."""
    bounded = min(max(total, _TYPICAL[0][0]), _TYPICAL[-1][0])
    upper = next(i for i, row in enumerate(_TYPICAL) if bounded <= row[0])
    low, high = _TYPICAL[max(upper - 1, 0)], _TYPICAL[upper]
    part = 0.0 if high[0] == low[0] else math.log(bounded / low[0]) / math.log(high[0] / low[0])

    def between(index: int) -> float:
        return float(low[index] * (high[index] / low[index]) ** part)

    scale = (total / bounded) ** 0.5
    # Whole groups of query heads for every KV head.
    step = 1024 if between(2) >= 2048 else 256 if between(2) >= 256 else 32
    hidden = max(32, round(between(2) * scale / step) * step)
    nearest = low if part < 0.5 else high
    vocab = max(256, min(int(nearest[5]), total // (6 * hidden) // 8 * 8))
    return round(between(1)), hidden, int(nearest[4]), vocab


def resolve(plan: Plan) -> ModelShape:
    """The model that a plan names, through --model, --config or --params; cached. Raises ModelError."""
    given = [flag for flag in ("model", "config", "params") if getattr(plan, flag) is not None]
    if len(given) != 1:
        said = " and ".join(f"--{flag}" for flag in given) or "none"
        raise ModelError(f"exactly one of --model, --config and --params names the model, not {said}")
    if plan.model is not None:
        return load_preset(plan.model)
    if plan.params is not None:
        return from_params(plan.params)
    path = Path(str(plan.config))
    try:
        stamp = (path / "config.json" if path.is_dir() else path).stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _resolve_file(str(path), stamp)


def hub_config(plan: Plan) -> dict[str, Any]:
    """The config keys behind a plan's model, for whoever builds the real class. Raises ModelError."""
    shape = resolve(plan)
    if plan.model is not None:
        return _preset_config(shape.name)
    if plan.config is not None:
        return dict(_read_json(Path(plan.config)))
    layer = shape.groups[0].layer
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": layer.ffn_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": layer.attention.heads,
        "num_key_value_heads": layer.attention.kv_heads,
        "head_dim": layer.attention.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
    }


@lru_cache(maxsize=32)
def _resolve_file(path: str, stamp: int) -> ModelShape:
    return load_config_file(path)
