"""Values out of files that other programs define, held to what their library would take."""

from __future__ import annotations

from typing import Any


class BadValue(ValueError):
    """A value that the library of the file would refuse: one line naming its key."""


def mapping(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A mapping inside the file, empty when absent. Raises BadValue when it is something else."""
    value = data.get(key)
    if value in (None, "", []):
        return {}
    if not isinstance(value, dict):
        raise BadValue(f"{key} is {str(value)[:60]!r}: must be a mapping")
    return value


def whole(data: dict[str, Any], key: str) -> int | None:
    """A positive whole number, None when absent or left to the trainer ("auto"). Raises BadValue."""
    value = data.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value.strip()[:20])  # launchers take quoted numbers for numbers
    if type(value) is not int or value < 1:
        raise BadValue(f"{key} is {str(value)[:60]!r}: must be a whole number from 1")
    return value


def preset(name: str, key: str, notes: list[str]) -> str | None:
    """The preset behind a hub name; a note when there is none."""
    from ftdash.engine.model.load import ModelError, load_preset

    try:
        return load_preset(name).name
    except ModelError:
        notes.append(f"{key} {name} is no preset: give --model or --config")
        return None
