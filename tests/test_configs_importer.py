"""Files that people already have become plans, and what cannot be read is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from ftdash.engine.configs import ConfigError, TrainArgs, generate
from ftdash.engine.configs.importer import fields_from_file, plan_from_file
from ftdash.engine.model.load import resolve
from ftdash.engine.plan import Method, Offload, Optimizer, Plan, Precision, Strategy
from ftdash.engine.recipes import RecipeError, load_recipe, read_recipe, recipe_names
from ftdash.tui.cli import UserError, guarded, run


def written(folder: Path, name: str, data: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(data) if name.endswith(".json") else yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    "plan",
    [
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.FSDP),
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.FSDP_NO_RESHARD, offload=Offload.ALL),
        Plan(model="qwen3-8b", gpus=16, strategy=Strategy.HSDP),
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.DDP),
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO2, offload=Offload.OPTIMIZER),
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO3, offload=Offload.ALL),
        Plan(model="qwen3-8b", gpus=8, strategy=Strategy.FSDP, cp=2),
    ],
    ids=lambda plan: f"{plan.strategy}-{plan.offload}",
)
def test_what_ftdash_writes_reads_back_as_the_same_plan(plan, tmp_path):
    generated = generate(
        plan,
        shape=resolve(plan),
        train_args=TrainArgs(model="x", output_dir="o"),
        config_dir=str(tmp_path),
    )
    for name, text in generated.files.items():
        (tmp_path / name).write_text(text)
    (name,) = [name for name in generated.files if name.endswith(".yaml")]
    read, _ = plan_from_file(tmp_path / name)
    for field in ("gpus", "gpus_per_node", "strategy", "offload", "cp", "precision"):
        assert getattr(read, field) == getattr(plan, field), field
    assert plan_from_file(tmp_path / "plan.json") == (plan, [])


def test_an_axolotl_file_is_read_whole(tmp_path):
    path = written(
        tmp_path,
        "axolotl.yaml",
        {
            "base_model": "Qwen/Qwen3-30B-A3B",
            "adapter": "qlora",
            "load_in_4bit": True,
            "lora_r": 32,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_modules_to_save": ["embed_tokens"],
            "sequence_len": 4096,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "gradient_checkpointing": True,
            "sample_packing": True,
            "flash_attention": True,
            "bf16": "auto",
            "optimizer": "paged_adamw_8bit",
            "fsdp_version": 2,
            "fsdp_config": {"reshard_after_forward": True, "offload_params": True},
            "dp_shard_size": 4,
            "dp_replicate_size": 2,
        },
    )
    plan, notes = plan_from_file(path)
    assert plan == Plan(
        model="qwen3-30b-a3b",
        method=Method.QLORA,
        lora_rank=32,
        lora_targets=("q_proj", "v_proj"),
        modules_to_save=("embed_tokens",),
        seq_len=4096,
        micro_batch=2,
        grad_accum=8,
        attention="flash",
        optimizer=Optimizer.PAGED_ADAMW_8BIT,
        strategy=Strategy.HSDP,
        offload=Offload.ALL,
        replicate=2,
        gpus=8,
    )
    assert notes == []


def test_an_axolotl_file_that_pads_and_checkpoints_reentrantly_says_so(tmp_path):
    path = written(
        tmp_path,
        "axolotl.yaml",
        {
            "base_model": "meta-llama/Llama-3.1-8B",
            "adapter": "lora",
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "dp_shard_size": 4,
        },
    )
    plan, notes = plan_from_file(path)
    assert plan.reentrant
    assert any("samples are padded" in note for note in notes)


def test_a_deepspeed_file_gives_its_world_size_away(tmp_path):
    path = written(
        tmp_path,
        "ds.json",
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    )
    plan, notes = plan_from_file(path)
    assert (plan.gpus, plan.strategy, plan.micro_batch, plan.grad_accum) == (8, Strategy.ZERO2, 2, 4)
    assert (plan.precision, plan.offload) == (Precision.FP16_MIXED, Offload.OPTIMIZER)
    assert any("8 GPUs" in note for note in notes)


def test_hybrid_sharding_of_fsdp1_is_read_as_replicas(tmp_path):
    config = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    path = written(
        tmp_path,
        "a.yaml",
        {"distributed_type": "FSDP", "num_processes": 16, "num_machines": 2, "fsdp_config": config},
    )
    plan, notes = plan_from_file(path)
    assert (plan.strategy, plan.replicate, plan.gpus_per_node) == (Strategy.HSDP, 2, 8)
    assert any("HYBRID_SHARD" in note for note in notes)


def test_a_run_is_read_through_its_manifest(tmp_path):
    plan = Plan(model="qwen3-8b", gpus=4)
    path = written(tmp_path, "run.json", {"run": "r", "created": 1.0, "plan": plan.to_dict()})
    assert plan_from_file(path) == (plan, [])


def test_flags_win_over_the_file_and_notes_go_to_standard_error(tmp_path, capfd):
    path = written(
        tmp_path, "x.yaml", {"base_model": "Qwen/Qwen3-8B", "micro_batch_size": 2, "adapter": "lora"}
    )
    assert (
        run(
            [
                "configs",
                "--from",
                str(path),
                "--gpus",
                "2",
                "--strategy",
                "fsdp",
                "--micro-batch",
                "4",
                "--json",
            ]
        )
        == 0
    )
    captured = capfd.readouterr()
    plan = json.loads(json.loads(captured.out)["files"]["plan.json"])
    assert (plan["micro_batch"], plan["method"], plan["strategy"]) == (4, "lora", "fsdp")
    assert "give --gpus" in captured.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("colour: blue\n", "holds no plan"),
        ("a: [\n", "not YAML"),
        ("- 1\n", "not a mapping"),
        ("{", "not JSON"),
    ],
)
def test_a_file_without_a_plan_is_one_line(content, reason, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        plan_from_file(path)
    with pytest.raises(UserError, match=reason):
        run(["configs", "--from", str(path), "--gpus", "2"])


def test_every_recipe_can_be_launched_and_names_others_that_exist():
    assert {"qwen3-8b-fsdp2", "qwen3-8b-zero3", "qwen3-32b-qlora", "qwen3-30b-a3b-moe-lora"} <= set(
        recipe_names()
    )
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.data == "trl-lib/Capybara"
        assert recipe.log_steps == 10
        assert set(recipe.compare) <= set(recipe_names())
        for plan in (recipe.plan, *(plan for _, plan in recipe.variants)):
            train = TrainArgs(model="x", output_dir="o")
            assert generate(plan, shape=resolve(plan), train_args=train).commands


def test_the_two_recipes_to_compare_differ_in_strategy_alone():
    first, second = load_recipe("qwen3-8b-fsdp2").plan, load_recipe("qwen3-8b-zero3").plan
    assert replace(first, strategy=Strategy.ZERO3) == second


def test_a_variant_changes_what_it_names():
    base, uint8 = load_recipe("qwen3-32b-qlora").plan, load_recipe("qwen3-32b-qlora:uint8").plan
    assert replace(base, quant_storage="uint8") == uint8
    with pytest.raises(RecipeError, match="one of uint8, offload"):
        load_recipe("qwen3-32b-qlora:gold")
    with pytest.raises(RecipeError, match="one of qwen3"):
        load_recipe("nothing")


def test_a_broken_recipe_names_its_field(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("title: t\nshows: s\nplan: {model: qwen3-8b, gpus: many}\n")
    with pytest.raises(RecipeError, match="gpus"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("ds.json", {"zero_optimization": "auto", "train_batch_size": 8}, "zero_optimization"),
        ("ds.json", {"train_batch_size": 8, "optimizer": [1]}, "optimizer"),
        ("ds.json", {"zero_optimization": {"stage": 9}}, "stage is '9': one of 0, 1, 2, 3"),
        (
            "acc.yaml",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": True}},
            "zero_stage",
        ),
        ("ds.json", {"zero_optimization": {"stage": 3, "offload_param": 3}}, "offload_param"),
        ("ds.json", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": False}, "train_micro_batch"),
        ("acc.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": "ds.json"}, "deepspeed_config"),
        ("acc.yaml", {"distributed_type": "FSDP", "parallelism_config": "x"}, "parallelism_config"),
        ("acc.yaml", {"distributed_type": "FSDP", "num_machines": "two", "num_processes": 4}, "num_machines"),
        ("acc.yaml", {"distributed_type": "FSDP", "num_processes": 10**30}, "gpus"),
        ("axolotl.yaml", {"base_model": "Qwen/Qwen3-8B", "micro_batch_size": -1}, "micro_batch_size"),
        ("saved.json", {"plan": {"model": "qwen3-8b", "gpus": 0}}, "gpus"),
        ("saved.json", {"plan": {"model": "qwen3-8b", "quant_storage": "int3"}}, "quant_storage"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_that_names_file_and_key(name, data, words, tmp_path, capsys):
    path = written(tmp_path, name, data)
    model = [] if "saved" in name or "axolotl" in name else ["--model", "qwen3-8b"]
    assert guarded(["plan", "--from", str(path), *model, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert str(path) in said.err
    assert words in said.err


def test_notes_on_a_file_do_not_stand_beside_an_error(tmp_path, capsys):
    path = written(tmp_path, "acc.yaml", {"distributed_type": "FSDP", "num_processes": 4})
    assert guarded(["plan", "--from", str(path), "--model", "qwen3-8b", "--seq-len", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


TORCHTITAN = """
[model]
name = "{family}"
flavor = "{flavor}"
[training]
local_batch_size = 2
global_batch_size = {total}
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def titan(folder: Path, **values: object) -> Path:
    chosen = {"family": "llama3", "flavor": "8B", "total": 32, "replicate": 2, "shard": 4} | values
    path = folder / "job.toml"
    path.write_text(TORCHTITAN.format(**chosen))
    return path


def test_a_torchtitan_job_file_becomes_a_plan(tmp_path):
    plan, notes = plan_from_file(titan(tmp_path))
    assert (plan.model, plan.strategy, plan.replicate, plan.tp, plan.gpus) == (
        "llama-3-8b",
        Strategy.HSDP,
        2,
        2,
        16,
    )
    assert (plan.micro_batch, plan.grad_accum, plan.seq_len, plan.reduce_dtype) == (2, 2, 4096, "fp32")
    assert any("its own trainer" in note for note in notes)


def test_a_shard_degree_of_minus_one_asks_for_the_number_of_gpus(tmp_path):
    plan, notes = plan_from_file(titan(tmp_path, shard=-1, replicate=1, family="qwen3", flavor="30B-A3B"))
    assert (plan.model, plan.strategy) == ("qwen3-30b-a3b", Strategy.FSDP)
    assert any("give --gpus" in note for note in notes)


def test_quoted_numbers_are_what_the_launcher_takes_them_for(tmp_path):
    path = tmp_path / "acc.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: '16'\nnum_machines: '2'\n"
        "deepspeed_config: {zero_stage: '3'}\n"
    )
    fields, _ = fields_from_file(path)
    assert (fields["gpus"], fields["gpus_per_node"], fields["strategy"]) == (16, 8, "zero3")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicate": -1}, "data_parallel_replicate_degree is '-1'"),
        ({"total": 33}, "global_batch_size 33 is no multiple of 2 x 8"),
        ({"shard": '"all"'}, "data_parallel_shard_degree is 'all'"),
        ({"replicate": "]"}, "not TOML"),
    ],
)
def test_a_torchtitan_value_that_cannot_be_is_one_line(values, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as told:
        plan_from_file(titan(tmp_path, **values))
    assert "\n" not in str(told.value)


def test_a_run_json_becomes_the_plan_that_ran(tmp_path):
    ran = Plan(model="qwen3-8b", gpus=4, strategy=Strategy.ZERO2, method=Method.LORA)
    path = written(tmp_path, "run.json", {"run": "r1", "created": 1.0, "plan": ran.to_dict()})
    assert plan_from_file(path) == (ran, [])
