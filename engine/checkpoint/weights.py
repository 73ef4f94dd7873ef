"""Whether weight files are whole, and whether they can hold the model of the config.json beside them."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

_LARGEST_HEADER = 100_000_000  # the format's own limit (huggingface/safetensors)
_LFS = b"version https://git-lfs"
_SHARD = re.compile(r"^(?P<stem>(?:pytorch_)?model)-(?P<n>\d+)-of-(?P<of>\d+)\.(?P<suffix>safetensors|bin)$")
_STORAGE = re.compile(r"(^|/)data/\d+$")
# Files that hold less than this share of the parameters lack some, whatever small ones are not stored.
_LEAST_SHARE = 0.9
# Two bits a weight, the tightest packing that transformers loads; half precision where nothing is packed.
_PACKED_BYTES, _PLAIN_BYTES = 0.25, 2


class BrokenWeightsError(Exception):
    """A weight file cannot be whole; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a file holds: bytes of tensors, and what only safetensors tell without reading them."""

    bytes: int
    elements: int | None = None  # None when unknown, or when several weights may share an element
    names: frozenset[str] | None = None
    empty: int = 0  # weights without an element


def held(file: Path) -> Held:
    """What a weight file holds, by its header and directory alone. Raises BrokenWeightsError."""
    size = file.stat().st_size
    if not size:
        raise BrokenWeightsError(f"{file.name} is empty")
    with file.open("rb") as handle:
        start = handle.read(len(_LFS))
    if start == _LFS:
        raise BrokenWeightsError(f"{file.name} is a Git LFS pointer, not the weights: git lfs pull")
    return _safetensors(file, size) if file.suffix == ".safetensors" else _pickled(file, size, start)


def _safetensors(file: Path, size: int) -> Held:
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise BrokenWeightsError(f"{file.name} is cut short")
        if length > _LARGEST_HEADER:
            raise BrokenWeightsError(f"{file.name} has a broken header")
        try:
            header = json.loads(handle.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            counts = {name: prod(entry["shape"]) for name, entry in entries.items()}
            packed = any(entry["dtype"] in ("U8", "I8", "I32", "F4", "F6") for entry in entries.values())
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            raise BrokenWeightsError(f"{file.name} has a broken header") from None
    if not entries:
        raise BrokenWeightsError(f"{file.name} holds no tensor")
    if end + 8 + length > size:
        raise BrokenWeightsError(f"{file.name} is cut short")
    return Held(
        end,
        None if packed else sum(counts.values()),
        frozenset(entries),
        sum(not count for name, count in counts.items() if name.endswith("weight") or "lora_" in name),
    )


def _pickled(file: Path, size: int, start: bytes) -> Held:
    """torch.save writes a zip with one entry a storage, its directory last; before 1.6 it wrote a pickle."""
    if start.startswith(b"\x80"):
        return Held(size)
    if not start.startswith(b"PK"):
        raise BrokenWeightsError(f"{file.name} is no file of torch.save")
    try:
        with zipfile.ZipFile(file) as archive:
            storages = [entry.file_size for entry in archive.infolist() if _STORAGE.search(entry.filename)]
    except (zipfile.BadZipFile, ValueError, OSError):
        raise BrokenWeightsError(f"{file.name} is cut short") from None
    return Held(sum(storages))


def weights_problem(folder: Path) -> str | None:
    """Why the weights in a model folder are not whole, empty when they are, None when it holds none."""
    for stem in ("model", "pytorch_model"):
        for suffix in ("safetensors", "bin"):
            index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
            if index.is_file():
                return _indexed(folder, index)
            if single.is_file():
                return _problem_of(folder, {single.name: frozenset()})
    shards = [match for file in sorted(folder.iterdir()) if (match := _SHARD.match(file.name))]
    if not shards:
        return None
    first = shards[0]
    written = {int(match["n"]) for match in shards}
    missing = sorted(set(range(1, min(int(first["of"]), 10_000) + 1)) - written)
    if missing:
        return f"{first['stem']}-{missing[0]:05d}-of-{first['of']}.{first['suffix']} is missing"
    return f"{first['stem']}.{first['suffix']}.index.json, written last, is missing"


def _indexed(folder: Path, index: Path) -> str:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, name in weight_map.items():
            files.setdefault(str(name), set()).add(str(tensor))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return f"{index.name} is broken"
    if not files:
        return f"{index.name} lists no weights"
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        return f"{missing[0]} is missing"
    return _problem_of(folder, {name: frozenset(names) for name, names in sorted(files.items())})


def _problem_of(folder: Path, files: dict[str, frozenset[str]]) -> str:
    """The first problem of `files`, each with the tensors that an index expects in it."""
    found: list[Held] = []
    for name, expected in files.items():
        try:
            content = held(folder / name)
        except BrokenWeightsError as error:
            return str(error)
        if content.names is not None and (absent := expected - content.names):
            return f"{name} lacks {min(absent)}, which the index lists there"
        found.append(content)
    return _placeholders(found) or _too_little(folder, found)


def _placeholders(found: list[Held]) -> str:
    empty = sum(content.empty for content in found)
    return f"{empty} of its tensors are empty, as ZeRO-3 leaves them on a rank" if empty else ""


def _too_little(folder: Path, found: list[Held]) -> str:
    """Weights against the parameters that config.json asks for, where the shape can be read from it."""
    from ftdash.engine.model.load import ModelError, load_config_file

    try:
        params = load_config_file(folder).total_params
    except ModelError:
        return ""
    quantised = _is_quantised(folder)
    if not quantised and all(content.elements is not None for content in found):
        elements = sum(content.elements or 0 for content in found)
        if elements < _LEAST_SHARE * params:
            return f"its files hold {_count(elements)} of the {_count(params)} parameters of config.json"
        return ""
    least = (_PACKED_BYTES if quantised else _PLAIN_BYTES) * params
    size = sum(content.bytes for content in found)
    if size < _LEAST_SHARE * least and (quantised or not any(content.names for content in found)):
        return (
            f"its files hold {size / 2**20:,.2f} MiB, and the {_count(params)} parameters of config.json "
            f"take {least / 2**20:,.0f} MiB at {'two bits' if quantised else '16 bits'} each"
        )
    return ""


def _is_quantised(folder: Path) -> bool:
    """By config.json, or by the file that AutoGPTQ and AutoAWQ once wrote beside it."""
    if any((folder / name).is_file() for name in ("quantize_config.json", "quant_config.json")):
        return True
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("quantization_config"))


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return f"{parameters:,}"


def adapter_problem(folder: Path) -> str:
    """Why the weights of a PEFT adapter folder are not whole, empty when they are."""
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (file := folder / name).is_file():
            try:
                content = held(file)
            except BrokenWeightsError as error:
                return str(error)
            if not content.bytes:
                return f"{name} holds no weights: its tensors are empty, as ZeRO-3 leaves them on a rank"
            return _placeholders([content])
    return "no adapter_model.safetensors beside adapter_config.json"
