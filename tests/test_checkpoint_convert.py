"""Conversions are bit-exact, whole or not there at all, and never touch their source."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftdash.engine.checkpoint import verify
from ftdash.engine.checkpoint.convert import ConvertError, Target, convert
from ftdash.engine.checkpoint.recognise import CheckpointKind, inspect
from ftdash.tui.cli import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small model folder with a tokenizer."""
    import json

    from ftdash import presets
    from ftdash.engine.rehearse.small import build_model, small_config

    folder = tmp_path_factory.mktemp("model") / "small"
    config = json.loads((presets.FOLDER / "models" / "qwen3-4b.json").read_text())
    build_model(small_config(config, tp=1, ep=1), folder)
    return folder


def shards(folder: Path, tensors: dict) -> Path:
    """A DCP checkpoint as accelerate's FSDP2 saves it, from one process."""
    import torch.distributed.checkpoint as dcp

    target = folder / "pytorch_model_fsdp_0"
    target.mkdir(parents=True)
    dcp.save({"model": tensors}, checkpoint_id=target, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> Path:
    """The model's weights as shards, with an export beside them that has config and tokenizer."""
    import shutil

    from safetensors.torch import load_file

    out = tmp_path_factory.mktemp("out")
    shards(out / "checkpoint-4", load_file(model / "model.safetensors"))
    shutil.copytree(model, out / "final")
    return out


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checkpoint(path: Path):
    found = inspect(path)
    assert found is not None
    return found


def test_shards_become_a_model_that_loads_and_is_the_same_bit_for_bit(trained, model, tmp_path, capsys):
    before = fingerprint(trained)
    assert run(["checkpoint", "convert", str(trained / "checkpoint-4"), str(tmp_path / "merged")]) == 0
    assert fingerprint(trained) == before
    assert checkpoint(tmp_path / "merged").kind is CheckpointKind.FULL
    result = verify.compare(checkpoint(tmp_path / "merged"), checkpoint(model))
    assert result.same
    assert result.largest_difference == 0.0
    assert any("generates a token" in line for line in verify.loads(tmp_path / "merged"))
    assert "GiB of host memory" in capsys.readouterr().out


def test_verify_finds_one_changed_value(trained, model, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[3] += 1e-6
    (tmp_path / "changed").mkdir()
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "changed" / "config.json").write_bytes((model / "config.json").read_bytes())
    against = ["--against", str(tmp_path / "changed")]
    assert run(["checkpoint", "verify", str(trained / "checkpoint-4"), *against]) == 1
    result = verify.compare(checkpoint(trained / "checkpoint-4"), checkpoint(tmp_path / "changed"))
    assert result.different == (name,)


def test_a_killed_conversion_leaves_no_result_and_an_untouched_source(trained, tmp_path):
    before = fingerprint(trained)
    command = [sys.executable, "-c", "from ftdash.tui.cli import main; main()", "checkpoint", "convert"]
    process = subprocess.Popen(
        [*command, str(trained / "checkpoint-4"), str(tmp_path / "merged")], start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".merged.partial-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "merged").exists()
    assert fingerprint(trained) == before


def test_a_failed_tool_leaves_nothing(trained, tmp_path):
    import shutil

    broken = tmp_path / "checkpoint-9"
    shutil.copytree(trained / "checkpoint-4", broken)
    (file,) = broken.glob("pytorch_model_fsdp_0/*.distcp")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ConvertError, match="failed"):
        convert(checkpoint(broken), tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-9"]


def test_shards_without_a_tensor_become_no_empty_model(tmp_path):
    shards(tmp_path / "checkpoint-9", {})
    (file,) = (tmp_path / "checkpoint-9").glob("pytorch_model_fsdp_0/*.distcp")
    file.write_bytes(b"x")
    with pytest.raises(ConvertError, match="no tensor"):
        convert(checkpoint(tmp_path / "checkpoint-9"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapter_shards_become_an_adapter_folder_and_merge_into_their_base(model, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "final")
    shards(tmp_path / "checkpoint-4", get_peft_model_state_dict(adapted))
    source = checkpoint(tmp_path / "checkpoint-4")
    assert source.adapter
    made = convert(source, tmp_path / "adapter")
    assert made.target is Target.ADAPTER
    assert verify.compare(checkpoint(made.path), checkpoint(tmp_path / "final")).same
    merged = convert(checkpoint(made.path), tmp_path / "merged", Target.MERGED, base=model)
    prompt = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = adapted.eval()(prompt).logits
        loaded = AutoModelForCausalLM.from_pretrained(merged.path).eval()(prompt).logits
    assert torch.allclose(expected, loaded, atol=1e-5)
    assert not torch.allclose(
        expected, AutoModelForCausalLM.from_pretrained(model).eval()(prompt).logits, atol=1e-3
    )
