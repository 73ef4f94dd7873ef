"""The plan's flags: every value reaches the plan, and bad input is one line that names the flag."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
from msgspec.structs import fields

from ftdash.engine.plan import SWITCHES, Plan, Strategy
from ftdash.tui.cli import UserError, guarded, run
from ftdash.tui.commands.plan_flags import add_plan_flags, plan_from

SHAPE = {
    "model": {"name", "total_params", "active_params", "trainable_params"},
    "memory": {
        "model_states",
        "activations",
        "logits",
        "gathered",
        "buffers",
        "allocated",
        "reserved",
        "context",
        "device",
        "capacity",
        "peak_phase",
        "phases",
        "host_ram_per_node",
    },
    "traffic": {"per_step_bytes_per_rank", "per_micro_step_bytes_per_rank", "by_collective"},
    "time": {
        "compute_s",
        "communication_s",
        "exposed_s",
        "step_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "bubble",
        "bound_by",
    },
}


def parsed(*flags: str) -> Plan:
    parser = ArgumentParser()
    add_plan_flags(parser)
    return plan_from(parser.parse_args(list(flags)))


def refused(*flags: str) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*flags)
    return str(caught.value)


def test_every_flag_reaches_its_field() -> None:
    found = parsed(
        *shlex.split(
            "--model qwen3-30b-a3b --gpu a100-80g --gpus 16 --gpus-per-node 4 --strategy hsdp "
            "--replicate 4 --ep 2 "
            "--method qlora --lora-rank 8 --lora-targets q_proj,v_proj --dora --modules-to-save lm_head "
            "--quant nf4 --quantize-experts --quant-storage uint8 --adapter-dtype bf16 --expert-lora scaled "
            "--micro-batch 2 --grad-accum 3 --seq-len 4096 --batching longest --mean-len 700 "
            "--checkpointing selective --loss chunked "
            "--attention flash --compile --optimizer lion --precision bf16 --reduce-dtype fp32 "
            "--activation-offload --kbit-upcast norms --old-bitsandbytes --reentrant "
            "--unsharded-init --untied-head --wrap-embeddings --whole-graph --save-every-product "
            "--fused-qkv --fused-norms --expert-loop --pcie 3x8 "
            "--lora-dropout 0"
        )
    )
    assert found == Plan.from_dict(
        {
            "model": "qwen3-30b-a3b",
            "gpu": "a100-80g",
            "gpus": 16,
            "gpus_per_node": 4,
            "strategy": "hsdp",
            "replicate": 4,
            "ep": 2,
            "method": "qlora",
            "lora_rank": 8,
            "lora_targets": ["q_proj", "v_proj"],
            "dora": True,
            "modules_to_save": ["lm_head"],
            "quant": "nf4",
            "quantize_experts": True,
            "quant_storage": "uint8",
            "adapter_dtype": "bf16",
            "expert_lora": "scaled",
            "micro_batch": 2,
            "grad_accum": 3,
            "seq_len": 4096,
            "batching": "longest",
            "mean_len": 700,
            "checkpointing": "selective",
            "loss": "chunked",
            "attention": "flash",
            "compile": True,
            "optimizer": "lion",
            "precision": "bf16",
            "reduce_dtype": "fp32",
            "activation_offload": True,
            "unsharded_init": True,
            "kbit_upcast": "norms",
            "old_bitsandbytes": True,
            "reentrant": True,
            "untied_head": True,
            "wrap_embeddings": True,
            "whole_graph": True,
            "save_every_product": True,
            "fused_qkv": True,
            "fused_norms": True,
            "expert_loop": True,
            "pcie": "3x8",
        }
    )


def test_every_yes_or_no_choice_of_a_plan_is_described() -> None:
    assert set(SWITCHES) == {field.name for field in fields(Plan) if field.type is bool}
    assert all(known.label and known.text for known in SWITCHES.values())


def test_nodes_spread_the_gpus() -> None:
    assert parsed("--model", "qwen3-8b", "--gpus", "16", "--nodes", "4").gpus_per_node == 4
    alone = parsed("--model", "qwen3-8b", "--nodes", "2")
    assert (alone.gpus, alone.gpus_per_node) == (16, 8)
    assert "must be a multiple of 3" in refused("--model", "qwen3-8b", "--gpus", "16", "--nodes", "3")


def test_one_gpu_without_a_strategy_does_not_shard() -> None:
    assert parsed("--model", "qwen3-8b").strategy is Strategy.NONE
    assert parsed("--model", "qwen3-8b", "--gpus", "2").strategy is Strategy.FSDP


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_saved_plan_or_run_is_a_base_that_flags_override(tmp_path: Path, wrapped: bool) -> None:
    saved = Plan.from_dict({"model": "qwen3-8b", "gpus": 4, "strategy": "zero3", "seq_len": 4096}).to_dict()
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"plan": saved, "command": ["x"]} if wrapped else saved))
    found = parsed("--from", str(file), "--seq-len", "8192")
    assert (found.gpus, found.strategy, found.seq_len) == (4, Strategy.ZERO3, 8192)
    assert parsed("--from", str(file), "--params", "7e9").model is None


@pytest.mark.parametrize(
    "content", ["", "[1", '{"a": 1}', "[]", '{"plan": {"gpus": "many", "model": "qwen3-8b"}}']
)
def test_a_file_without_a_plan_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    message = refused("--from", str(file))
    assert str(file) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "name the model"),
        ("--model qwen3-8b --params 7e9", "--model and --params"),
        ("--params nan", "--params nan"),
        ("--params -1", "--params -1"),
        ("--params inf", "--params inf"),
        ("--params 1e30", "--params 1e30"),
        ("--params many", "--params many"),
        ("--model no-such-model", "--model no-such-model"),
        ("--config /no/such/file", "--config /no/such/file"),
        ("--model qwen3-8b --gpu h1000", "--gpu h1000"),
        ("--model qwen3-8b --gpus 0", "--gpus 0"),
        ("--model qwen3-8b --gpus -4", "--gpus -4"),
        ("--model qwen3-8b --gpus 1e99", "--gpus 1e99"),
        ("--model qwen3-8b --gpus nan", "--gpus nan"),
        ("--model qwen3-8b --gpus 99999999999", "--gpus 99999999999"),
        ("--model qwen3-8b --seq-len 0", "--seq-len 0"),
        ("--model qwen3-8b --micro-batch 0", "--micro-batch 0"),
        ("--model qwen3-8b --grad-accum 1.5", "--grad-accum 1.5"),
        ("--model qwen3-8b --gpus 8 --replicate -1", "--replicate -1"),
        ("--model qwen3-8b --method lora --lora-rank 0", "--lora-rank 0"),
        ("--model qwen3-8b --method lora --lora-rank 99999", "--lora-rank 99999"),
        ("--model qwen3-8b --method lora --lora-targets nothing", "--lora-targets nothing"),
        ("--model qwen3-8b --method lora --modules-to-save nothing", "--modules-to-save nothing"),
        ("--model qwen3-8b --strategy zero4", "--strategy zero4"),
        ("--model qwen3-8b --precision int1", "--precision int1"),
        ("--model qwen3-8b --reduce-dtype fp8", "--reduce-dtype fp8"),
        ("--params 1e15", "from 100000 to 1e+14"),
        ("--params 10", "from 100000 to 1e+14"),
        ("--model qwen3-8b --seq-len -2048", "--seq-len -2048"),
        ("--model qwen3-8b --seq-len nan", "--seq-len nan"),
        ("--model qwen3-8b --seq-len 1e300", "--seq-len 1e300"),
        ("--model qwen3-8b --lora-targets nothing", "--lora-targets nothing"),
        ("--model qwen3-8b --lora-rank 99999", "from 1 to 1024"),
        ("--model qwen3-8b --method lora --lora-dropout 1", "from 0 to below 1"),
        ("--model qwen3-8b --method lora --lora-dropout nan", "--lora-dropout nan"),
        ("--model qwen3-30b-a3b --method lora --lora-dropout 0.1 --expert-lora full", "--lora-dropout 0.1"),
        ("--model qwen3-8b --pcie 9x16", "generations 1, 2, 3, 4, 5, 6, lanes 1, 2, 4, 8, 16"),
        ("--model qwen3-8b --pcie fast", "--pcie fast"),
        ("--model qwen3-8b --method full --dora", "--dora with --method full"),
        ("--model qwen3-8b --method full --lora-rank 8", "--lora-rank with --method full"),
        ("--model qwen3-8b --gpu a100-80g --precision fp8", "bf16-mixed, bf16, fp16-mixed, fp32"),
        ("--model qwen3-8b --gpu t4-16g --precision fp8", "use fp16-mixed, fp32"),
        ("--model qwen3-8b --gpu h100-sxm-80g --precision nvfp4", "needs Blackwell"),
        ("--model qwen3-8b --gpu h100-sxm-80g --precision mxfp8", "needs Blackwell"),
        ("--model qwen3-8b --gpu v100-32g --attention flash", "use sdpa or eager"),
        ("--model qwen3-8b --gpus 8 --tp 3", "--tp must be one of 1, 2, 4, 8"),
        ("--model qwen3-8b --gpus 16 --tp 3", "--tp must be one of 1, 2, 4, 8"),
        ("--model qwen3-8b --gpus 16 --tp 16", "--tp 16"),
        (
            "--model qwen3-8b --gpus 16 --pp 16",
            "one of 1, 2, 3, 4, 6, 9, 12, 18, 36 (on 16 GPUs one of 1, 2, 4)",
        ),
        ("--model qwen3-8b --gpus 16 --pp 5", "--pp must be one of 1, 2, 4"),
        ("--model qwen3-8b --gpus 36 --pp 36 --tp 2", "--pp must be one of 1, 2, 3, 6, 9, 18"),
    ],
)
def test_impossible_input_is_one_line_that_names_the_flag(flags: str, words: str) -> None:
    message = refused(*flags.split())
    assert words in message
    assert "\n" not in message


def test_json_has_the_fixed_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split("plan --model qwen3-30b-a3b --gpus 8 --tp 2 --ep 4 --method lora --json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"model", "memory", "traffic", "time", "verdict", "advice"}
    for part, keys in SHAPE.items():
        assert set(found[part]) == keys
    assert set(found["memory"]["model_states"]) == {"weights", "gradients", "optimizer"}
    for one in found["advice"]:
        assert set(one) == {"code", "text", "saves_bytes"}
    sizes = {k: v for k, v in found["memory"].items() if k not in ("peak_phase", "phases", "model_states")}
    assert all(isinstance(size, int) for size in sizes.values())
    assert found["verdict"] in ("fits", "tight", "does-not-fit")


def test_a_price_adds_what_tokens_cost_and_changes_no_fixed_key(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --model qwen3-8b --gpus 8 --strategy fsdp"
    assert run(shlex.split(f"{line} --json")) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(shlex.split(f"{line} --json --price 2.5 --tokens 2e9")) == 0
    priced = json.loads(capsys.readouterr().out)
    cost = priced.pop("cost")
    assert priced == plain
    gpu_hours = 2e9 / plain["time"]["tokens_per_s_per_gpu"] / 3600
    assert cost["gpu_hours"] == pytest.approx(gpu_hours)
    assert cost["hours"] == pytest.approx(gpu_hours / 8)
    assert cost["total"] == pytest.approx(2.5 * gpu_hours)
    assert run(shlex.split(f"{line} --price 2.5 --tokens 2e9")) == 0
    assert "at 2.50 each" in capsys.readouterr().out
    assert run(shlex.split("plan --model qwen3-8b --gpus 8 --price 2.5")) == 0
    assert "cost" in capsys.readouterr().out
    for bad in ("--price 0", "--price nan", "--price -1", "--tokens 0", "--tokens many", "--tokens inf"):
        with pytest.raises(UserError, match=bad.split()[0]):
            run(shlex.split(f"{line} {bad}"))


def test_fit_json_is_ranked_and_its_plans_can_be_planned_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split("fit --model qwen3-8b --gpus 4 --json --limit 5")) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert len(found) == 5
    for one in found:
        assert set(one) == {"plan", "tokens_per_s_per_gpu", "reserved"}
        Plan.from_dict(one["plan"])


def test_the_seeds_forms_print_their_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run(shlex.split("plan --params 8.2e9 --gpus 4")) == 0
    dense = capsys.readouterr().out
    for word in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "HSDP 2 x 2", "131", "32.8"):
        assert word in dense
    assert run(shlex.split("plan --model qwen3-30b-a3b --gpus 4 --lora-rank 16")) == 0
    moe = capsys.readouterr().out
    for word in ("30,532,122,624", "3,353,032,704", "830,472,192", "51,904,512", "61.1", "6.71"):
        assert word in moe


def test_smoke_verifies_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--smoke"]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out
    assert "31.40625" in out


def test_one_plan_prints_its_phases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run(shlex.split("plan --model qwen3-8b --gpus 8 --strategy zero3")) == 0
    out = capsys.readouterr().out
    for word in ("backward-end", "all_gather", "tokens/s a GPU", "fits", "GiB", "master weights: fp32 (all)"):
        assert word in out


def test_planning_loads_no_torch_and_no_numpy() -> None:
    code = (
        "import sys; from ftdash.tui.cli import run; "
        "run(['plan','--model','qwen3-8b','--gpus','8','--json']);"
        "heavy = {'torch','numpy','transformers','pandas'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "qwen3-8b", "--gpus=--"],
        ["--model", "qwen3-8b", "--gpus", "9" * 5000],
        ["--model", "qwen3-8b", "--gpus=\x1b[2J"],
        ["--model", "qwen3-8b", "--gpus=a\nb"],
        ["--model", "qwen3-8b", "--from="],
        ["--config", "9" * 5000],
    ],
)
def test_hostile_values_are_one_short_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["plan", "--json", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("\n")
    line = said.err.removesuffix("\n")
    assert line.isprintable()
    assert len(line) < 400
    assert "--" in line


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--gpu v100-32g", "no-bf16-units", "fp16-mixed"),
        ("--gpu t4-16g --precision bf16", "no-bf16-units", "fp16-mixed"),
        ("--dora", "adapter-flags-unused", "--dora"),
        ("--seq-len 131072", "beyond-positions", "40,960"),
    ],
)
def test_what_runs_but_not_as_meant_is_a_named_warning(
    flags: str, code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def advice(line: str) -> dict[str, str]:
        assert run(["plan", "--json", "--model", "qwen3-8b", *line.split()]) == 0
        return {one["code"]: one["text"] for one in json.loads(capsys.readouterr().out)["advice"]}

    assert words in advice(flags)[code]
    assert code not in advice("")
