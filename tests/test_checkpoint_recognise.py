"""A checkpoint folder is known for what it is, and a half-written one never passes for a whole one."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from ftdash.engine.checkpoint.convert import ConvertError, convert
from ftdash.engine.checkpoint.recognise import CheckpointKind, find, inspect, last_whole
from ftdash.tui.cli import UserError, run


def safetensors(path: Path, *, tensors: int = 1, cut: int = 0) -> None:
    """A real file of the format, with float32 tensors of four elements, made without torch."""
    header = {
        f"w{n}": {"dtype": "F32", "shape": [4], "data_offsets": [16 * n, 16 * n + 16]} for n in range(tensors)
    }
    raw = json.dumps(header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(16 * tensors)
    path.write_bytes(data[: len(data) - cut])


def full(folder: Path, **changes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    safetensors(folder / "model.safetensors", **changes)
    return folder


def dcp(folder: Path, ranks: int = 2, names: tuple[str, ...] = ("model.embed.weight",)) -> Path:
    shards = folder / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for name in files:
        (shards / name).write_bytes(b"x")
    (shards / ".metadata").write_bytes(pickle.dumps({"tensors": list(names), "files": files}))
    return folder


def deepspeed(folder: Path, ranks: int = 4, stage: int = 3, step: int = 20) -> Path:
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    for rank in range(ranks):
        (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x")
        if stage == 3:
            (tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").write_bytes(b"x")
    if stage < 3:
        (tag / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (folder / "latest").write_text(tag.name)
    return folder


def adapter(folder: Path, **changes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    safetensors(folder / "adapter_model.safetensors", **changes)
    return folder


def with_optimizer(folder: Path) -> Path:
    dcp(folder)
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "optimizer_0")
    return folder


def torch_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", bytes(16))


def fsdp_local(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for rank in range(3):
        torch_file(folder / f"pytorch_model_fsdp_rank{rank}.bin")
    return folder


def fsdp_full(folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch_file(folder / "pytorch_model_fsdp.bin")
    return folder


def trainers(folder: Path) -> Path:
    full(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 20}')
    (folder / "optimizer.pt").write_bytes(b"x")
    return folder


def universal(folder: Path) -> Path:
    (folder / "global_step20_universal" / "zero" / "w").mkdir(parents=True)
    (folder / "latest_universal").write_text("global_step20_universal")
    return folder


@pytest.mark.parametrize(
    ("make", "kind", "ranks"),
    [
        (full, CheckpointKind.FULL, 0),
        (dcp, CheckpointKind.DCP, 2),
        (deepspeed, CheckpointKind.DEEPSPEED, 4),
        (adapter, CheckpointKind.ADAPTER, 0),
        (universal, CheckpointKind.UNIVERSAL, 0),
        (lambda folder: deepspeed(folder, 8, stage=2), CheckpointKind.DEEPSPEED, 8),
        (fsdp_local, CheckpointKind.FSDP_LOCAL, 3),
        (fsdp_full, CheckpointKind.FSDP_FULL, 0),
    ],
    ids=["full", "dcp", "zero3", "adapter", "universal", "zero2", "fsdp-local", "fsdp-full"],
)
def test_each_kind_is_recognised_with_its_ranks_and_step(make, kind, ranks, tmp_path):
    found = inspect(make(tmp_path / "checkpoint-20"))
    assert found is not None
    assert (found.kind, found.ranks, found.step, found.problem) == (kind, ranks, 20, "")


def test_a_shard_folder_itself_is_a_checkpoint(tmp_path):
    found = inspect(dcp(tmp_path / "checkpoint-20") / "pytorch_model_fsdp_0")
    assert found is not None
    assert found.kind is CheckpointKind.DCP


def test_adapters_in_dcp_shards_are_seen_by_their_names(tmp_path):
    found = inspect(dcp(tmp_path / "checkpoint-1", names=("layers.0.q_proj.lora_A.weight",)))
    assert found is not None
    assert found.adapter


def split(folder: Path) -> Path:
    """ZeRO-1 shards of two data-parallel ranks times three model-parallel ones."""
    tag = deepspeed(folder, ranks=2, stage=1) / "global_step20"
    for mp in (1, 2):
        (tag / f"mp_rank_{mp:02d}_model_states.pt").write_bytes(b"x")
        for rank in range(2):
            (tag / f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt").write_bytes(b"x")
    return folder


def test_model_parallel_shards_are_counted_apart(tmp_path, capsys):
    found = inspect(split(tmp_path / "checkpoint-20"))
    assert found is not None
    assert (found.ranks, found.model_ranks, found.problem) == (2, 3, "")
    assert run(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "2x3 ranks" in capsys.readouterr().out


def test_a_name_with_an_absurd_rank_is_no_reason_to_count_that_far(tmp_path):
    folder = deepspeed(tmp_path / "checkpoint-20")
    far = folder / "global_step20" / "bf16_zero_pp_rank_999999999999_mp_rank_999999999999_optim_states.pt"
    far.write_bytes(b"x")
    found = inspect(folder)
    assert found is not None
    assert not found.whole
    assert len(found.problem) < 300


def remove(name: str):
    def damage(folder: Path) -> None:
        next(folder.rglob(name)).unlink()

    return damage


def remove_all(pattern: str):
    def damage(folder: Path) -> None:
        for file in folder.rglob(pattern):
            file.unlink()

    return damage


def empty(pattern: str):
    def damage(folder: Path) -> None:
        for file in folder.rglob(pattern):
            file.write_bytes(b"")

    return damage


@pytest.mark.parametrize(
    ("make", "damage", "reason"),
    [
        (dcp, remove(".metadata"), "written last"),
        (dcp, remove("__1_0.distcp"), "__1_0.distcp"),
        (dcp, empty("*.distcp"), "no tensor"),
        (dcp, empty(".metadata"), "broken"),
        (deepspeed, remove("*_rank_2_*_optim_states.pt"), "rank"),
        (deepspeed, remove("*_rank_3_*_model_states.pt"), "3"),
        (deepspeed, remove("latest"), "latest"),
        (deepspeed, empty("*_model_states.pt"), "empty"),
        (deepspeed, remove_all("*_optim_states.pt"), "optimizer"),
        (split, remove("*_rank_1_mp_rank_02_optim_states.pt"), "1 (mp_rank_02)"),
        (split, remove("mp_rank_01_model_states.pt"), "mp_rank_01"),
        (dcp, empty("__1_0.distcp"), "__1_0.distcp is empty"),
        (with_optimizer, remove("optimizer_0/__1_0.distcp"), "optimizer_0/__1_0.distcp is missing"),
        (with_optimizer, empty("optimizer_0/.metadata"), "optimizer_0/.metadata is broken"),
        (deepspeed, empty("latest"), "latest is empty"),
        (fsdp_local, remove("*_rank1.bin"), "ranks 1"),
        (fsdp_local, empty("*_rank2.bin"), "rank2.bin is empty"),
        (full, remove("config.json"), "config.json"),
        (full, empty("config.json"), "config.json is broken"),
        (trainers, remove("model.safetensors"), "no weights"),
        (adapter, remove("adapter_model.safetensors"), "adapter_model"),
    ],
)
def test_what_a_killed_save_leaves_is_called_half_written(make, damage, reason, tmp_path):
    folder = make(tmp_path / "checkpoint-20")
    damage(folder)
    found = inspect(folder)
    assert found is not None
    assert not found.whole
    assert reason in found.problem


def test_a_shard_that_ends_before_its_last_tensor_is_cut_short(tmp_path):
    import torch
    from torch.distributed import checkpoint

    folder = tmp_path / "checkpoint-20" / "pytorch_model_fsdp_0"
    checkpoint.save(
        {"model": {"a": torch.ones(64, 64), "b": torch.ones(3)}}, checkpoint_id=folder, no_dist=True
    )
    assert inspect(folder.parent).problem == ""
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert inspect(folder.parent).problem == "__0_0.distcp is cut short"


def test_metadata_that_would_run_code_runs_none(tmp_path):
    folder = dcp(tmp_path / "checkpoint-20")
    touched = tmp_path / "touched"
    metadata = folder / "pytorch_model_fsdp_0" / ".metadata"
    metadata.write_bytes(b"cos\nsystem\n(S'touch " + bytes(touched) + b"'\ntR.")
    assert inspect(folder) is not None
    assert not touched.exists()


def test_other_programs_weights_are_not_called_missing(tmp_path):
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "consolidated.pth").write_bytes(b"x")
    assert inspect(folder) is None


def test_a_local_state_dict_is_not_converted(tmp_path):
    with pytest.raises(ConvertError, match="only 3 ranks"):
        convert(inspect(fsdp_local(tmp_path / "checkpoint-20")), tmp_path / "out")


def test_a_gathered_torch_file_becomes_safetensors(tmp_path):
    import torch
    from safetensors.torch import load_file

    (tmp_path / "c").mkdir()
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"a.weight": weight}, tmp_path / "c" / "pytorch_model_fsdp.bin")
    convert(inspect(tmp_path / "c"), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], weight)


@pytest.mark.parametrize(("make", "name"), [(full, "model"), (adapter, "adapter_model")])
def test_weights_that_are_cut_short_or_empty_are_not_whole(make, name, tmp_path):
    cut = inspect(make(tmp_path / "a", cut=8))
    none = inspect(make(tmp_path / "b", tensors=0))
    assert cut is not None
    assert none is not None
    assert cut.problem == f"{name}.safetensors is cut short"
    assert none.problem == f"{name}.safetensors holds no tensor"


def test_a_save_under_a_temporary_name_is_half_written(tmp_path):
    found = inspect(full(tmp_path / "tmp-checkpoint-20"))
    assert found is not None
    assert not found.whole


def test_the_last_whole_one_is_offered(tmp_path, capsys):
    for step in (10, 20, 30):
        dcp(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-30" / "pytorch_model_fsdp_0" / ".metadata").unlink()
    full(tmp_path / "final")
    assert [checkpoint.path.name for checkpoint in find(tmp_path)] == [
        "final", "checkpoint-10", "checkpoint-20", "checkpoint-30",
    ]  # fmt: skip
    last = last_whole(tmp_path)
    assert last is not None
    assert last.path.name == "checkpoint-20"
    assert run(["checkpoint", "ls", str(tmp_path)]) == 0
    assert f"last whole one: {tmp_path / 'checkpoint-20'}" in capsys.readouterr().out


def test_a_folders_own_shards_are_no_second_checkpoint(tmp_path):
    deepspeed(tmp_path / "saved")
    dcp(tmp_path / "sharded")
    assert [found.path.name for found in find(tmp_path / "saved")] == ["saved"]
    assert [found.path.name for found in find(tmp_path / "sharded")] == ["sharded"]
    full(tmp_path / "out")
    deepspeed(tmp_path / "out" / "checkpoint-20")
    assert [found.path.name for found in find(tmp_path / "out")] == ["out", "checkpoint-20"]


def test_listing_as_json(tmp_path, capfdbinary):
    deepspeed(tmp_path / "checkpoint-20")
    assert run(["checkpoint", "ls", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capfdbinary.readouterr().out)["checkpoints"]
    assert (row["kind"], row["ranks"], row["step"], row["whole"]) == ("deepspeed", 4, 20, True)


def test_no_metadata_is_unpickled(tmp_path):
    folder = dcp(tmp_path / "checkpoint-1")

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "opened",))

    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Trap()))
    inspect(folder)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["ls", "{none}"], "no such folder"),
        (["convert", "{empty}", "{out}"], "no checkpoint"),
        (["convert", "{good}", "{out}", "--to", "gold"], "one of full, adapter"),
        (["convert", "{good}", "{good}"], "never overwrite"),
        (["convert", "{half}", "{out}"], "half written"),
        (["verify", "{good}"], "convert it first"),
    ],
)
def test_bad_input_is_one_line(argv, reason, tmp_path):
    good, half = dcp(tmp_path / "checkpoint-1"), dcp(tmp_path / "checkpoint-2")
    (half / "pytorch_model_fsdp_0" / ".metadata").unlink()
    (tmp_path / "empty").mkdir()
    places = {"none": "nowhere", "empty": "empty", "good": good.name, "half": half.name, "out": "out"}
    words = [word.format(**{key: str(tmp_path / value) for key, value in places.items()}) for word in argv]
    with pytest.raises(UserError, match=reason):
        run(["checkpoint", *words])
    assert not (tmp_path / "out").exists()


def test_a_gather_that_memory_cannot_hold_is_refused_before_it_starts(tmp_path):
    from ftdash.engine.checkpoint.convert import ConvertError, convert

    checkpoint = inspect(dcp(tmp_path / "checkpoint-1"))
    assert checkpoint is not None
    with pytest.raises(ConvertError, match="host memory"):
        convert(checkpoint, tmp_path / "out", available_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
