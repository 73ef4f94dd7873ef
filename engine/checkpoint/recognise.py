"""What kind of checkpoint a folder is, whether all of it is there, and how many ranks wrote it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftdash.engine.checkpoint.dcp import shards_in
from ftdash.engine.checkpoint.weights import BrokenWeightsError, adapter_problem, held, weights_problem


class CheckpointKind(StrEnum):
    DCP = "dcp"  # torch.distributed.checkpoint shards, as accelerate's FSDP2 saves
    DEEPSPEED = "deepspeed"  # one file per rank below global_stepN
    UNIVERSAL = "universal"  # DeepSpeed's universal checkpoint, for any world size
    FULL = "full"  # weights that from_pretrained reads
    ADAPTER = "adapter"  # a PEFT adapter folder
    FSDP_FULL = "fsdp-full"  # one torch file of the gathered model, as accelerate names it
    FSDP_LOCAL = "fsdp-local"  # FSDP1's LOCAL_STATE_DICT: a file per rank, for as many ranks only
    NO_WEIGHTS = "no-weights"  # a trainer's checkpoint-N that holds everything but the model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`shards` is the folder that holds the weights; `ranks` how many wrote it, 0 when it does not matter.

    DeepSpeed's files name two ranks each: `ranks` counts the data-parallel ones, `model_ranks` the
    model-parallel ones (tensor times pipeline). The shards of DCP are re-cut at load: their count says which
    ranks wrote a part, and nothing about how many may read it.
    """

    path: Path
    kind: CheckpointKind
    shards: Path
    ranks: int
    bytes: int
    step: int | None
    problem: str = ""  # why it is half written, empty when whole
    adapter: bool = False  # holds adapters only
    model_ranks: int = 1
    no_optimizer: bool = False  # a trainer's checkpoint of weights alone: going on starts Adam anew

    @property
    def whole(self) -> bool:
        return not self.problem


_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt$")
_FSDP = re.compile(r"pytorch_model_fsdp(?:_\d+)?(?:_rank(\d+))?\.bin$")
# What trainers and accelerate write into a checkpoint beside the weights.
_BESIDE = ("trainer_state.json", "training_args.bin", "scheduler.pt", "scheduler.bin", "optimizer.pt",
           "optimizer.bin", "rng_state*.pth", "random_states_*.pkl")  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz")


def is_checkpoint(path: Path) -> bool:
    return inspect(path) is not None


def inspect(path: Path) -> Checkpoint | None:
    """The checkpoint in `path`: a trainer's checkpoint-N, its inner shard folder, or a model folder."""
    if not path.is_dir():
        return None
    for look in (_deepspeed, _dcp, _adapter, _full, _fsdp_files, _without_weights):
        if found := look(path):
            return found
    return None


def find(root: Path, depth: int = 3) -> list[Checkpoint]:
    """Every checkpoint at or below `root`, in order of step, without the folders inside another one."""
    found: list[Checkpoint] = []

    def walk(folder: Path, left: int) -> None:
        checkpoint = inspect(folder)
        if checkpoint is not None:
            found.append(checkpoint)
            if folder != root or re.search(r"checkpoint-\d+$", folder.name):
                return
        if left:
            for child in sorted(folder.iterdir()):
                own = checkpoint is not None and child == checkpoint.shards
                if child.is_dir() and not own and not child.is_symlink() and not child.name.startswith("."):
                    walk(child, left - 1)

    walk(root, depth)
    return sorted(found, key=lambda checkpoint: (checkpoint.step or 0, str(checkpoint.path)))


def last_whole(root: Path) -> Checkpoint | None:
    """The newest checkpoint that can be resumed from; one without its optimizer only when all lack it."""
    whole = [
        checkpoint
        for checkpoint in find(root)
        if checkpoint.whole and checkpoint.step is not None and not checkpoint.path.name.startswith("tmp-")
    ]
    return max(whole, key=lambda found: (not found.no_optimizer, found.step or 0), default=None)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _step(path: Path) -> int | None:
    match = re.search(r"(?:checkpoint-|global_step|step[-_]?)(\d+)", path.name)
    if match:
        return int(match.group(1))
    state = path / "trainer_state.json"
    try:
        return int(json.loads(state.read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unfinished(path: Path) -> str:
    """Names that a save carries while it is not done."""
    if path.name.startswith(("tmp-", ".tmp")) or path.name.endswith((".tmp", ".partial")):
        return f"{path.name} is the name of a save that did not finish"
    return ""


def _deepspeed(path: Path) -> Checkpoint | None:
    tag_folder = path
    universal = path / "latest_universal"
    if universal.is_file():
        return _universal(path, path / universal.read_text().strip())
    latest = path / "latest"
    problem = ""
    if latest.is_file():
        tag = latest.read_text(errors="replace").strip()
        tag_folder = path / tag
        if not tag or not tag_folder.is_dir():
            problem = f"latest names {tag}, which is not there" if tag else "the file latest is empty"
            return Checkpoint(path, CheckpointKind.DEEPSPEED, path, 0, _size(path), _step(path), problem)
    elif steps := sorted(
        (child for child in path.glob("global_step*") if child.is_dir() and child.name[11:].isdigit()),
        key=lambda child: int(child.name[11:]),
    ):
        tag_folder = steps[-1]
        problem = "the file latest, written last, is missing"
    if (tag_folder / "zero").is_dir() and not any(_OPTIM.search(f.name) for f in tag_folder.iterdir()):
        return _universal(path, tag_folder)
    names = [file.name for file in tag_folder.iterdir() if file.is_file()]
    optim = {(int(match[1]), int(match[2])) for name in names if (match := _OPTIM.search(name))}
    model_files = [match for name in names if (match := _MODEL.match(name))]
    if not optim and not model_files:
        return None
    model = {(int(match[1] or 0), int(match[2])) for match in model_files}
    partitioned = any(match[1] is not None for match in model_files)  # ZeRO-3: each rank has a part
    ranks = {rank for rank, _ in optim} | ({rank for rank, _ in model} if partitioned else set())
    model_ranks = {rank for _, rank in optim | model}
    # A name may hold any number: no more is laid out than a large job could have written.
    columns = min(max(model_ranks) + 1, 2**10)
    rows = min(max(ranks, default=0) + 1, 2**15 // columns)
    grid = {(dp, mp) for dp in range(rows) for mp in range(columns)}
    if partitioned and not optim:
        problem = "no optim_states file: the optimizer's state is missing"
    elif optim and (missing := grid - optim):
        problem = f"optimizer shards of {_rank_names(missing)} are missing"
    elif partitioned and (missing := grid - model):
        problem = f"shards of {_rank_names(missing)} are missing"
    elif model and (missing := {(0, mp) for _, mp in grid} - model):
        problem = f"model_states of {_rank_names(missing)} are missing"
    elif not model:
        problem = "no model_states file"
    elif empty := [name for name in names if name.endswith(".pt") and not (tag_folder / name).stat().st_size]:
        problem = problem or f"{empty[0]} is empty"
    return Checkpoint(
        path,
        CheckpointKind.DEEPSPEED,
        tag_folder,
        len(ranks),
        _size(tag_folder),
        _step(path) if _step(path) is not None else _step(tag_folder),
        _unfinished(path) or problem,
        (path / "adapter_config.json").is_file(),
        len(model_ranks),
    )


def _rank_names(missing: set[tuple[int, int]]) -> str:
    """Missing (data-parallel, model-parallel) ranks in words, the first eight by number."""
    plain = all(mp == 0 for _, mp in missing)
    named = [str(dp) if plain else f"{dp} (mp_rank_{mp:02d})" for dp, mp in sorted(missing)]
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"ranks {', '.join(named[:8])}{more}"


def _universal(path: Path, shards: Path) -> Checkpoint:
    problem = "" if (shards / "zero").is_dir() else f"{shards.name} holds no zero folder"
    size = _size(shards) if shards.is_dir() else 0
    step = _step(path) if _step(path) is not None else _step(shards)
    return Checkpoint(path, CheckpointKind.UNIVERSAL, shards, 0, size, step, _unfinished(path) or problem)


def _dcp(path: Path) -> Checkpoint | None:
    folders = [path, *(child for child in sorted(path.glob("pytorch_model_fsdp_*")) if child.is_dir())]
    for folder in folders:
        shards = shards_in(folder)
        if shards is None:
            continue
        problem = shards.problem or ("" if shards.holds_tensors else "its shards hold no tensor")
        optimizers = [child for child in sorted(path.glob("optimizer_*")) if child.is_dir()]
        for optimizer in optimizers:
            state = shards_in(optimizer)
            wrong = ".metadata, written last, is missing" if state is None else state.problem
            problem = problem or (f"{optimizer.name}/{wrong}" if wrong else "")
        return Checkpoint(
            path,
            CheckpointKind.DCP,
            folder,
            shards.ranks,
            _size(path),
            _step(path),
            _unfinished(path) or problem,
            shards.adapter,
            no_optimizer=(path / "trainer_state.json").is_file()
            and not (optimizers or (path / "optimizer.bin").is_file()),
        )
    return None


def _adapter(path: Path) -> Checkpoint | None:
    if not (path / "adapter_config.json").is_file():
        return None
    problem = _unfinished(path) or adapter_problem(path)
    return _trainers_own(path, CheckpointKind.ADAPTER, problem)


def _full(path: Path) -> Checkpoint | None:
    problem = weights_problem(path)
    if problem is None:
        return None
    if not problem and not (path / "config.json").is_file():
        problem = "no config.json: from_pretrained cannot load it"
    elif not problem and not _is_mapping(path / "config.json"):
        problem = "config.json is broken: from_pretrained cannot load it"
    return _trainers_own(path, CheckpointKind.FULL, _unfinished(path) or problem)


def _is_mapping(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8-sig")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _fsdp_files(path: Path) -> Checkpoint | None:
    """What accelerate's FSDP1 saves as torch files: the whole model in one, or each rank's part in its own.

    Names from accelerate/utils/fsdp_utils.py.
    """
    files = {file.name: match[1] for file in path.iterdir() if (match := _FSDP.match(file.name))}
    if not files:
        return None
    ranks = {int(rank) for rank in files.values() if rank is not None}
    problem = ""
    if missing := sorted(set(range(min(max(ranks, default=0), 2**15))) - ranks) if ranks else []:
        problem = f"the files of {_rank_names({(rank, 0) for rank in missing})} are missing"
    for name in sorted(files):
        try:
            held(path / name)
        except BrokenWeightsError as error:
            problem = problem or str(error)
    return Checkpoint(
        path,
        CheckpointKind.FSDP_LOCAL if ranks else CheckpointKind.FSDP_FULL,
        path,
        len(ranks),
        _size(path),
        _step(path),
        _unfinished(path) or problem,
        no_optimizer=(path / "trainer_state.json").is_file() and not any(path.glob("optimizer*")),
    )


def _without_weights(path: Path) -> Checkpoint | None:
    """A folder named as a checkpoint in which the save came to everything but the model."""
    if not re.fullmatch(r"(tmp-)?checkpoint-\d+", path.name):
        return None
    beside = {file.name for name in _BESIDE for file in path.glob(name)}
    others = [file for file in path.iterdir() if file.name not in beside]
    if (others and not beside) or any(file.is_dir() or file.suffix in _WEIGHTS for file in others):
        return None  # weights of a form that is not known here
    problem = _unfinished(path) or "it holds no weights"
    return Checkpoint(path, CheckpointKind.NO_WEIGHTS, path, 0, _size(path), _step(path), problem)


def _trainers_own(path: Path, kind: CheckpointKind, problem: str) -> Checkpoint:
    """Weights as from_pretrained reads them; a trainer's own have the optimizer's state beside them."""
    states = [path / name for name in ("optimizer.pt", "optimizer.bin") if (path / name).is_file()]
    if not problem:
        problem = next((f"{file.name} is empty" for file in states if not file.stat().st_size), "")
    saved_by_trainer = (path / "trainer_state.json").is_file()
    return Checkpoint(
        path,
        kind,
        path,
        0,
        _size(path),
        _step(path),
        problem,
        kind is CheckpointKind.ADAPTER,
        no_optimizer=saved_by_trainer and not states,
    )
