"""What finished runs teach the planner, and what they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ftdash.engine import calibrate
from ftdash.engine.calibrate import Calibration, Learned, correct, learn, learned, measure, model_family, save
from ftdash.engine.plan import Plan
from ftdash.engine.planner import evaluate
from ftdash.monitor.rundir import Manifest
from ftdash.monitor.state import RunPhase
from tests.support.cluster import Cluster
from tests.support.runs import run_state, with_rank
from tests.support.screens import cockpit, screen_text, until

GIB = 1 << 30
PREDICTED = {
    "memory": {"allocated": 32 * GIB, "reserved": 60 * GIB},
    "time": {"step_s": 0.8, "mfu": 0.5, "compute_s": 0.5},
    "traffic": {"per_step_bytes_per_rank": 50_000_000_000},
}


def finished(**measured: float):
    plan = {"model": "qwen3-8b", "gpu": "h100-sxm-80g"}
    manifest = Manifest(run="a", plan=plan, predicted=PREDICTED)
    state = run_state(2, step=50, state=RunPhase.FINISHED, manifest=manifest, measured=measured)
    for rank in (0, 1):
        state = with_rank(state, rank, device=f"cuda:{rank}")
    return state


def test_ratios_are_measured_over_predicted():
    found = measure(finished(allocated=40 * GIB, reserved=50 * GIB, device=52 * GIB, step_s=1.0))
    assert not isinstance(found, str)
    assert (found.gpu, found.family) == ("h100-sxm-80g", "qwen3")
    assert found.values["reserved_over_allocated"] == 1.25
    assert found.values["context_bytes"] == 2 * GIB
    assert found.values["allocated_ratio"] == 1.25
    assert found.values["step_ratio"] == 1.25
    assert found.values["mfu"] == pytest.approx(0.4)
    assert found.values["link_bytes_per_s"] == 100e9  # 50 GB in the half second that is not computation


def test_a_run_that_hardly_waits_says_nothing_of_its_link():
    found = measure(finished(step_s=0.6))
    assert not isinstance(found, str)
    assert "link_bytes_per_s" not in found.values


def test_runs_that_cannot_teach_say_why():
    good = finished(step_s=1.0)
    assert "failed" in str(measure(replace(good, state=RunPhase.FAILED)))
    assert "too few" in str(measure(replace(good, step=3)))
    assert "no plan" in str(measure(replace(good, manifest=Manifest(run="a"))))
    on_cpu = replace(good, ranks=run_state(2).ranks)
    assert isinstance(measure(on_cpu), str)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3-30b-a3b", "qwen3"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("llama-3.1-8b", "llama-3.1"),
        ("mixtral-8x7b", "mixtral"),
        ("tiny-moe", "tiny-moe"),
        ("", ""),
    ],
)
def test_families_are_read_from_names(name, family):
    assert model_family(name) == family


def test_what_was_saved_is_read_and_falls_back_to_the_gpu(ftdash_home):
    entries = (Learned("l4-24g", "", 3, context_bytes=5), Learned("l4-24g", "qwen3", 2, context_bytes=7))
    save(Calibration(entries))
    known = learned()
    assert known.entries == entries
    assert known.get("l4-24g", "qwen3") == entries[1]
    assert known.get("l4-24g", "gemma") == entries[0]
    assert known.get("t4-16g", "qwen3") is None


def test_nothing_stored_and_a_broken_file_are_no_errors(ftdash_home):
    assert learned() == Calibration()
    ftdash_home.mkdir(exist_ok=True)
    calibrate.calibration_path().write_text('{"v": 1, "learned": [{"gpu"')
    broken = learned()
    assert broken.entries == ()
    assert str(calibrate.calibration_path()) in broken.notice


def run_dir(root, name: str, step_s: float):
    plan = {"model": "qwen3-8b", "gpu": "h100-sxm-80g"}
    run = Cluster(2, step_s=step_s).create(root, name, state="finished", steps=30)
    manifest = run.read_manifest()
    manifest.plan, manifest.predicted = plan, PREDICTED
    run.write_manifest(manifest)
    return run


def test_medians_over_runs_are_learned_from_run_directories(ftdash_home):
    root = ftdash_home / "runs"
    runs = [run_dir(root, f"run-{i}", step_s) for i, step_s in enumerate((0.8, 1.0, 1.6))]
    calibration, skipped = learn(runs)
    assert skipped == []
    found = calibration.get("h100-sxm-80g", "qwen3")
    assert found is not None
    assert found.runs == 3
    assert found.step_ratio == pytest.approx(1.25)
    assert found.reserved_over_allocated == pytest.approx(66 / 64)
    assert found.context_bytes == 1 * GIB
    assert found.run_ids == ("run-0", "run-1", "run-2")


def test_the_command_learns_stores_and_tells_what_it_left_out(ftdash_home):
    root = ftdash_home / "runs"
    run_dir(root, "good", 1.0)
    Cluster(2).create(root, "short", state="finished", steps=3)
    command = [sys.executable, "-c", "from ftdash.tui.cli import main; main()", "calibrate", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [entry["family"] for entry in data["learned"]] == ["", "qwen3"]
    assert len(data["skipped"]) == 1
    assert learned().get("h100-sxm-80g", "qwen3") is not None


def test_a_prediction_is_corrected_only_by_what_was_measured():
    prediction = evaluate(Plan(model="qwen3-8b", gpu="h100-sxm-80g", gpus=8))
    entry = Learned("h100-sxm-80g", "qwen3", 3, context_bytes=700 << 20, reserved_ratio=1.1, step_ratio=1.25)
    found = correct(prediction, Calibration((entry,)))
    assert found is not None
    assert found.reserved == round(prediction.memory.reserved * 1.1)
    assert found.allocated == prediction.memory.allocated
    assert found.device == found.reserved + (700 << 20)
    assert found.tokens_per_s_per_gpu == pytest.approx(prediction.time.tokens_per_s_per_gpu / 1.25)
    assert found.because == "by 3 runs of qwen3 on h100-sxm-80g"
    other = Learned("l4-24g", "qwen3", 1, step_ratio=2.0)
    assert correct(prediction, Calibration((other,))) is None


def test_the_plan_shows_what_was_learned_beside_its_own_prediction(ftdash_home):
    flags = ["plan", "--model", "qwen3-8b", "--gpu", "h100-sxm-80g", "--gpus", "8", "--strategy", "fsdp"]
    command = [sys.executable, "-c", "from ftdash.tui.cli import main; main()", *flags]
    bare = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
    assert "calibrated" not in bare
    save(Calibration((Learned("h100-sxm-80g", "qwen3", 2, reserved_ratio=1.5, step_ratio=2.0),)))
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True).stdout)
    assert found.pop("calibrated")["step_s"] == pytest.approx(2 * bare["time"]["step_s"])
    assert found == bare
    told = subprocess.run(command, capture_output=True, text=True).stdout
    assert "as measured by 2 runs of qwen3 on h100-sxm-80g" in told


async def test_the_plan_pane_shows_what_was_learned(ftdash_home, tmp_path):
    save(Calibration((Learned("h100-sxm-80g", "qwen3", 2, step_ratio=2.0),)))
    async with cockpit(tmp_path, pane="plan", size=(160, 50)) as (app, pilot):
        app.panes["plan"].set_plan(Plan(model="qwen3-8b", gpu="h100-sxm-80g", gpus=8))
        await until(pilot, lambda: "as measured by 2 runs of qwen3" in screen_text(app))
        app.panes["plan"].set_plan(Plan(model="qwen3-8b", gpu="l4-24g", gpus=8))
        await until(pilot, lambda: "as measured" not in screen_text(app))
