"""Launch acts on one key: a recipe fills the inputs, a fix is made, an ended run goes on."""

from __future__ import annotations

import re
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ftdash.engine.configs import TrainArgs
from ftdash.engine.launch.job import Job, write_job
from ftdash.engine.launch.restart import restarted
from ftdash.engine.launch.spec import Device, LaunchError
from ftdash.engine.plan import Method, Offload, Plan, Strategy
from ftdash.engine.recipes import load_recipe
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import RunPhase
from ftdash.tui.launching import Wanted, findings_of
from ftdash.tui.panes.launch import LaunchPane
from ftdash.tui.widgets.check_list import CheckList
from tests.support import screens
from tests.support.screens import cockpit, screen_text, until

PLAN = Plan(model="tiny-qwen3", gpus=2, gpus_per_node=2, strategy=Strategy.FSDP, seq_len=128)


HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'  # of a safetensors file


def ended(tmp_path: Path, *, checkpoints: tuple[int, ...] = (20, 40), whole: bool = True) -> RunDir:
    """A run of 100 steps that stopped after its last checkpoint."""
    manifest = Manifest(run="r1", name="mine", world_size=2, state="stopped", plan=PLAN.to_dict())
    run = RunDir.create(manifest, tmp_path / "runs")
    out = tmp_path / "out"
    for step in checkpoints:
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + bytes(4))
        (folder / "config.json").write_text("{}")
        if whole or step != checkpoints[-1]:
            (folder / "trainer_state.json").write_text("{}")
    train = TrainArgs(model="tiny-qwen3", output_dir=str(out), steps=100, save_steps=20, device="cpu")
    write_job(run, Job(nodes=1, plan=PLAN, train=train, env={"NCCL_DEBUG": "INFO"}))
    return run


def test_an_ended_run_goes_on_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    spec = restarted(ended(tmp_path))
    assert spec.plan == PLAN
    assert spec.resume == tmp_path / "out" / "checkpoint-40"
    assert (spec.out, spec.steps, spec.save_steps) == (tmp_path / "out", 100, 20)
    assert (spec.device, spec.env) == (Device.CPU, (("NCCL_DEBUG", "INFO"),))


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    assert restarted(ended(tmp_path, whole=False)).resume == tmp_path / "out" / "checkpoint-20"


def test_a_checkpoint_with_a_broken_file_is_passed_over(tmp_path: Path) -> None:
    run = ended(tmp_path)
    (tmp_path / "out" / "checkpoint-40" / "model.safetensors").write_bytes(b"x")
    assert restarted(run).resume == tmp_path / "out" / "checkpoint-20"


def test_a_run_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    assert restarted(ended(tmp_path, checkpoints=())).resume is None


def test_a_run_that_has_made_its_steps_asks_for_more(tmp_path: Path) -> None:
    run = ended(tmp_path, checkpoints=(100,))
    with pytest.raises(LaunchError, match="has made 100 of 100 steps"):
        restarted(run)
    assert restarted(run, steps=150).steps == 150


def test_a_command_of_its_own_is_not_restarted(tmp_path: Path) -> None:
    run = RunDir.create(Manifest(run="r2", name="r2", world_size=2, state="failed"), tmp_path)
    with pytest.raises(LaunchError, match="a command of its own"):
        restarted(run)


async def test_x_fills_the_inputs_of_the_ended_run_and_starts_nothing(tmp_path: Path) -> None:
    run = ended(tmp_path)
    state = replace(screens.run_state(2), run="r1", state=RunPhase.STOPPED)
    async with cockpit(tmp_path, pane="launch", state=state, run=run) as (app, pilot):
        await pilot.press("x")
        await until(pilot, lambda: "start 2 ranks, 100 steps from checkpoint-40" in screen_text(app))
        pane = app.query_one(LaunchPane)
        assert pane.wanted.plan == PLAN
        assert pane.wanted.spec(None).resume == tmp_path / "out" / "checkpoint-40"
        assert "tiny-qwen3" in screen_text(app)


async def test_x_leaves_a_run_alone_that_still_runs(tmp_path: Path) -> None:
    run = ended(tmp_path)
    async with cockpit(tmp_path, pane="launch", state=screens.run_state(2), run=run) as (app, pilot):
        before = app.query_one(LaunchPane).wanted
        await pilot.press("x")
        await until(pilot, lambda: "still runs" in screen_text(app))
        assert app.query_one(LaunchPane).wanted == before


async def test_f_makes_the_first_fix_and_the_finding_goes(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        pane, checks = app.query_one(LaunchPane), app.query_one(CheckList)
        pane.take_plan(structs.replace(PLAN, strategy=Strategy.ZERO2, offload=Offload.ALL))
        await until(pilot, lambda: "fix: --offload optimizer" in screen_text(app))
        await pilot.press("f")
        assert pane.wanted.plan.offload is Offload.OPTIMIZER
        await until(pilot, lambda: all(finding.code != "plan-refused" for finding in checks.findings))


async def test_enter_on_a_finding_makes_that_fix_only(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        pane, checks = app.query_one(LaunchPane), app.query_one(CheckList)
        pane.take_plan(structs.replace(PLAN, strategy=Strategy.FSDP1))
        await until(pilot, lambda: any(finding.code == "no-checkpoints" for finding in checks.findings))
        checks.focus()
        codes = [row[0].code for row in checks.items]
        await pilot.press(*["down"] * codes.index("no-checkpoints"), "enter")
        await until(pilot, lambda: pane.wanted.save_steps > 0)
        assert pane.wanted.plan.strategy is Strategy.FSDP1
        assert f"{pane.wanted.save_steps}" in screen_text(app)


async def test_a_recipe_brings_its_plan_and_data_and_another_plan_drops_it(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        pane = app.query_one(LaunchPane)
        app.query_one("#in-recipe").focus()
        await pilot.press("enter", *"qlora:uint8", "enter")
        await until(pilot, lambda: pane.wanted.recipe == "qwen3-32b-qlora:uint8")
        recipe = load_recipe("qwen3-32b-qlora:uint8")
        assert (pane.wanted.plan, pane.wanted.data) == (recipe.plan, recipe.data)
        await until(pilot, lambda: "qwen3-32b-qlora:uint8" in screen_text(app))
        await until(pilot, lambda: "fix: --quant-storage bf16" in screen_text(app))
        pane.take_plan(PLAN)
        assert (pane.wanted.plan, pane.wanted.recipe) == (PLAN, "")


def fixed(wanted: Wanted, code: str) -> Wanted:
    (found,) = [finding for finding in findings_of(wanted) if finding.code == code]
    assert found.change, found
    after = wanted.changed(found.change)
    assert code not in {finding.code for finding in findings_of(after)}
    return after


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (Wanted(PLAN, steps=1000), "no-checkpoints"),
        (Wanted(structs.replace(PLAN, gpus=1)), "nothing-to-shard"),
        (Wanted(structs.replace(PLAN, strategy=Strategy.FSDP1)), "fsdp1-deprecated"),
        (Wanted(structs.replace(PLAN, method=Method.QLORA, quant_storage="uint8")), "quant-storage"),
        (Wanted(Plan(model="qwen3-32b", gpus=8, strategy=Strategy.DDP), backend="ssh"), "does-not-fit"),
        (Wanted(PLAN, out="/proc/nowhere"), "output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fix_takes_its_finding_away(wanted: Wanted, code: str) -> None:
    fixed(wanted, code)


@pytest.mark.parametrize("flag", ["--master_port={}", "--master_port {}", "--main_process_port={}"])
def test_a_taken_port_of_an_own_command_is_changed_for_a_free_one(flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        taken = flag.format(listener.getsockname()[1])
        before = Wanted(PLAN, command=f"{sys.executable} -m torch.distributed.run {taken} x.py --lr 1")
        after = fixed(before, "port-taken").command
        assert taken not in after
        assert after.endswith("x.py --lr 1")


def test_a_taken_default_port_gets_a_flag_behind_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        monkeypatch.setattr("ftdash.engine.launch.checks.STATIC_PORT", listener.getsockname()[1])
        words = fixed(Wanted(PLAN, command=f"{sys.executable} -m torch.distributed.run x.py"), "port-taken")
        assert re.search(r"-m torch\.distributed\.run --master_port \d+ x\.py$", words.command)
