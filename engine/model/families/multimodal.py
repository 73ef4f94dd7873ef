"""Multimodal models: the language model inside is read; image and audio towers are named and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ftdash.engine.model.config import HubConfig, ModelError
from ftdash.engine.model.shape import ModelShape

Builder = Callable[[HubConfig], ModelShape]

_TEXT_KEYS = ("text_config", "llm_config", "language_config")
_TOWER_KEYS = {"vision_config": "vision tower", "audio_config": "audio tower"}
# These towers have a gate in their feed-forward, three matrices for two.
_GATED_TOWERS = ("pixtral", "qwen2_5_vl", "qwen2_5_vl_vision", "mistral3", "glm4v", "glm4v_vision")


def is_multimodal(c: HubConfig) -> bool:
    return any(isinstance(c.values.get(key), Mapping) for key in (*_TEXT_KEYS, *_TOWER_KEYS)) or bool(
        c.known.text
    )


def multimodal(c: HubConfig, builders: Mapping[str, Builder]) -> ModelShape:
    """The language model of `c` by its own builder, tied as the outer class ties it.

    Older files have the language model's keys at the top. Raises ModelError for an unknown language
    model.
    """
    key = next((key for key in _TEXT_KEYS if isinstance(c.values.get(key), Mapping)), None)
    values = c.values[key] if key else c.values
    given = values.get("model_type") if key else None
    text_type = str(given or c.known.text or "")
    if text_type not in builders:
        raise ModelError(
            f"{c.where}: {c.model_type!r} holds a language model of type {text_type or 'unknown'!r},"
            f" which cannot be read: one of {', '.join(sorted(builders))}"
        )
    text = HubConfig(values, f"{c.where}: {key}" if key else c.where, text_type)
    # Llama 4 ties by the inner config, every other class by the outer one.
    tied = text.tied if c.model_type == "llama4" else c.tied
    shape = builders[text_type](HubConfig({**values, "tie_word_embeddings": tied}, text.where, text_type))
    towers = [_tower(c, name, words) for name, words in _TOWER_KEYS.items() if _has(c, name)]
    return replace(
        shape,
        model_type=c.model_type,
        layer_class=shape.layer_class or next(iter(c.known.blocks), ""),
        unplaced=shape.unplaced + tuple(words for words, _ in towers),
        unplaced_params=shape.unplaced_params + sum(params for _, params in towers),
    )


def _has(c: HubConfig, key: str) -> bool:
    return isinstance(c.values.get(key), Mapping) or (key == "vision_config" and key in c.known.defaults)


def _tower(c: HubConfig, key: str, words: str) -> tuple[str, int]:
    """What a tower holds, estimated from its widths: attention of 4 h² and a feed-forward a layer."""
    tower = c.nested(key, "")
    try:
        layers = tower.size("num_hidden_layers", "depth", "num_layers", "encoder_layers")
        hidden = tower.size("embed_dim", "hidden_size", "d_model")  # Qwen2-VL: hidden_size is the text's
        width = tower.size("intermediate_size", default=round(tower.number("mlp_ratio", default=4) * hidden))
    except ModelError:
        return f"{words}, parameters unknown, cannot be placed", 0
    matrices = 3 if tower.values.get("model_type", c.model_type) in _GATED_TOWERS else 2
    params = layers * (4 * hidden * hidden + matrices * hidden * width)
    return f"{words}, about {params / 1e6:,.0f} million parameters, cannot be placed", params
