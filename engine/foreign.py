"""Parses JSON, YAML and TOML that somebody else wrote: what is wrong is one line, and never a hang."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import yaml

# Far beyond any training config; a file that repeats anchors reaches it within a few lines.
LARGEST_NODES = 200_000


class BrokenText(ValueError):
    """A text that cannot be parsed, or that expands without end."""


class RepeatedKey(BrokenText):
    """A mapping says one key twice: the text can be read, and half of it counts for nothing."""


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises BrokenText."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise BrokenText("not JSON: nested too deeply") from None
    except BrokenText:
        raise
    except ValueError as error:  # also a number of thousands of digits
        raise BrokenText(f"not JSON: {_one_line(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping that says each key once: of two, JSON readers keep the last without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        values = " and ".join(_short(value) for key, value in pairs if key == twice)
        raise RepeatedKey(f"the key {_short(twice)} stands there twice, as {values}: keep one")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_toml(text: str) -> dict[str, Any]:
    """The value of a TOML text. Raises BrokenText."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BrokenText("not TOML: nested too deeply") from None
    except ValueError as error:
        raise BrokenText(f"not TOML: {_one_line(error)}") from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, its anchors expanded at most LARGEST_NODES times. Raises BrokenText."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _expanded(root, {}) > LARGEST_NODES:
            raise BrokenText(f"not a config: its anchors expand to more than {LARGEST_NODES:,} values")
        return loader.construct_document(root)
    except RecursionError:
        raise BrokenText("not YAML: nested too deeply") from None
    except BrokenText:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:  # also an impossible date
        raise BrokenText(f"not YAML: {_one_line(error)}") from None


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for; a node that holds itself has no end."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST_NODES + 1  # until counted: met again below means that it holds itself
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = count = 1 + sum(_expanded(child, known) for child in children)
    return count


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
