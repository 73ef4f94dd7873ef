"""Whether a checkpoint loads, and whether two of them hold the same tensors, bit by bit."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftdash.engine.checkpoint.convert import ConvertError, Target, convert
from ftdash.engine.checkpoint.recognise import Checkpoint, CheckpointKind, inspect

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tensors of two checkpoints by name. Equal means the same shape and the same values, after widening."""

    equal: int
    different: tuple[str, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    largest_difference: float
    dtypes: tuple[str, str]  # of the two sides

    @property
    def same(self) -> bool:
        return not (self.different or self.only_left or self.only_right) and self.equal > 0


def tensors_of(checkpoint: Checkpoint, scratch: Path) -> dict[str, torch.Tensor]:
    """All weights by name. Shards are first gathered into `scratch` with the libraries' own tools."""
    if checkpoint.kind is CheckpointKind.UNIVERSAL:
        return _universal_tensors(checkpoint.shards)
    return _tensors_in(_gathered(checkpoint, scratch))


def _gathered(checkpoint: Checkpoint, scratch: Path) -> Path:
    """The folder of safetensors of a checkpoint, converted into `scratch` where it is not one itself."""
    if checkpoint.kind in (CheckpointKind.FULL, CheckpointKind.ADAPTER):
        return checkpoint.path
    folder = scratch / "gathered"
    if not folder.exists():
        convert(checkpoint, folder, Target.ADAPTER if checkpoint.adapter else Target.FULL)
    return folder


def _tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        import torch as torch_module

        for file in sorted(folder.glob("*.bin")):
            if file.name != "training_args.bin":
                tensors |= torch_module.load(file, map_location="cpu", weights_only=True)
    if not tensors:
        raise ConvertError(f"{folder}: no weights to compare")
    return tensors


def _universal_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """fp32 masters of a universal checkpoint: zero/NAME/fp32.pt."""
    import torch as torch_module

    found = {}
    for file in sorted((folder / "zero").glob("*/fp32.pt")):
        stored = torch_module.load(file, map_location="cpu", weights_only=False)
        found[file.parent.name] = stored["param"] if isinstance(stored, dict) else stored
    return found


def compare(left: Checkpoint, right: Checkpoint) -> Comparison:
    """Compare weights tensor by tensor; a tied head that one side leaves out is no difference.

    Two models may name the same weights differently (experts one by one as on the hub, or as the stacks that
    the class holds): then both are compared as from_pretrained loads them.
    """
    with tempfile.TemporaryDirectory(prefix="ftdash-verify-") as name:
        scratch = (Path(name) / "left", Path(name) / "right")
        for folder in scratch:
            folder.mkdir()
        found = compare_tensors(tensors_of(left, scratch[0]), tensors_of(right, scratch[1]))
        if not (found.only_left or found.only_right) or CheckpointKind.UNIVERSAL in (left.kind, right.kind):
            return found
        folders = [_gathered(side, folder) for side, folder in zip((left, right), scratch, strict=True)]
        if left.adapter or right.adapter or not all((folder / "config.json").is_file() for folder in folders):
            return found
        return compare_tensors(_as_loaded(folders[0]), _as_loaded(folders[1]))


def _as_loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights under the class's own names. Raises ConvertError when the folder does not fill it."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if problems := sorted([*info["missing_keys"], *info["unexpected_keys"]]):
        raise ConvertError(f"{folder}: {len(problems)} weights missing or unexpected, first {problems[0]}")
    return dict(model.state_dict())


def compare_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Comparison:
    import torch as torch_module

    different, largest, equal = [], 0.0, 0
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name], second[name]
        if a.shape != b.shape:
            different.append(name)
            continue
        wide = torch_module.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
        if torch_module.equal(a, b):
            equal += 1
            continue
        different.append(name)
        largest = max(largest, float((a.double() - b.double()).abs().max()))
    tied = {"lm_head.weight"}
    return Comparison(
        equal,
        tuple(different),
        tuple(sorted(first.keys() - second.keys() - tied)),
        tuple(sorted(second.keys() - first.keys() - tied)),
        largest,
        (_dtypes(first), _dtypes(second)),
    )


def _dtypes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))


def loads(path: Path, base: Path | None = None) -> list[str]:
    """Load a full or adapter folder as a user would, and generate one token. Raises ConvertError.

    The result says what was shown, as sentences.
    """
    checkpoint = inspect(path)
    if checkpoint is None or checkpoint.kind not in (CheckpointKind.FULL, CheckpointKind.ADAPTER):
        raise ConvertError(f"{path}: no model that from_pretrained loads; convert it first")
    if not checkpoint.whole:
        raise ConvertError(f"{path}: {checkpoint.problem}")
    import torch as torch_module
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if checkpoint.kind is CheckpointKind.ADAPTER:
        from peft import AutoPeftModelForCausalLM, PeftModel

        if base is not None:
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(path))
        else:
            model = AutoPeftModelForCausalLM.from_pretrained(str(path))
        said = [f"{path.name} loads as an adapter"]
    else:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        problems = [*info["missing_keys"], *info["unexpected_keys"]]
        if problems:
            raise ConvertError(
                f"{path}: {len(problems)} weights missing or unexpected, first {sorted(problems)[0]}"
            )
        said = [f"{path.name} loads with from_pretrained, no weight missing"]
    tokenizer = None
    for folder in (path, base):
        if folder is not None and (Path(folder) / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            break
    prompt = tokenizer("Hello", return_tensors="pt").input_ids if tokenizer else torch_module.tensor([[0]])
    with torch_module.no_grad():
        made = model.generate(input_ids=prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    if made.shape[1] < prompt.shape[1] + 1:
        raise ConvertError(f"{path}: generated no token")
    return [*said, f"it generates a token ({int(made[0, -1])})"]


def adapters_learned(folder: Path) -> str:
    """That every adapter in a PEFT folder moved: LoRA's B matrices start at zero. Raises ConvertError."""
    tensors = {name: tensor for name, tensor in _tensors_in(folder).items() if "lora_B" in name}
    still = [name for name, tensor in tensors.items() if not bool(tensor.any())]
    if still or not tensors:
        raise ConvertError(
            f"{folder}: {len(still)} of {len(tensors)} adapters did not learn, first {still[:1]}"
        )
    return f"{len(tensors)} adapters learned: none of their B matrices is zero any more"
