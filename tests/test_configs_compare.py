"""Two runs side by side: the loss at equal tokens decides whether training changed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ftdash.engine.compare import compare_runs, figures
from ftdash.monitor.records import Meta, RankSample, Step, encode_line
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.tui.cli import run


def recorded(
    root: Path,
    name: str,
    *,
    ranks: int,
    steps: int,
    tokens: int,
    shift: float = 0.0,
    peak: int = 2**30,
    plan: dict | None = None,
) -> RunDir:
    """A run whose loss falls with the tokens seen over all ranks, whatever their number."""
    out = root / f"{name}-out"
    out.mkdir(parents=True)
    made = RunDir.create(Manifest(run=name, world_size=ranks, output_dir=str(out), plan=plan), root)
    for rank in range(ranks):
        meta = Meta(t=0.0, rank=rank, local_rank=rank, world_size=ranks, host="h", pid=1, device="cpu")
        lines = [encode_line(meta)]
        for step in range(1, steps + 1):
            loss = 4.0 * math.exp(-step * tokens * ranks / 10_000) + shift
            lines.append(
                encode_line(Step(t=step, step=step, loss=loss, tokens=tokens, step_s=0.5, peak=peak))
            )
        made.rank_file(rank).write_bytes(b"".join(lines))
    return made


def test_the_same_training_on_more_ranks_is_called_the_same(tmp_path):
    left = recorded(tmp_path, "a", ranks=2, steps=40, tokens=100)
    right = recorded(tmp_path, "b", ranks=4, steps=20, tokens=100)
    result = compare_runs(left, right)
    assert result.verdict.startswith("the same training")
    assert result.largest_loss_gap < 0.02
    assert result.left.tokens == result.right.tokens == 8000
    assert (result.left.tokens_per_s, result.right.tokens_per_s) == pytest.approx((400.0, 800.0))
    assert result.left.peak_bytes == (2**30, 2**30)


def test_a_shifted_loss_is_called_changed(tmp_path):
    left = recorded(tmp_path, "a", ranks=2, steps=40, tokens=100)
    right = recorded(tmp_path, "b", ranks=2, steps=40, tokens=100, shift=0.5)
    result = compare_runs(left, right)
    assert result.verdict.startswith("training changed")
    assert result.largest_loss_gap > 0.1


def test_runs_without_common_tokens_are_not_judged(tmp_path):
    left = recorded(tmp_path, "a", ranks=1, steps=2, tokens=10)
    right = recorded(tmp_path, "b", ranks=1, steps=2, tokens=1000)
    result = compare_runs(left, right)
    assert "cannot be compared" in result.verdict
    assert math.isnan(result.largest_loss_gap)


def test_what_differs_in_the_plans_is_named(tmp_path):
    left = recorded(tmp_path, "a", ranks=1, steps=2, tokens=10, plan={"strategy": "fsdp", "gpus": 2})
    right = recorded(tmp_path, "b", ranks=1, steps=2, tokens=10, plan={"strategy": "zero3", "gpus": 2})
    assert compare_runs(left, right).changed == ("strategy: fsdp, zero3",)


def test_a_resumed_step_counts_once_and_a_broken_line_not_at_all(tmp_path):
    made = recorded(tmp_path, "a", ranks=1, steps=4, tokens=10)
    again = encode_line(Step(t=9.0, step=4, loss=1.0, tokens=10, step_s=0.5))
    with made.rank_file(0).open("ab") as handle:
        handle.write(again + b'{"kind": "step", "st')
    found = figures(made)
    assert (found.steps, found.tokens) == (4, 40)
    assert found.curve[-1] == (40, 1.0)


def test_on_a_cpu_the_resident_set_stands_for_the_peak(tmp_path):
    made = recorded(tmp_path, "a", ranks=2, steps=3, tokens=10, peak=0)
    samples = [
        RankSample(t=1.0, rank=rank, pid=1, rss=(rank + 1) * 100 + extra)
        for rank in range(2)
        for extra in (0, 7)
    ]
    made.node_file("h").write_bytes(b"".join(map(encode_line, samples)))
    found = figures(made)
    assert (found.peak_bytes, found.peak_kind) == ((107, 207), "resident")


def test_the_command_prints_both_and_json_holds_them(tmp_path, capfdbinary):
    recorded(tmp_path, "left-run", ranks=2, steps=10, tokens=100)
    recorded(tmp_path, "right-run", ranks=2, steps=10, tokens=100)
    assert run(["compare", "left-run", "right-run", "--runs", str(tmp_path)]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert "the same training" in text
    assert "no checkpoint" in text
    assert text.count("own command on 2") == 2
    assert run(["compare", "left-run", "right-run", "--runs", str(tmp_path), "--json"]) == 0
    value = json.loads(capfdbinary.readouterr().out)
    assert value["left"]["tokens"] == value["right"]["tokens"] == 2000
