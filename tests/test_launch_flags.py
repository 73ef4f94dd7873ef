"""The flags of `ftdash launch` that say where a run starts from, and with which environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ftdash.engine.launch.job import Job, write_job
from ftdash.engine.launch.local import prepare
from ftdash.engine.launch.spec import Backend, LaunchError, LaunchSpec
from ftdash.engine.plan import Strategy
from ftdash.engine.recipes import load_recipe
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.tui.cli import UserError
from ftdash.tui.commands import launch


def spec(*flags: str) -> LaunchSpec:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.spec_from(parser.parse_args(list(flags)))


def test_a_recipe_brings_plan_and_data_and_flags_change_it() -> None:
    recipe = load_recipe("qwen3-8b-zero3")
    assert spec("--recipe", "qwen3-8b-zero3").plan == recipe.plan
    changed = spec("--recipe", "qwen3-8b-zero3", "--gpus", "2", "--data", "mine.jsonl")
    assert changed.plan is not None
    assert (changed.plan.gpus, changed.plan.strategy, changed.data) == (2, Strategy.ZERO3, "mine.jsonl")
    assert spec("--recipe", "qwen3-8b-zero3").data == recipe.data


def test_switches_checkpoints_and_saving_reach_the_launch(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    asked = spec(
        *("--model", "qwen3-8b", "--debug-switches", "nccl-info,launch-blocking"),
        *("--save-steps", "50", "--resume", str(tmp_path)),
    )
    assert dict(asked.env) == {"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"}
    assert (asked.save_steps, asked.resume) == (50, tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--recipe", "nothing"), "--recipe nothing: one of"),
        (("--recipe", "qwen3-8b-zero3", "--from", "x"), "--recipe and --from"),
        (("--model", "qwen3-8b", "--resume", "/nowhere"), "--resume /nowhere: no such folder"),
        (("--model", "qwen3-8b", "--debug-switches", "loud"), "--debug-switches loud: one of"),
        (("--model", "qwen3-8b", "--save-steps", "0"), "--save-steps 0"),
    ],
)
def test_a_flag_that_names_nothing_is_one_line(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as told:
        spec(*flags)
    assert "\n" not in str(told.value)


def test_a_run_of_its_own_command_cannot_be_restarted(tmp_path: Path) -> None:
    run = RunDir.create(Manifest(run="r1", name="r1", world_size=1, state="failed"), tmp_path)
    write_job(run, Job(nodes=1, command=["x"]))
    with pytest.raises(UserError, match="--restart r1: r1 ran a command of its own"):
        spec("--restart", "r1", "--runs", str(tmp_path))


def test_a_secret_on_the_command_line_is_not_written_for_other_nodes(tmp_path: Path) -> None:
    command = ("torchrun", "train.py", "--hub_token", "hf_abcdefghijklmnopqrstuv")
    with pytest.raises(LaunchError, match="--backend slurm: the command holds a secret"):
        prepare(LaunchSpec(command=command, backend=Backend.SLURM, runs=tmp_path))
    assert not list(tmp_path.iterdir())
