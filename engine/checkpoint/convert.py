"""Turns one kind of checkpoint into another with the libraries' own tools, all or nothing.

A result is built beside its final name and renamed at the end: a killed conversion leaves the source
untouched and nothing under the final name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftdash.engine.checkpoint.recognise import Checkpoint, CheckpointKind, inspect

# What from_pretrained needs beside the weights.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
)
# Trainer files that a resume reads, whatever the weights' kind.
_TRAINER_FILES = re.compile(
    r"(trainer_state\.json|scheduler\.pt|training_args\.bin|rng_state.*\.pth|.*_config\.json|config\.json|zero_to_fp32\.py"
    r"|tokenizer.*|special_tokens_map\.json|chat_template.*)$"
)


class Target(StrEnum):
    FULL = "full"  # safetensors that from_pretrained loads
    ADAPTER = "adapter"  # a PEFT folder
    MERGED = "merged"  # adapters folded into their base
    UNIVERSAL = "universal"  # DeepSpeed, for any number of ranks


class ConvertError(Exception):
    """The conversion cannot be done, or was not; the text is one line with the reason."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came out, and what a person should know of it."""

    path: Path
    target: Target
    notes: tuple[str, ...] = ()


def default_target(checkpoint: Checkpoint) -> Target:
    """Adapters stay adapters, everything else becomes full weights."""
    return Target.ADAPTER if checkpoint.adapter else Target.FULL


def gather_bytes(checkpoint: Checkpoint, target: Target) -> int:
    """Host memory that the conversion needs: all weights at once, and a copy while they are written.

    A DeepSpeed checkpoint holds fp32 masters beside Adam's two moments: about a third of its bytes are the
    weights, but the tool reads every optimizer shard whole.
    """
    if checkpoint.kind is CheckpointKind.DEEPSPEED:
        return checkpoint.bytes if target is Target.FULL else checkpoint.bytes // 2
    weights = sum(file.stat().st_size for file in checkpoint.shards.iterdir() if file.is_file())
    return 2 * weights


def convert(
    checkpoint: Checkpoint,
    out: Path,
    target: Target | None = None,
    *,
    base: Path | None = None,
    available_bytes: int | None = None,
) -> Conversion:
    """Convert to a new folder `out`. `base` holds config and tokenizer (and the base model for `merged`).

    `available_bytes` set: refuse before starting when the gather would need more. Raises ConvertError.
    """
    target = target or default_target(checkpoint)
    if out.exists():
        raise ConvertError(f"{out} exists: conversions never overwrite, name a new folder")
    if not checkpoint.whole:
        raise ConvertError(f"{checkpoint.path} is half written: {checkpoint.problem}")
    needed = gather_bytes(checkpoint, target)
    if available_bytes is not None and needed > available_bytes:
        raise ConvertError(
            f"{checkpoint.path.name} needs about {needed / 2**30:.1f} GiB of host memory to gather, "
            f"{available_bytes / 2**30:.1f} GiB are free: convert it on a larger host"
        )
    side = _side_folder(checkpoint, base)
    with _beside(out) as scratch:
        notes = _write(checkpoint, target, scratch, side, base)
        if target is not Target.UNIVERSAL:
            made = inspect(scratch)
            if made is None or not any(scratch.glob("*.safetensors")):
                raise ConvertError(f"the tool wrote no weights for {checkpoint.path}")
            # A missing config is told as a note; weights that are not all there are a failure.
            if made.problem and "config.json" not in made.problem:
                raise ConvertError(f"the tool's result for {checkpoint.path} is not whole: {made.problem}")
        os.rename(scratch, out)
    return Conversion(out, target, tuple(notes))


def _write(
    checkpoint: Checkpoint, target: Target, scratch: Path, side: Path | None, base: Path | None
) -> list[str]:
    kind = checkpoint.kind
    if target is Target.UNIVERSAL:
        if kind is not CheckpointKind.DEEPSPEED:
            raise ConvertError(
                f"{checkpoint.path} is {kind}: only DeepSpeed checkpoints become universal ones"
            )
        return _universal(checkpoint, scratch)
    if target is Target.MERGED:
        return _merged(checkpoint, scratch, base)
    if kind is CheckpointKind.DCP:
        _run([sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights",
              str(checkpoint.shards), str(scratch)])  # fmt: skip
    elif kind is CheckpointKind.DEEPSPEED:
        extra = ["--exclude_frozen_parameters"] if target is Target.ADAPTER else []
        _run([sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(checkpoint.path), str(scratch),
              "--safe_serialization", *_tag(checkpoint), *extra])  # fmt: skip
    elif kind is CheckpointKind.FSDP_FULL:
        _torch_file(next(checkpoint.path.glob("pytorch_model_fsdp*.bin")), scratch)
    elif kind is CheckpointKind.FSDP_LOCAL:
        raise ConvertError(
            f"{checkpoint.path} is a LOCAL_STATE_DICT: only {checkpoint.ranks} ranks with the same FSDP "
            "wrapping can load it; resume with them and save with SHARDED_STATE_DICT"
        )
    else:
        raise ConvertError(f"{checkpoint.path} is {kind} already: nothing to convert")
    if target is Target.ADAPTER:
        return _adapter_folder(scratch, side)
    if _has_adapters(scratch):
        raise ConvertError(f"{checkpoint.path} holds adapters: convert it to adapter, then to merged")
    return _lay_side_files(scratch, side)


def _torch_file(file: Path, out: Path) -> None:
    """A gathered state dict as safetensors, tied weights once."""
    import torch
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True), out)


def _tag(checkpoint: Checkpoint) -> list[str]:
    return ["--tag", checkpoint.shards.name] if checkpoint.shards != checkpoint.path else []


def _universal(checkpoint: Checkpoint, scratch: Path) -> list[str]:
    """A checkpoint folder of its own: universal shards, the tag file, and the trainer's files."""
    if checkpoint.shards == checkpoint.path:
        raise ConvertError(
            f"{checkpoint.path}: give the folder that holds global_stepN, with its latest file"
        )
    name = f"{checkpoint.shards.name}_universal"
    # --inject_missing_state: client optimizers write no universal information of their own.
    _run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
          "--input_folder", str(checkpoint.shards),
          "--output_folder", str(scratch / name), "--inject_missing_state"])  # fmt: skip
    (scratch / "latest_universal").write_text(name)
    for file in checkpoint.path.iterdir():
        if file.is_file() and _TRAINER_FILES.match(file.name):
            shutil.copy2(file, scratch / file.name)
    if not (scratch / name / "zero").is_dir():
        raise ConvertError(f"ds_to_universal wrote no zero folder for {checkpoint.path}")
    return ['resume from it with "checkpoint": {"load_universal": true} in the DeepSpeed JSON']


def _merged(checkpoint: Checkpoint, scratch: Path, base: Path | None) -> list[str]:
    if checkpoint.kind is not CheckpointKind.ADAPTER:
        raise ConvertError(f"{checkpoint.path} is {checkpoint.kind}: only an adapter folder can be merged")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(
        base or json.loads((checkpoint.path / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConvertError(
            f"base model {source}: {str(error).splitlines()[0]}; name it with --base"
        ) from None
    with torch.no_grad():
        merged = PeftModel.from_pretrained(model, str(checkpoint.path)).merge_and_unload()
    merged.save_pretrained(scratch)
    for folder in (checkpoint.path, source):
        with contextlib.suppress(OSError, ValueError):
            AutoTokenizer.from_pretrained(folder).save_pretrained(scratch)
            break
    return [f"adapters folded into {source}"]


def _adapter_folder(scratch: Path, side: Path | None) -> list[str]:
    """PEFT's layout: its tensor names lack the adapter's name, and adapter_config.json stands beside them."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for file in sorted(scratch.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if "lora_" in name or "modules_to_save" in name:
                clean = re.sub(r"\.(lora_[A-Za-z_]+|modules_to_save)\.default(?=\.|$)", r".\1", name)
                tensors[clean if clean.startswith("base_model.") else f"base_model.model.{clean}"] = tensor
        file.unlink()
    for index in scratch.glob("*.index.json"):
        index.unlink()
    if not tensors:
        raise ConvertError("no adapter tensors in this checkpoint: convert it to full")
    save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
    config = side / "adapter_config.json" if side else None
    if config is None or not config.is_file():
        raise ConvertError(
            "no adapter_config.json beside this checkpoint: name a folder that has it with --base"
        )
    shutil.copy2(config, scratch / "adapter_config.json")
    return [f"adapter_config.json from {side}"]


def _has_adapters(folder: Path) -> bool:
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            if any("lora_" in name for name in handle.keys()):  # noqa: SIM118
                return True
    return False


def _lay_side_files(scratch: Path, side: Path | None) -> list[str]:
    if side is None:
        return [
            "no config.json was found beside this checkpoint: from_pretrained needs one, name it with --base"
        ]
    copied = [name for name in _SIDE_FILES if (side / name).is_file() and not (scratch / name).exists()]
    for name in copied:
        shutil.copy2(side / name, scratch / name)
    return [f"config and tokenizer from {side}"]


def _side_folder(checkpoint: Checkpoint, base: Path | None) -> Path | None:
    """Where config, tokenizer and adapter_config stand: given, in the checkpoint, or in a sibling export."""
    parent = checkpoint.path.parent
    candidates = [base] if base else [checkpoint.path, parent / "final", parent, parent.parent / "final"]
    wanted = "adapter_config.json" if checkpoint.adapter else "config.json"
    for name in (wanted, "adapter_config.json", "config.json"):
        for folder in candidates:
            if folder is not None and (folder / name).is_file():
                return folder
    if base is not None:
        raise ConvertError(f"--base {base}: neither config.json nor adapter_config.json in it")
    return None


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ConvertError(f"{argv[2]} failed ({done.returncode}): {lines[-1] if lines else 'no message'}")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A scratch folder in `out`'s own folder, so that the rename at the end is one step."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise ConvertError(f"{out.parent}: {error.strerror or error}") from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
