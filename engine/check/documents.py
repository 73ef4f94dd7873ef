"""The files that a check reads: what kind each is, its values, and the line that each value stands on."""

from __future__ import annotations

import io
import json
import re
import tokenize
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from ftdash.engine.configs import torchtitan
from ftdash.engine.foreign import BrokenText, RepeatedKey, parse_json, parse_toml, parse_yaml


class DocumentError(Exception):
    """A file cannot be read or is of no known kind; the text is one line naming it."""


def words(text: str) -> frozenset[str]:
    """The words of a long list of names."""
    return frozenset(text.split())


class Kind(StrEnum):
    ACCELERATE = "accelerate config"
    DEEPSPEED = "DeepSpeed config"
    AXOLOTL = "Axolotl config"
    FSDP = "FSDP arguments"  # the file behind the trainer's --fsdp_config
    TORCHTITAN = "torchtitan job file"
    TRAINER = "trainer arguments"  # TRL, transformers or LLaMA-Factory keys in YAML or JSON
    SCRIPT = "training script"
    SHELL = "shell script"
    PLAN = "plan"
    MODEL = "model config"
    ADAPTER = "adapter config"
    VERSIONS = "requirements"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it was written."""

    value: Any
    where: str


@dataclass(slots=True)
class Document:
    """One file. `data` is its mapping for configs, empty for scripts; `lines` maps key paths to lines."""

    path: Path
    kind: Kind
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    repeated: list[Sourced] = field(default_factory=list)  # keys that the text says twice, as sentences
    as_text: list[tuple[str, ...]] = field(default_factory=list)  # numbers that stand there in quotes

    @property
    def name(self) -> str:
        return self.path.name

    def at(self, line: int) -> str:
        return f"{self.name}:{line}" if line else self.name

    def where(self, *keys: str) -> str:
        """The line of the deepest of `keys` that stands in the file."""
        for end in range(len(keys), 0, -1):
            if line := self.lines.get(keys[:end]):
                return self.at(line)
        return self.name

    def get(self, *keys: str) -> Sourced | None:
        """The value below `keys`, or None where a key is missing or holds null."""
        value: Any = self.data
        for key in keys:
            if not isinstance(value, dict) or value.get(key) is None:
                return None
            value = value[key]
        return Sourced(value, self.where(*keys))

    @property
    def plan(self) -> Any:
        """The plan that a plan's own file is, or that a saved plan or a run.json holds."""
        return self.data.get("plan") if "run" in self.data or "strategy" not in self.data else self.data

    @property
    def distributed_type(self) -> str:
        """What an accelerate file starts, in upper case; YAML reads an unquoted NO as false."""
        value = self.data.get("distributed_type")
        return "NO" if value is False else str(value).upper()

    def section(self, *keys: str) -> dict[str, Any]:
        found = self.get(*keys)
        return found.value if found and isinstance(found.value, dict) else {}


TRAINER_KEYS = words(
    "per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs output_dir "
    "bf16 fp16 gradient_checkpointing max_steps per_device_eval_batch_size lr_scheduler_type save_steps "
    "fsdp fsdp_config deepspeed model_name_or_path dataset_name finetuning_type"
)
_DEEPSPEED_KEYS = words(
    "zero_optimization train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
    "wall_clock_breakdown steps_per_print gradient_clipping"
)
FSDP_SIGNS = words(
    "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap min_num_params fsdp_min_num_params "
    "backward_prefetch fsdp_backward_prefetch xla_fsdp_v2 reshard_after_forward fsdp_reshard_after_forward"
)
_SHELL_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".job", ".slurm.sh")
_COMMAND = re.compile(
    r"^\s*(?:srun\b|torchrun\b|accelerate\s+launch|deepspeed\b|python3?\s|#SBATCH\b)", re.MULTILINE
)


def read_document(path: Path) -> Document:
    """Read and recognise one file or checkpoint folder. Raises DocumentError in one line."""
    if path.is_dir():
        return _read_folder(path)
    try:
        raw = path.read_bytes()
        text = raw.decode(_declared(raw) if path.suffix.lower() == ".py" else "utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: not a text file") from None
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror or error}") from None
    suffix = path.suffix.lower()
    if suffix == ".py":
        return Document(path, Kind.SCRIPT, text)
    if suffix == ".ipynb":
        return Document(path, Kind.SCRIPT, _code_of_notebook(path, text))
    if suffix in _SHELL_SUFFIXES or text.startswith("#!") or "#SBATCH" in text:
        return Document(path, Kind.SCRIPT if re.match(r"#!.*python", text) else Kind.SHELL, text)
    if suffix == ".txt" and re.search(
        r"^\s*[A-Za-z][\w.-]*\s*(\[[^]]*\])?\s*(==|>=|<=|~=|<|>)", text, re.MULTILINE
    ):
        return Document(path, Kind.VERSIONS, text)
    if suffix in (".json", ".yaml", ".yml", ".toml", ".cfg", ".plan", ""):
        return _read_config(path, text)
    if _COMMAND.search(text):
        return Document(path, Kind.SHELL, text)
    raise DocumentError(f"{path}: not recognised: {KNOWN}")


def _declared(raw: bytes) -> str:
    """The encoding that a Python file declares in its first lines, UTF-8 otherwise."""
    try:
        return tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
    except SyntaxError:
        return "utf-8-sig"


KNOWN = (
    "accelerate YAML, DeepSpeed JSON, Axolotl, TRL or LLaMA-Factory YAML, torchtitan TOML, a Python script "
    "or notebook, a shell script, run.json or a plan, a model's config.json, requirements.txt, or a "
    "checkpoint folder"
)


def _read_folder(path: Path) -> Document:
    from ftdash.engine.checkpoint.recognise import is_checkpoint

    if is_checkpoint(path):
        return Document(path, Kind.CHECKPOINT, "")
    raise DocumentError(f"{path}: a folder, and no checkpoint")


def _code_of_notebook(path: Path, text: str) -> str:
    """The code cells one below the other: lines are counted over them. Raises DocumentError."""
    try:
        cells = parse_json(text)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        return "\n".join("".join(source) for source in sources)
    except (BrokenText, KeyError, TypeError) as error:
        raise DocumentError(f"{path}: not a notebook: {' '.join(str(error).split())}") from None


def _read_config(path: Path, text: str) -> Document:
    stripped = text.lstrip()
    is_json = path.suffix.lower() == ".json" or stripped.startswith("{")
    twice = ""
    try:
        if path.suffix.lower() == ".toml":
            data = parse_toml(text)
        else:
            data = parse_json(text) if is_json else parse_yaml(text)
    except RepeatedKey as error:
        data, twice = json.loads(text), str(error)
    except BrokenText as error:
        if not is_json and path.suffix == "" and _COMMAND.search(text):
            return Document(path, Kind.SHELL, text)
        raise DocumentError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        if _COMMAND.search(text):
            return Document(path, Kind.SHELL, text)
        raise DocumentError(f"{path}: {'empty' if data is None else 'not a mapping'}: expected {KNOWN}")
    document = Document(path, _config_kind(path, data), text, data)
    if path.suffix.lower() == ".toml":
        document.lines = _toml_lines(text)
    elif is_json:
        document.lines = _json_lines(text, data)
        if twice:
            document.repeated.append(Sourced(twice, document.name))
    else:
        document.lines, twice_at = _yaml_lines(text)
        document.repeated = [Sourced(sentence, document.at(line)) for line, sentence in twice_at.items()]
    if document.kind in _COERCED:
        document.data = _plain(data, (), document.as_text)
    return document


# Kinds whose readers turn quoted numbers into numbers, wholly or in places.
_COERCED = (Kind.ACCELERATE, Kind.DEEPSPEED, Kind.AXOLOTL, Kind.FSDP, Kind.TRAINER)
_WHOLE = re.compile(r"-?\d{1,18}")
_REAL = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d{1,3})?")


def _plain(value: Any, path: tuple[str, ...], as_text: list[tuple[str, ...]]) -> Any:
    """The value with numbers in quotes as numbers, whose places are noted in `as_text`."""
    if isinstance(value, dict):
        return {key: _plain(item, (*path, str(key)), as_text) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    stripped = value.strip()
    if _WHOLE.fullmatch(stripped):
        as_text.append(path)
        return int(stripped)
    if _REAL.fullmatch(stripped):
        as_text.append(path)
        return float(stripped)
    return value


def _config_kind(path: Path, data: dict[str, Any]) -> Kind:
    keys = set(map(str, data))
    if "peft_type" in keys:
        return Kind.ADAPTER
    if keys & {"distributed_type", "compute_environment", "main_process_port", "machine_rank"}:
        return Kind.ACCELERATE
    saved = isinstance(data.get("plan"), dict) and "strategy" in data["plan"]
    if saved or {"run", "created"} <= keys or ("strategy" in keys and keys & {"gpus", "method", "model"}):
        return Kind.PLAN
    if "base_model" in keys:
        return Kind.AXOLOTL
    if path.suffix.lower() == ".toml" and torchtitan.is_config(data):
        return Kind.TORCHTITAN
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu"}:
        return Kind.DEEPSPEED
    if keys & {"model_type", "architectures", "n_layer", "num_hidden_layers"}:
        return Kind.MODEL
    if len(keys & TRAINER_KEYS) >= 2 or keys & {
        "per_device_train_batch_size",
        "finetuning_type",
        "model_name_or_path",
    }:
        return Kind.TRAINER
    if len(keys & _DEEPSPEED_KEYS) >= 2 or "train_batch_size" in keys:
        return Kind.DEEPSPEED
    # A DeepSpeed file that only sets precision, as in the library's first tutorial.
    if path.suffix == ".json" and any(isinstance(data.get(key), dict) for key in ("fp16", "bf16")):
        return Kind.DEEPSPEED
    if keys & {"fsdp_version", "expert_parallel_size", "tensor_parallel_size"}:
        return Kind.AXOLOTL
    if "fsdp_config" in keys or "deepspeed_config" in keys:
        return Kind.ACCELERATE
    if path.suffix.lower() == ".json" and keys & FSDP_SIGNS:
        return Kind.FSDP
    raise DocumentError(f"{path}: not recognised: {KNOWN}")


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """Lines of plain keys below plain tables, which is all that job files have."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.\-]+)\]", line):
            table = tuple(header[1].split("."))
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w\-]+)\s*=", line):
            lines.setdefault((*table, key[1]), number)
    return lines


def _yaml_lines(text: str) -> tuple[dict[tuple[str, ...], int], dict[int, str]]:
    """Lines of keys; and of keys that a mapping says twice, of which YAML readers keep the last."""
    lines: dict[tuple[str, ...], int] = {}
    twice: dict[int, str] = {}

    def walk(node: yaml.Node, path: tuple[str, ...]) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        own: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in own and name != "<<":
                twice[line] = f"the key {name} stands in lines {own[name]} and {line}: the last one counts"
            own[name] = line
            lines[(*path, name)] = line
            walk(value, (*path, name))

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, ())
    return lines, twice


def _json_lines(text: str, data: dict[str, Any]) -> dict[tuple[str, ...], int]:
    """Lines of JSON keys: keys are searched in document order, which json.loads keeps."""
    lines: dict[tuple[str, ...], int] = {}
    position = 0

    def walk(mapping: dict[str, Any], path: tuple[str, ...]) -> None:
        nonlocal position
        for key, value in mapping.items():
            match = re.compile(re.escape(json.dumps(key)) + r"\s*:").search(text, position)
            if match:
                position = match.end()
                lines[(*path, key)] = text.count("\n", 0, match.start()) + 1
            if isinstance(value, dict):
                walk(value, (*path, key))

    walk(data, ())
    return lines
