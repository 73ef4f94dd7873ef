"""The GPU check runs from end to end without a GPU, and what it keeps is read and judged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from ftdash.engine.hardware import gpu
from ftdash.engine.model.load import load_config_file
from ftdash.engine.planner import evaluate
from tests.gpu.cases import MEMORY_SHARE, MOST_LAYERS, Case, cases
from tests.gpu.result import FORMAT, MEMORY_LIMIT, SPEED_LIMIT, Figures, Result, Row, failures, kept, load

GIB = 1 << 30


def row(**measured: float) -> Row:
    predicted = Figures(allocated=80 * GIB, reserved=85 * GIB, device=87 * GIB, tokens_per_s=1000.0)
    found = msgspec.structs.replace(predicted, **measured)
    return Row(
        name="dense-full",
        plan={"method": "full"},
        model={"model_type": "qwen3"},
        total_params=10,
        trainable_params=10,
        predicted=predicted,
        measured=found,
        steps=4,
        losses=[1.0],
    )


def result(*rows: Row, dry: bool = False) -> Result:
    return Result(
        v=FORMAT,
        date="2026-01-31",
        gpu="NVIDIA H200",
        plan_gpu="h200-sxm-141g",
        memory_bytes=140 * GIB,
        driver="570.1",
        versions={"torch": "2.13.0"},
        dry=dry,
        rows=list(rows),
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("figure", ["allocated", "reserved", "device"])
def test_memory_past_the_limit_fails_the_check_in_both_directions(figure):
    predicted = getattr(row().predicted, figure)
    for share in (1 + 1.3 * MEMORY_LIMIT, 1 - 1.3 * MEMORY_LIMIT):
        (line,) = failures(result(row(**{figure: round(predicted / share)})))
        assert line.startswith(f"dense-full: {figure} is off by")
    assert not failures(result(row(**{figure: round(predicted / (1 + 0.5 * MEMORY_LIMIT))})))


def test_speed_has_a_limit_of_its_own():
    assert not failures(result(row(tokens_per_s=1000 / (1 + 0.9 * SPEED_LIMIT))))
    (line,) = failures(result(row(tokens_per_s=1000 / (1 + 1.2 * SPEED_LIMIT))))
    assert line == "dense-full: tokens_per_s is off by +42.0%"


def test_a_case_that_did_not_train_fails_and_one_left_out_does_not():
    broken = msgspec.structs.replace(row(), measured=Figures(), error="did not train: RuntimeError: no")
    left_out = msgspec.structs.replace(row(), measured=Figures(), left_out="bitsandbytes is not installed")
    assert failures(result(broken, left_out)) == ["dense-full: did not train: RuntimeError: no"]
    assert failures(result(broken, dry=True))
    assert not failures(result(row(tokens_per_s=1.0), dry=True))


def test_kept_results_are_read_whole_and_within_their_limits(tmp_path):
    """Those below tests/data/gpu, and one written here: with none kept, the format is tested all the same."""
    written = tmp_path / "h200.json"
    written.write_bytes(msgspec.json.encode(result(row())))
    for path in [written, *kept()]:
        found = load(path)
        assert not found.dry, f"{path} is a dry run: it measured no GPU"
        assert found.rows
        assert failures(found) == []
    written.write_bytes(msgspec.json.encode({**msgspec.to_builtins(result(row())), "v": FORMAT + 1}))
    with pytest.raises(ValueError, match="format"):
        load(written)
    written.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"h200\.json"):
        load(written)


@pytest.mark.parametrize("name", ["h200-sxm-141g", "rtx4090-24g"])
def test_every_case_is_as_large_as_the_gpu_and_the_time_allow(name, tmp_path):
    budget = int(MEMORY_SHARE * gpu(name).memory_bytes)
    found = cases(name, budget, tmp_path)
    assert {case.name.split("-")[0] for case in found} == {"dense", "moe"}
    assert {str(case.plan.method) for case in found} == {"full", "lora", "qlora"}
    assert len({case.plan.seq_len for case in found}) == 2
    assert len({case.plan.checkpointing for case in found}) == 2
    for case in found:
        folder = Path(str(case.plan.config))
        layers = load_config_file(folder).layers
        assert fits(case, budget)
        larger = tmp_path / case.name / "larger"
        larger.mkdir()
        config = json.loads((folder / "config.json").read_text())
        (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers + 1}))
        assert layers == MOST_LAYERS or not fits(
            replace(case, plan=structs.replace(case.plan, config=str(larger / "config.json"))), budget
        )


def fits(case: Case, budget: int) -> bool:
    params = load_config_file(str(case.plan.config)).total_params
    return params <= case.most_params and evaluate(case.plan).memory.device <= budget


def test_without_a_gpu_it_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--out", str(tmp_path / "r.json"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
def test_the_dry_run_trains_a_mixture_and_writes_what_it_found(tmp_path):
    out = tmp_path / "r.json"
    done = run("--cpu", "--steps", "1", "--only", "moe", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(out)
    assert found.dry
    assert [each.name for each in found.rows] == ["moe-lora", "moe-full"]
    for each in found.rows:
        assert each.error == each.left_out == ""
        assert len(each.losses) == 3
        assert each.measured.tokens_per_s
        assert each.measured.allocated is None
    lora, full = found.rows
    assert 0 < lora.trainable_params < full.trainable_params
