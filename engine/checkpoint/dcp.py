"""What a folder of torch.distributed.checkpoint shards holds, and whether its files are all there."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DISTCP = re.compile(r"__(\d+)_(\d+)\.distcp$")


@dataclass(frozen=True, slots=True)
class Shards:
    """`ranks` wrote a part; `problem` says why the folder is half written, empty when it is whole."""

    ranks: int
    adapter: bool  # some tensor belongs to an adapter
    holds_tensors: bool
    problem: str


def shards_in(folder: Path) -> Shards | None:
    """The shards in a folder; None when it holds none."""
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.distcp") if _DISTCP.search(file.name)}
    metadata = folder / ".metadata"
    if not sizes and not metadata.is_file():
        return None
    named = _strings(metadata)
    files = sorted(name for name in named or () if _DISTCP.search(name))
    ends = _ends(metadata)
    if not metadata.is_file():
        problem = ".metadata, written last, is missing"
    elif named is None:
        problem = ".metadata is broken"
    elif missing := [name for name in files if name not in sizes]:
        problem = f"{missing[0]} is missing"
    elif files and not any(sizes.values()):
        problem = "its shards hold no tensor"
    elif empty := [name for name in files if not sizes[name]]:
        problem = f"{empty[0]} is empty"
    elif cut := [name for name in files if sizes[name] < ends.get(name, 0)]:
        problem = f"{cut[0]} is cut short"
    else:
        problem = ""
    ranks = {int(match[1]) for name in sizes if (match := _DISTCP.search(name))}
    adapter = any("lora_" in name for name in named or ())
    return Shards(len(ranks), adapter, any(sizes.values()), problem)


def _strings(metadata: Path) -> set[str] | None:
    """Every string in the pickled metadata, tensor and file names among them. None: missing or broken."""
    try:
        operations = pickletools.genops(metadata.read_bytes())
        return {argument for _, argument, _ in operations if isinstance(argument, str)}
    except (ValueError, OSError, IndexError):
        return None


def _ends(metadata: Path) -> dict[str, int]:
    """Where the last item of each file ends, in bytes, as far as the metadata tells."""
    try:
        reader = _Inert(io.BytesIO(metadata.read_bytes()))
        reader.load()
    except Exception:  # a foreign pickle fails in as many ways as there are opcodes; its names were read
        return {}
    ends: dict[str, int] = {}
    for item in reader.made:
        stored = vars(item)
        name, offset, length = (stored.get(key) for key in ("relative_path", "offset", "length"))
        if isinstance(name, str) and isinstance(offset, int) and isinstance(length, int):
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


class _Inert(pickle.Unpickler):
    """Reads a pickle without running anything of it: every class and function in it is a plain record."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        made = self.made

        class Record:
            def __init__(self, *given: Any, **named: Any) -> None:
                pass

            def __setstate__(self, state: Any) -> None:
                vars(self).update(state if isinstance(state, dict) else {})
                made.append(self)

        return dict if (module, name) == ("collections", "OrderedDict") else Record

    def persistent_load(self, pid: Any) -> Any:
        return None
