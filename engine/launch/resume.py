"""Finds the newest checkpoint that was written to its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def is_whole(checkpoint: Path) -> bool:
    """Whether the trainer came to the end of this checkpoint.

    transformers writes trainer_state.json last; torch.distributed.checkpoint writes .metadata last, and
    DeepSpeed names its folder in `latest` after all ranks have written.
    """
    if not (checkpoint / "trainer_state.json").is_file():
        return False
    for shards in checkpoint.glob("*_fsdp_*"):
        if shards.is_dir() and not (shards / ".metadata").is_file():
            return False
    for shards in checkpoint.glob("optimizer_*"):
        if shards.is_dir() and not (shards / ".metadata").is_file():
            return False
    steps = [folder for folder in checkpoint.glob("global_step*") if folder.is_dir()]
    if steps:
        latest = checkpoint / "latest"
        return latest.is_file() and (checkpoint / latest.read_text().strip()).is_dir()
    return True


def whole_checkpoints(output_dir: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of the whole checkpoints below `output_dir`, the highest step first."""
    try:
        found = [
            (int(match[1]), path) for path in output_dir.iterdir() if (match := CHECKPOINT.match(path.name))
        ]
    except OSError:
        return
    yield from (item for item in sorted(found, reverse=True) if is_whole(item[1]))


def last_whole_checkpoint(output_dir: Path) -> Path | None:
    """The whole checkpoint with the highest step below `output_dir`, or None."""
    return next((path for _, path in whole_checkpoints(output_dir)), None)
