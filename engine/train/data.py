"""Chat data for training: the shipped set, a local JSONL file or a data set of the hub."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ftdash.engine.train.options import TrainError


def shipped_path() -> Path:
    """The chat set that ships with ftdash, some 300 conversations."""
    return Path(str(files("ftdash.presets") / "chat.jsonl"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The conversations of a file. Raises TrainError naming the file and line of the first that is none."""
    conversations = []
    try:
        with open(path, encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    conversations.append(_conversation(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"cannot read {path}: {error}") from error
    if not conversations:
        raise TrainError(f"{path}: no conversations in it")
    return conversations


def _conversation(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TrainError(f"{where}: not JSON: {error}") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise TrainError(f'{where}: no "messages" list')
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(message.get("content"), str):
            raise TrainError(f'{where}: every message needs a "role" and a "content" text')
    return {"messages": [{"role": m["role"], "content": m["content"]} for m in messages]}


def load(name: str, split: str = "train") -> Any:
    """A datasets.Dataset of conversations or texts from a hub id, a folder, a JSONL path or "" (shipped)."""
    from datasets import Dataset, load_dataset

    if not name or name.endswith((".jsonl", ".json")):
        return Dataset.from_list(read_jsonl(Path(name) if name else shipped_path()))
    try:
        return load_dataset(name, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TrainError(f"--data {name}: {reason}") from error


def is_conversational(dataset: Any) -> bool:
    return "messages" in dataset.column_names
