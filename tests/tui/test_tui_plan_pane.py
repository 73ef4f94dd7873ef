"""The Plan pane: answers move with the inputs, impossible plans say why, plans are saved and handed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.engine.plan import SWITCHES, Method, Plan, Strategy
from ftdash.engine.planner import evaluate
from ftdash.tui import format as fmt
from ftdash.tui.panes.plan import PlanPane
from ftdash.tui.panes.plan_inputs import changed, first_controls, more_controls, shown
from ftdash.tui.widgets.stacked_bar import StackedBar
from tests.support.screens import cockpit, screen_text, until


def pane_of(app: object) -> PlanPane:
    return app.query_one(PlanPane)  # type: ignore[attr-defined, no-any-return]


async def test_values_are_redrawn_while_a_slider_moves(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        app.query_one("#in-seq-len").focus()
        before = evaluate(pane.plan).memory.device
        assert f"{fmt.gb(before)} of" in screen_text(app)
        await pilot.press("shift+right")
        after = evaluate(pane.plan).memory.device
        assert after > before
        assert f"{fmt.gb(after)} of" in screen_text(app)
        assert f"{pane.plan.seq_len:,}" in screen_text(app)


async def test_every_input_reaches_the_plan(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        await pilot.press("m")
        await pilot.pause()
        for name, keys in {"strategy": "home", "method": "home", "optimizer": "right", "tp": "right"}.items():
            app.query_one(f"#in-{name}").focus()
            await pilot.press(keys)
        await pilot.pause()
        assert pane.plan.strategy is Strategy.DDP
        assert pane.plan.method is Method.FULL
        assert (pane.plan.optimizer.value, pane.plan.tp) == ("adamw-foreach", 2)


@pytest.mark.parametrize("make", [lambda plan: first_controls(plan, ["qwen3-8b"], ["l4-24g"]), more_controls])
def test_every_control_shows_its_field_and_sets_it(make: object) -> None:
    plan = Plan(model="qwen3-8b", gpu="l4-24g")
    for control in make(plan):  # type: ignore[operator]
        name = control.name
        value = shown(plan, name)
        if value is not None:
            assert control.value == value
            assert changed(plan, name, value) == plan


def test_every_yes_or_no_choice_has_a_control() -> None:
    plan = Plan(model="qwen3-8b")
    labels = {control.name: control.label for control in more_controls(plan)}
    assert {field: labels.get(field) for field in SWITCHES} == {
        f: known.label for f, known in SWITCHES.items()
    }
    assert all(getattr(changed(plan, field, "yes"), field) is True for field in SWITCHES)


async def test_a_price_shows_what_a_billion_tokens_cost(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        before = pane.plan
        await until(pilot, lambda: bool(app.query("#in-price")))
        app.query_one("#in-price").focus()
        await pilot.press("right", "right")
        await pilot.pause()
        assert pane.price == 0.5
        assert pane.plan == before
        app.query_one("#in-lora-dropout").focus()
        await pilot.press("right", "right")
        await pilot.pause()
        assert pane.plan.lora_dropout == 0.05
        assert pane.prediction is not None
        cost = 0.5 * pane.prediction.time.gpu_hours(1e9)
        assert f"{cost:,.0f} per 1 B tokens" in screen_text(app)


async def test_an_impossible_plan_says_why_in_the_answers_place(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        pane.set_plan(Plan(model="qwen3-8b", gpus=8, tp=3))
        await pilot.pause()
        assert pane.prediction is None
        assert pane.trouble
        assert pane.trouble.split()[0] in screen_text(app)
        await pilot.press("enter")
        pane.set_plan(Plan(model="qwen3-8b", gpus=8))
        await pilot.pause()
        assert app.query_one(StackedBar).trouble == ""
        assert app.active == "plan"


async def test_the_tokens_of_a_step_are_held_when_the_gpus_move(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        pane.set_plan(Plan(model="qwen3-8b", gpus=8, micro_batch=1, seq_len=4096))
        app.query_one("#in-gpus").focus()
        await pilot.press("4", "enter")
        await pilot.pause()
        assert "h holds 32,768: accumulate 2" in screen_text(app)
        await pilot.press("escape", "h")
        assert (pane.plan.gpus, pane.plan.grad_accum) == (4, 2)


async def test_a_plan_comes_back_from_its_file_and_a_broken_file_is_a_notice(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        plan = Plan(model="qwen3-8b", gpus=2, strategy=Strategy.ZERO2, method=Method.QLORA)
        pane.set_plan(plan)
        path = tmp_path / "my.plan"
        pane._save(str(path))
        pane.set_plan(Plan(model="llama-2-7b"))
        pane._load(str(path))
        assert pane.plan == plan
        path.write_text('{"gpus": "many"}')
        pane._load(str(path))
        pane._load(str(tmp_path / "none.plan"))
        await pilot.pause()
        assert pane.plan == plan
        assert "is no plan" in " ".join(screen_text(app).split())


async def test_the_plan_is_handed_to_launch(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        pane.set_plan(Plan(model="qwen3-8b", gpus=4, strategy=Strategy.ZERO3))
        app.query_one("#in-gpus").focus()
        await pilot.press("enter")
        await until(pilot, lambda: app.active == "launch")
        await until(pilot, lambda: "zero3 × 4" in screen_text(app))


async def test_a_pinned_plan_stands_beside_the_new_one(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane = pane_of(app)
        pinned = pane.plan
        await pilot.press("p")
        app.query_one("#in-seq-len").focus()
        await pilot.press("end")
        assert "pinned" in screen_text(app)
        assert "now +" in screen_text(app)
        await pilot.press("P")
        assert pane.plan == pinned


@pytest.mark.parametrize("size", [(120, 40), (200, 60)])
async def test_a_tall_screen_shows_every_input(tmp_path: Path, size: tuple[int, int]) -> None:
    async with cockpit(tmp_path, pane="plan", size=size) as (app, pilot):
        await until(pilot, lambda: bool(app.query("#in-pcie")))
        names = {control.name for control in pane_of(app).query(".control")}
        assert names == set(Plan.__struct_fields__) - {"config"} | {"price"}


async def test_two_plans_are_compared_side_by_side(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan", size=(100, 50)) as (app, pilot):
        pane = pane_of(app)
        pane.set_plan(Plan(model="qwen3-8b", gpus=8, strategy=Strategy.FSDP))
        await pilot.press("v")
        await until(pilot, lambda: "pin a plan with p first" in screen_text(app))
        await pilot.press("p")
        pane.set_plan(Plan(model="qwen3-8b", gpus=8, strategy=Strategy.ZERO2, seq_len=8192))
        await pilot.press("v")
        await until(pilot, lambda: "Pinned and present plan" in screen_text(app))
        lines = screen_text(app).splitlines()
        then, now = (
            evaluate(Plan(model="qwen3-8b", gpus=8, strategy=kind, seq_len=seq_len))
            for kind, seq_len in ((Strategy.FSDP, 2048), (Strategy.ZERO2, 8192))
        )
        for name, words in {
            "--strategy": ("fsdp", "zero2"),
            "--seq-len": ("2048", "8192"),
            "GB a GPU": (fmt.gb(then.memory.device), fmt.gb(now.memory.device)),
            "tokens/s a GPU ~": (
                fmt.rate(then.time.tokens_per_s_per_gpu),
                fmt.rate(now.time.tokens_per_s_per_gpu),
            ),
        }.items():
            row = next(line for line in lines if f"{name}  " in line)
            assert all(word in row for word in words), row
        assert not any("--model" in line for line in lines)
        await pilot.press("escape")
        await until(pilot, lambda: "Pinned and present plan" not in screen_text(app))


async def test_the_config_preview_shows_the_real_files(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="plan") as (app, pilot):
        pane_of(app).set_plan(Plan(model="qwen3-8b", gpus=4, strategy=Strategy.FSDP))
        await pilot.press("c")
        await pilot.pause()
        text = screen_text(app)
        assert "accelerate launch" in text
        await pilot.press("escape")
        assert "What this plan becomes" not in screen_text(app)
