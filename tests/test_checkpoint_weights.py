"""Weight files are held against their own headers, an index and the model that config.json describes."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from ftdash.engine.checkpoint.recognise import Checkpoint, inspect, last_whole
from ftdash.engine.model.load import load_config_file
from ftdash.tui.cli import run

# 1,377,408 parameters with an untied head.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}


def params(config: dict) -> int:
    from ftdash.engine.model.load import from_config

    return from_config(config, "here").total_params


def safetensors(path: Path, tensors: dict[str, list[int]], dtype: str = "BF16", width: int = 2) -> Path:
    header, end = {}, 0
    for name, shape in tensors.items():
        count = width
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
        end += count
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    return path


def saved_by_torch(path: Path, data_bytes: int) -> Path:
    """The zip that torch.save writes, without torch."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps({}))
        archive.writestr(f"{path.stem}/data/0", bytes(data_bytes))
        archive.writestr(f"{path.stem}/version", b"3\n")
    return path


def model(folder: Path, config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def seen(folder: Path) -> Checkpoint:
    found = inspect(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("share", [1.0, 0.97])
def test_a_file_that_holds_the_parameters_is_whole(share, tmp_path):
    folder = model(tmp_path / "m")
    saved_by_torch(folder / "pytorch_model.bin", int(2 * share * params(CONFIG)))
    assert seen(folder).problem == ""
    safetensors(folder / "model.safetensors", {"w": [int(share * params(CONFIG))]})
    assert seen(folder).problem == ""


@pytest.mark.parametrize("data_bytes", [0, 900, 600_000])
def test_a_torch_file_too_small_for_the_config_is_not_whole(data_bytes, tmp_path):
    folder = model(tmp_path / "m")
    saved_by_torch(folder / "pytorch_model.bin", data_bytes)
    assert "parameters of config.json take 3 MiB" in seen(folder).problem
    assert not seen(folder).whole


def test_safetensors_are_counted_by_parameter_whatever_their_dtype(tmp_path):
    folder = model(tmp_path / "m")
    half = params(CONFIG) // 2
    safetensors(folder / "model.safetensors", {"w": [half]}, "F32", 4)  # as many bytes as whole bf16 weights
    assert "of the 1.38 M parameters" in seen(folder).problem
    safetensors(folder / "model.safetensors", {"w": [2 * half]}, "F8_E4M3", 1)
    assert seen(folder).problem == ""


def test_packed_weights_need_two_bits_each_and_no_more(tmp_path):
    folder = model(tmp_path / "m", {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}})
    safetensors(folder / "model.safetensors", {"w": [params(CONFIG) // 2]}, "U8", 1)
    assert seen(folder).problem == ""
    safetensors(folder / "model.safetensors", {"w": [900]}, "U8", 1)
    assert "two bits" in seen(folder).problem


def test_a_config_that_cannot_be_placed_proves_nothing(tmp_path):
    folder = model(tmp_path / "m", {"model_type": "unheard-of", "hidden_size": 8192})
    saved_by_torch(folder / "pytorch_model.bin", 900)
    assert seen(folder).problem == ""


def shards(folder: Path, suffix: str, count: int = 3) -> list[Path]:
    files = []
    each = -(-params(CONFIG) // count)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    for n in range(1, count + 1):
        path = folder / f"{stem}-{n:05d}-of-{count:05d}.{suffix}"
        files.append(
            safetensors(path, {f"w{n}": [each]})
            if suffix == "safetensors"
            else saved_by_torch(path, 2 * each)
        )
    weight_map = {f"w{n}": file.name for n, file in enumerate(files, 1)}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_held_against_their_index(suffix, tmp_path):
    folder = model(tmp_path / "m")
    files = shards(folder, suffix)
    assert seen(folder).problem == ""
    files[1].write_bytes(files[1].read_bytes()[:-300])
    assert seen(folder).problem == f"{files[1].name} is cut short"
    files[1].write_bytes(b"")
    assert seen(folder).problem == f"{files[1].name} is empty"
    files[1].unlink()
    assert seen(folder).problem == f"{files[1].name} is missing"
    shards(folder, suffix)
    next(folder.glob("*.index.json")).unlink()
    assert "index.json, written last, is missing" in seen(folder).problem
    files[2].unlink()
    assert seen(folder).problem == f"{files[2].name} is missing"


def test_a_tensor_that_the_index_promises_must_be_in_its_shard(tmp_path):
    folder = model(tmp_path / "m")
    files = shards(folder, "safetensors")
    safetensors(files[0], {"other": [params(CONFIG) // 3 + 1]})
    assert seen(folder).problem == f"{files[0].name} lacks w1, which the index lists there"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "no file of torch.save"),
        (b"PK\x03\x04 and no more", "cut short"),
    ],
)
def test_what_a_failed_download_or_copy_leaves_is_named(content, reason, tmp_path):
    folder = model(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(content)
    assert reason in seen(folder).problem


def test_a_file_that_torch_wrote_is_read_as_one(tmp_path):
    import torch

    folder = model(tmp_path / "m")
    file = folder / "pytorch_model.bin"
    torch.save({"w": torch.zeros(params(CONFIG), dtype=torch.bfloat16)}, file)
    assert seen(folder).problem == ""
    torch.save({"w": torch.zeros(0)}, file)
    assert "parameters of config.json" in seen(folder).problem
    old = {"w": torch.zeros(params(CONFIG), dtype=torch.bfloat16)}
    torch.save(old, file, _use_new_zipfile_serialization=False)
    assert seen(folder).problem == ""


def test_placeholders_of_a_sharded_rank_are_no_adapter(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    names = ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    safetensors(folder / "adapter_model.safetensors", {name: [8, 64] for name in names})
    assert seen(folder).problem == ""
    safetensors(folder / "adapter_model.safetensors", {names[0]: [8, 64], names[1]: [0]})
    assert "1 of its tensors are empty" in seen(folder).problem


def trainers(folder: Path, step: int, *, optimizer: bytes | None = b"x") -> Path:
    model(folder)
    safetensors(folder / "model.safetensors", {"w": [params(CONFIG)]})
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if optimizer is not None:
        (folder / "optimizer.pt").write_bytes(optimizer)
    return folder


def test_a_trainers_checkpoint_without_its_optimizer_is_said_and_not_preferred(tmp_path, capsys):
    trainers(tmp_path / "checkpoint-10", 10)
    trainers(tmp_path / "checkpoint-20", 20, optimizer=None)
    trainers(tmp_path / "checkpoint-30", 30, optimizer=b"")
    assert [seen(tmp_path / f"checkpoint-{n}").no_optimizer for n in (10, 20, 30)] == [False, True, False]
    assert seen(tmp_path / "checkpoint-30").problem == "optimizer.pt is empty"
    last = last_whole(tmp_path)
    assert last is not None
    assert last.step == 10
    assert run(["checkpoint", "ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].endswith("whole, but without the optimizer's state")
    model_only = trainers(tmp_path / "export", 1, optimizer=None)
    (model_only / "trainer_state.json").unlink()
    assert not seen(model_only).no_optimizer


def test_sharded_optimizer_state_has_its_own_end(tmp_path):
    folder = tmp_path / "checkpoint-10"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / part).mkdir(parents=True)
        (folder / part / "__0_0.distcp").write_bytes(b"x")
        (folder / part / ".metadata").write_bytes(pickle.dumps({"files": ["__0_0.distcp"]}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    assert (seen(folder).problem, seen(folder).no_optimizer) == ("", False)
    (folder / "optimizer_0" / ".metadata").unlink()
    assert "optimizer_0/.metadata" in seen(folder).problem


def test_the_parameters_are_those_of_the_config_in_the_folder(tmp_path):
    folder = model(tmp_path / "m", {**CONFIG, "num_hidden_layers": 40})
    saved_by_torch(folder / "pytorch_model.bin", 2 * params(CONFIG))
    assert load_config_file(folder).total_params > 5 * params(CONFIG)
    assert not seen(folder).whole
