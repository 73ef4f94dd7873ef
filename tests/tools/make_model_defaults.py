"""Writes presets/model_defaults.json: what transformers' config classes assume for absent keys.

The planner reads hub configs without importing transformers; a config.json leaves out what equals the
class's default, so those defaults are kept as data. Run it after a transformers upgrade:

    python tests/tools/make_model_defaults.py presets/model_defaults.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from math import isfinite
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Keys that never change a shape; leaving them out keeps the table small.
_SHAPELESS = (
    "_range", "_eps", "_epsilon", "_dropout", "_pdrop", "_token_id", "_token_index", "_act", "dropout",
    "_coef", "use_cache", "activation", "_activation", "pretraining_tp", "init_device", "rope_parameters",
    "_std", "_scaling", "_multiplier",
    "_loss", "_softcapping", "_scalar", "_jitter", "_jitter_noise", "_proba",
)  # fmt: skip


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return (
        value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))
    )


def raw_defaults(config_class: type) -> dict[str, Any]:
    """The fields' own defaults, before `__post_init__` derives anything from the given keys."""
    from transformers import PreTrainedConfig

    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.name in base or field.name.endswith(_SHAPELESS):
            continue
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING and _plain(default):
            found[field.name] = list(default) if isinstance(default, tuple) else default
    return found


def _aliases(config_class: type) -> dict[str, Any]:
    aliases = {key: value for key, value in config_class.attribute_map.items() if isinstance(value, str)}
    return {"aliases": aliases} if aliases else {}


def table() -> dict[str, Any]:
    """model_type → its causal class, the blocks FSDP wraps, key aliases, defaults and nested text type."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    names = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    rows: dict[str, Any] = {}
    for model_type in sorted(names):
        config_class = CONFIG_MAPPING[model_type]
        row: dict[str, Any] = {"class": names[model_type]}
        if config_class in AutoModelForCausalLM._model_mapping:
            model_class = AutoModelForCausalLM._model_mapping[config_class]
            row["class"] = model_class.__name__
            row["blocks"] = sorted(model_class._no_split_modules or ())
        row |= _aliases(config_class)
        text = config_class.sub_configs.get("text_config")
        if text is not None and getattr(text, "model_type", ""):
            row["text"] = text.model_type
            if text.model_type not in names:
                rows[text.model_type] = {
                    "class": row["class"],
                    "defaults": raw_defaults(text),
                    **_aliases(text),
                }
        row["defaults"] = raw_defaults(config_class)
        rows[model_type] = row
    return rows


def render() -> str:
    """The table as JSON text, one model type a line."""
    import transformers

    head = json.dumps({"source": f"huggingface/transformers {transformers.__version__}, config classes"})[
        1:-1
    ]
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table().items())]
    return "{" + head + ', "types": {\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
