"""The training script's choices and checks, without a process of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ftdash.engine.train import data, gloo_fsdp, options, verify
from ftdash.engine.train.loop import Layout, batches
from ftdash.engine.train.options import Options, TrainError, TrainStrategy, Variant

FSDP2_FOUND = verify.Reality(
    distributed_type="FSDP",
    world_size=2,
    backend="gloo",
    wrapped_class="FSDPQwen3ForCausalLM",
    dtensor_params=47,
    sharded_params=47,
    unsharded_trainable=0,
    unsharded_packed=0,
    zero_stage=0,
    total_params=1000,
    trainable_params=1000,
    adapter_params=0,
    quantized_layers=0,
    mesh={"dp_shard": 2},
)
LORA_FOUND = replace(FSDP2_FOUND, trainable_params=10, adapter_params=10)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--resume", "nowhere"], "--resume nowhere"),
        (["--data", "missing.jsonl"], "--data missing.jsonl"),
        (["--strategy", "tp"], "--tp"),
        (["--strategy", "zero3", "--tp", "2"], "--strategy zero3"),
        (["--steps", "0"], "--steps"),
        (["--lora-dropout", "1"], "--lora-dropout"),
        (["--strategy", "fdsp"], "--strategy"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(flags)
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in last
    assert named in last


def test_the_deepspeed_launchers_own_flag_is_accepted(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    chosen, deepspeed = options.parse(["--local_rank=1", "--deepspeed", "ds.json", "--steps", "7"])
    assert (chosen.steps, deepspeed) == (7, "ds.json")


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, "ddp"),
        ({"WORLD_SIZE": "1"}, "none"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp"),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": "false",
            },
            "fsdp-no-reshard",
        ),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
            },
            "hsdp",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
    ],
)
def test_auto_means_what_the_launcher_set_up(environment, asked, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert verify.asked_strategy(Options()) == asked


def test_a_deepspeed_file_says_its_stage(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert verify.asked_strategy(Options(), str(path)) is TrainStrategy.ZERO1
    path.write_text("{}")
    with pytest.raises(TrainError, match=r"ds.json: no zero_optimization stage"):
        verify.asked_strategy(Options(), str(path))


def test_what_was_asked_for_passes():
    verify.check(Options(), TrainStrategy.FSDP, FSDP2_FOUND)
    verify.check(Options(variant=Variant.LORA), TrainStrategy.FSDP, LORA_FOUND)


@pytest.mark.parametrize(
    ("asked", "changed", "line"),
    [
        (
            "fsdp",
            {
                "distributed_type": "MULTI_CPU",
                "wrapped_class": "DistributedDataParallel",
                "dtensor_params": 0,
            },
            "asked for fsdp, but MULTI_CPU runs, with DistributedDataParallel",
        ),
        ("fsdp", {"world_size": 1}, "only one process|launcher started 2 processes"),
        ("fsdp", {"wrapped_class": "FullyShardedDataParallel", "dtensor_params": 0}, "FSDP1"),
        ("fsdp", {"unsharded_trainable": 3}, "3 trainable tensors are not sharded"),
        ("fsdp", {"unsharded_packed": 28}, "28 quantised weights are not sharded"),
        ("fsdp", {"mesh": {"dp_replicate": 2, "dp_shard": 1}}, "HSDP"),
        ("hsdp", {}, "no replicas"),
        ("fsdp1", {}, "FSDPQwen3ForCausalLM"),
        ("ddp", {}, "FSDP runs"),
        ("zero3", {}, "FSDP runs"),
        ("none", {}, "2 processes run"),
        ("fsdp", {"adapter_params": 10}, "adapter parameters learn"),
    ],
)
def test_what_fell_back_is_refused_in_one_line(asked, changed, line):
    with pytest.raises(verify.Fallback, match=line) as refused:
        verify.check(Options(), TrainStrategy(asked), replace(FSDP2_FOUND, **changed))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variant", "changed", "line"),
    [
        (Variant.LORA, {"adapter_params": 0, "trainable_params": 1000}, "0 adapter parameters of 1000"),
        (Variant.LORA, {"trainable_params": 1000}, "10 adapter parameters of 1000"),
        (Variant.QLORA, {}, "no layer is quantised"),
    ],
)
def test_a_variant_that_did_not_come_about_is_refused(variant, changed, line):
    with pytest.raises(verify.Fallback, match=line):
        verify.check(Options(variant=variant), TrainStrategy.FSDP, replace(LORA_FOUND, **changed))


def test_zero_of_another_stage_is_refused():
    found = replace(
        FSDP2_FOUND, distributed_type="DEEPSPEED", wrapped_class="DeepSpeedEngine", zero_stage=2, mesh={}
    )
    verify.check(Options(), TrainStrategy.ZERO2, found)
    with pytest.raises(verify.Fallback, match="stage 2"):
        verify.check(Options(), TrainStrategy.ZERO3, found)


def test_a_mesh_of_other_sizes_is_refused():
    found = replace(FSDP2_FOUND, distributed_type="DISTRIBUTED_CONFIG", mesh={"fsdp": 2})
    verify.check(Options(), TrainStrategy.FSDP, found, {"fsdp": 2})
    with pytest.raises(verify.Fallback, match="meshes are"):
        verify.check(Options(tp=2), TrainStrategy.TP, found, {"tp": 2})


def test_the_gloo_wrap_is_refused_beside_a_gpu_and_for_an_untried_accelerate(monkeypatch):
    import accelerate
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TrainError, match="without a GPU"):
        gloo_fsdp.apply()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerate, "__version__", "99.0.0")
    with pytest.raises(TrainError, match=r"not with 99\.0\.0"):
        gloo_fsdp.apply()


def test_ranks_of_one_tp_group_see_the_same_rows_and_the_others_the_rest():
    rows = [([row], [row]) for row in range(12)]
    dealt = {}
    for rank in range(4):
        layout = Layout(world=4, rank=rank, tp=2, ep=1, replicate=1)
        source = batches(rows, layout, micro_batch=3, seed=5)
        dealt[rank] = [tokens[0] for _ in range(2) for tokens, _ in next(source)]
    assert dealt[0] == dealt[1]
    assert dealt[2] == dealt[3]
    assert sorted(dealt[0] + dealt[2]) == list(range(12))


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (Options(tp=3), "does not divide"),
        (Options(ep=4), "must divide fsdp"),
        (Options(ep=1, tp=2, replicate=2), "does not divide"),
    ],
)
def test_a_layout_that_cannot_be_prints_its_factors(chosen, line):
    with pytest.raises(TrainError, match=line):
        Layout.of(chosen)


def test_the_shipped_chats_are_conversations_of_several_languages():
    rows = data.read_jsonl(data.shipped_path())
    assert len(rows) >= 250
    roles = [[message["role"] for message in row["messages"]] for row in rows]
    for names in roles:
        spoken = [name for name in names if name != "system"]
        assert spoken == ["user", "assistant"] * (len(spoken) // 2)
    assert sum(len(names) > 3 for names in roles) > 60
    text = " ".join(message["content"] for row in rows for message in row["messages"])
    assert all(word in text for word in ("Warum", "¿", "l'eau", "東京", "Чому"))
    assert len({json.dumps(row) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", r":1: not JSON"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"text": "b"}', r':2: no "messages" list'),
        ('{"messages": [{"role": "user"}]}', r":1: every message needs"),
        ("", "no conversations"),
    ],
)
def test_broken_data_names_the_file_and_the_line(text, line, tmp_path):
    (tmp_path / "chats.jsonl").write_text(text)
    with pytest.raises(TrainError, match=line) as told:
        data.read_jsonl(tmp_path / "chats.jsonl")
    assert "chats.jsonl" in str(told.value)


def test_two_ranks_that_build_the_same_tiny_model_get_one_whole_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code = "from ftdash.engine.train import tiny; print(tiny.tiny_folder('tiny-moe'))"
    environment = {**os.environ, "FTDASH_HOME": str(tmp_path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {rank.communicate(timeout=200)[0].strip().splitlines()[-1] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    (folder,) = folders
    assert [path for path in Path(folder).parent.iterdir() if path.is_dir()] == [Path(folder)]
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= model.config.vocab_size
    text = "Grüße, 東京!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    answer = [token for token, keep in marked if keep]
    assert tokenizer.decode(answer) == "The fox.<|im_end|>"
