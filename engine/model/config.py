"""Reads one hub config.json: the key itself, its aliases, or the default of the transformers class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from ftdash import presets

# Beyond any model that exists, and far below what would overflow or stall the planner.
LARGEST_SIZE = 10**8
LARGEST_TOTAL = 10**14


class ModelError(ValueError):
    """A model that cannot be read: one line naming the flag, file or key, and what would be valid."""


class TypeDefaults(msgspec.Struct, frozen=True):
    """What the transformers config class of one `model_type` assumes, as raw field defaults."""

    model_class: str = msgspec.field(name="class", default="")
    blocks: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    text: str = ""
    defaults: dict[str, Any] = {}


class _DefaultsTable(msgspec.Struct, frozen=True):
    source: str
    types: dict[str, msgspec.Raw]


@cache
def _table() -> dict[str, msgspec.Raw]:
    raw = (presets.FOLDER / "model_defaults.json").read_bytes()
    return msgspec.json.decode(raw, type=_DefaultsTable).types


# Names that the hub gives to classes that transformers knows under another.
SAME_CLASS = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon", "kimi_k2": "deepseek_v3"}


@cache
def type_defaults(model_type: str) -> TypeDefaults:
    """The defaults of a model type; empty ones for a type that transformers does not have."""
    raw = _table().get(SAME_CLASS.get(model_type, model_type))
    return TypeDefaults() if raw is None else msgspec.json.decode(raw, type=TypeDefaults)


def known_types() -> tuple[str, ...]:
    """Every decoder model type of the transformers release that the table was made from."""
    return tuple(_table())


class HubConfig:
    """Typed reads of a config's keys; every error names the key and where the config came from."""

    def __init__(self, values: Mapping[str, Any], where: str, model_type: str | None = None) -> None:
        self.values = values
        self.where = where
        self.model_type = model_type or str(values.get("model_type", ""))
        self.known = type_defaults(self.model_type)

    def get(self, *keys: str) -> Any:
        """The first of `keys` that the file gives (not null), else the first default that is not null."""
        for key in keys:
            for name in self._spellings(key):
                if self.values.get(name) is not None:
                    return self.values[name]
        for key in keys:
            for name in self._spellings(key):
                if self.known.defaults.get(name) is not None:
                    return self.known.defaults[name]
        return None

    def _spellings(self, key: str) -> tuple[str, ...]:
        """The key, and other names of the same field; the class sets names that are no field last."""
        aliases = self.known.aliases
        names = [key, *(name for name, target in aliases.items() if target == key)]
        if key in aliases:
            names.append(aliases[key])
        return tuple(sorted(names, key=lambda name: name in self.known.defaults))

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def size(self, *keys: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError when missing, not a number, or out of range."""
        return self._whole(keys, default, lowest=1)

    def count(self, *keys: str, default: int | None = None) -> int:
        """A whole number that may be zero."""
        return self._whole(keys, default, lowest=0)

    def _whole(self, keys: tuple[str, ...], default: int | None, lowest: int) -> int:
        value = self.get(*keys)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: key {keys[0]!r} is missing (a whole number from {lowest})")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= LARGEST_SIZE:
            raise ModelError(
                f"{self.where}: key {keys[0]!r} is {value!r}: a whole number from {lowest} to {LARGEST_SIZE}"
            )
        return value

    def number(self, *keys: str, default: float) -> float:
        value = self.get(*keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_SIZE:
            raise ModelError(f"{self.where}: key {keys[0]!r} is {value!r}: a number above 0")
        return float(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.get(*keys)
        if value is None:
            return default
        if not isinstance(value, bool | int):
            raise ModelError(f"{self.where}: key {keys[0]!r} is {value!r}: true or false")
        return bool(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, empty when absent."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
            raise ModelError(f"{self.where}: key {key!r} is {value!r}: a list of whole numbers")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of words such as layer_types, or None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self.where}: key {key!r} is {value!r}: a list of words")
        return tuple(value)

    def nested(self, key: str, model_type: str | None = None) -> HubConfig:
        """A config inside the config, such as MPT's attn_config or a multimodal model's text_config."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            value = {}
        return HubConfig(value, f"{self.where}: {key}", model_type)

    # The widths that every family has.

    @property
    def layers(self) -> int:
        layers = self.size("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if layers > 10_000:
            raise ModelError(f"{self.where}: key 'num_hidden_layers' is {layers}: from 1 to 10000")
        return layers

    @property
    def hidden(self) -> int:
        return self.size("hidden_size", "n_embd", "n_embed", "d_model")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        if self.has("head_dim"):
            return self.size("head_dim")
        if self.hidden < self.heads:
            raise ModelError(
                f"{self.where}: key 'num_attention_heads' is {self.heads}: at most hidden_size {self.hidden}"
            )
        return self.hidden // self.heads

    @property
    def width(self) -> int:
        return self.size("intermediate_size")

    @property
    def vocab(self) -> int:
        return self.size("vocab_size")

    @property
    def tied(self) -> bool:
        return self.flag("tie_word_embeddings", default=True)
