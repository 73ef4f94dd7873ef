"""Launch on other backends: fields become a job, a rehearsal is told, a diff and switches are shown."""

from __future__ import annotations

import io
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ftdash.engine.launch import local
from ftdash.engine.launch.job import job_of
from ftdash.engine.launch.spec import Backend, LaunchError, LaunchSpec
from ftdash.engine.launch.start import start
from ftdash.engine.plan import Plan, Strategy
from ftdash.engine.slurm.client import Job, Partition, SlurmError
from ftdash.engine.slurm.defaults import NodeShape, Site
from ftdash.engine.slurm.queue import QueueView, QueueWatch
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.tui import launching, rehearsing
from ftdash.tui.app import open_app
from ftdash.tui.launching import Differed, SiteSeen, SlurmFields, Wanted
from ftdash.tui.panes.launch import LaunchPane
from ftdash.tui.panes.launch_inputs import SLURM_FIELDS, diff_text, job_text, with_value
from ftdash.tui.panes.queue import QueueScreen, queue_text
from ftdash.tui.panes.rehearsal import RehearsalScreen, outcome_text
from ftdash.tui.panes.switches import SwitchesScreen, SwitchList
from ftdash.tui.rehearsing import Outcome
from tests.support.screens import HOSTILE, cockpit, screen_text, until

PLAN = Plan(model="qwen3-8b", gpus=16, strategy=Strategy.FSDP)


def test_every_field_of_slurm_reaches_the_job() -> None:
    typed = {
        "partition": "h100",
        "account": "lab7",
        "qos": "long",
        "time": "8:00:00",
        "memory": "200G",
        "cpus_per_task": "24",
        "constraint": "ib",
        "exclude": "node09",
        "reservation": "maintenance",
        "container": "image.sqsh",
        "container_runtime": "pyxis",
        "modules": "cuda/12.8 gcc",
        "directives": "--switches=1",
    }
    assert set(typed) == set(SLURM_FIELDS)
    wanted = Wanted(PLAN, backend="slurm")
    for name, value in {**typed, "nodes": 2.0}.items():
        wanted = with_value(wanted, name, value)
    spec = wanted.spec(None)
    assert spec.backend is Backend.SLURM
    assert spec.slurm is not None
    assert (spec.nodes, spec.slurm.nodes, spec.slurm.cpus_per_task) == (2, 2, 24)
    text = job_text(wanted).plain
    for directive in (
        "--partition=h100",
        "--account=lab7",
        "--qos=long",
        "--time=8:00:00",
        "--mem=200G",
        "--constraint=ib",
        "--exclude=node09",
        "--reservation=maintenance",
        "--switches=1",
        "--gpus-per-node=8",
    ):
        assert f"#SBATCH {directive}\n" in text
    assert "module load cuda/12.8\n" in text
    assert "--container-image=image.sqsh" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (SlurmFields(time="tomorrow"), "--time 'tomorrow'"),
        (SlurmFields(cpus_per_task="many"), "--cpus-per-task 'many'"),
        (SlurmFields(directives='--comment="open'), "quotation"),
        (SlurmFields(modules="a;rm"), "--module"),
        (SlurmFields(container_runtime="docker"), "--container-runtime"),
    ],
)
def test_an_option_slurm_could_not_take_is_one_line(fields: SlurmFields, words: str) -> None:
    wanted = Wanted(PLAN, backend="slurm", slurm=fields)
    with pytest.raises(LaunchError, match=words):
        wanted.spec(None)
    assert words in job_text(wanted).plain


def test_nodes_that_do_not_divide_the_ranks_are_named_in_the_preview() -> None:
    assert "cannot be spread evenly" in job_text(Wanted(PLAN, backend="slurm", nodes=3)).plain


def test_what_sinfo_says_completes_the_job_in_the_preview() -> None:
    site = Site({"h100": NodeShape(12, 96, 2_000_000, 8, "h100"), "cpu": NodeShape(3, 16, 64_000, 0)}, "h100")
    wanted = Wanted(PLAN, backend="slurm", nodes=4)
    text = job_text(wanted, SiteSeen(site)).plain
    assert "h100 · 12 nodes, each 8 h100, 96 CPUs, 2,000 GB" in text
    assert "--cpus-per-task=48" in text
    unknown = replace(wanted, slurm=SlurmFields(partition="none"))
    assert "sinfo knows no partition none" in job_text(unknown, SiteSeen(site)).plain
    assert (
        "the controller may be down" in job_text(wanted, SiteSeen(None, "the controller may be down")).plain
    )


async def test_the_fields_of_the_chosen_backend_alone_are_shown(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        assert "Partition" not in screen_text(app)
        app.query_one("#in-backend").focus()
        await pilot.press("right")
        await until(pilot, lambda: "#SBATCH --nodes=1" in screen_text(app))
        assert "Partition" in screen_text(app)
        assert "submit to Slurm: 2 ranks" in screen_text(app)
        assert "Hosts file" not in screen_text(app)
        await pilot.press("right")
        await until(pilot, lambda: "Hosts file" in screen_text(app))
        assert "Partition" not in screen_text(app)


async def test_without_sbatch_a_submission_is_refused_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.engine.slurm.client.available", lambda: False)
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        app.query_one("#in-backend").focus()
        await pilot.press("right", "s")
        await until(pilot, lambda: "refused: --backend slurm" in screen_text(app))


async def test_the_queue_shows_jobs_and_hostile_names_as_text(tmp_path: Path) -> None:
    jobs = tuple(
        Job(
            id=str(number),
            name=name,
            state="PENDING",
            reason="Priority",
            node_count=2,
            started=int(time.time()) + 60,
        )
        for number, name in enumerate(HOSTILE)
    )
    view = QueueView(jobs, (Partition("h100", {"idle": 3, "mixed": 1}, "gpu:8"),), asked=time.time())
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        app.push_screen(QueueScreen(QueueWatch(ask=lambda user: view)))
        await until(pilot, lambda: "3 idle, 1 mixed" in screen_text(app))
        text = screen_text(app)
        assert "[/usr/bin/x]" in text
        assert "[bold red]loud" in text
        assert "Priority  starts about " in text
        assert "\x1b" not in text
        await pilot.press("escape")
        await until(pilot, lambda: "Queue of Slurm" not in screen_text(app))


def test_a_queue_that_does_not_answer_says_why() -> None:
    def refuse(user: str) -> QueueView:
        raise SlurmError("squeue: no such cluster")

    watch = QueueWatch(ask=refuse)
    deadline = time.monotonic() + 20
    while not watch.view().error and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "squeue: no such cluster" in queue_text(watch.view(), time.time()).plain


async def test_a_switch_is_turned_on_with_its_price_and_kept(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("w")
        await until(pilot, lambda: isinstance(app.screen, SwitchesScreen))
        await pilot.pause()
        assert "some hundred lines a rank at start" in screen_text(app)
        await pilot.press("enter", "down", "down", "space")
        assert app.screen.query_one(SwitchList).chosen == {"nccl-info", "torch-detail"}
        await pilot.press("down", "space")  # contradicts the one above
        assert app.screen.query_one(SwitchList).chosen == {"nccl-info", "torch-detail"}
        await pilot.press("escape")
        pane = app.query_one(LaunchPane)
        await until(pilot, lambda: pane.wanted.switches == ("nccl-info", "torch-detail"))
        await until(pilot, lambda: "NCCL_DEBUG=INFO" in screen_text(app))


def test_switches_reach_the_environment_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[local.Prepared] = []
    monkeypatch.setattr(local, "start_agent", started.append)
    wanted = Wanted(PLAN, command=f"{sys.executable} -c pass", switches=("nccl-info", "launch-blocking"))
    run = start(wanted.spec(str(tmp_path)))
    for env in (started[0].env, run.read_manifest().env):
        assert (env["NCCL_DEBUG"], env["CUDA_LAUNCH_BLOCKING"]) == ("INFO", "1")
    spec = replace(wanted, backend="ssh").spec(str(tmp_path))
    job = job_of(local.prepare(spec), spec, nodes=2)
    assert job.env["NCCL_DEBUG"] == "INFO"


def test_a_secret_is_no_part_of_what_a_launch_adds_to_the_ranks(tmp_path: Path) -> None:
    spec = LaunchSpec(command=(sys.executable, "-c", "pass"), env=(("HF_TOKEN", "hf_x"),), runs=tmp_path)
    with pytest.raises(LaunchError, match="environment HF_TOKEN"):
        local.prepare(spec)
    assert not list(tmp_path.iterdir())


def test_the_diff_names_what_changed_since_the_last_run_of_that_name(tmp_path: Path) -> None:
    wanted = Wanted(PLAN, name="mine")
    assert launching.difference(wanted, str(tmp_path)).trouble == "no run is named mine yet"
    run = RunDir.create(Manifest(run="r1", name="mine", world_size=16), tmp_path)
    RunDir.create(Manifest(run="r2", name="other", world_size=16), tmp_path)
    first = launching.difference(wanted, str(tmp_path))
    assert first.run == "r1"
    files: dict[str, list[str]] = {}
    for line in first.lines:
        if line.startswith("+++ now/"):
            files[line.removeprefix("+++ now/")] = []
        elif line.startswith("+"):
            files[next(reversed(files))].append(line[1:])
    assert files
    for name, lines in files.items():
        (run.config / name).write_text("\n".join(lines) + "\n")
    assert launching.difference(wanted, str(tmp_path)).lines == ()
    changed = launching.difference(replace(wanted, plan=structs.replace(PLAN, micro_batch=3)), str(tmp_path))
    assert any(line.startswith("+") and "micro_batch" in line and "3" in line for line in changed.lines)


def test_a_hostile_diff_and_outcome_are_plain_text() -> None:
    diff = diff_text(Differed("r1", tuple(f"+{text}" for text in HOSTILE)))
    told = outcome_text(Outcome(HOSTILE, HOSTILE, failure=HOSTILE[2], seconds=1), Path("/tmp/x"))
    for text in (diff.plain, told.plain):
        assert "\x1b" not in text
        for hostile in HOSTILE[:5]:
            assert hostile in text


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Another program in the place of the rehearsal's worker process."""
    script = tmp_path / "worker"
    head = f"#!{sys.executable}\nimport sys, time, pathlib\nwork = pathlib.Path(sys.argv[3])\n"
    script.write_text(f"{head}{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(rehearsing.sys, "executable", str(script))


async def test_a_rehearsal_tells_what_it_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = '{"proved":["4 steps on 2 ranks"],"not_proved":["NCCL"],"failure":"","seconds":41.0}'
    stub(tmp_path, monkeypatch, f"(work / 'outcome.json').write_text('{told}')")
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: "proved 1 thing on this CPU in 41 s" in screen_text(app))
        text = screen_text(app)
        assert "✓ 4 steps on 2 ranks" in text
        assert "not proved" in text


async def test_a_rehearsal_that_dies_fails_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, "sys.exit('MemoryError: [/usr/bin/x]')")
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("r")
        words = "the rehearsal ended with 1: MemoryError: [/usr/bin/x]"
        await until(pilot, lambda: words in screen_text(app))


async def test_leaving_a_rehearsal_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "time.sleep(600)")
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, RehearsalScreen))
        process = app.screen._process  # type: ignore[attr-defined]
        assert process.poll() is None
        await pilot.press("escape")
        assert process.wait(20) != 0


def test_what_cannot_be_rehearsed_is_the_workers_one_line(tmp_path: Path) -> None:
    process = rehearsing.start(Plan(model="qwen3-8b", gpus=8, pp=2), tmp_path / "work")
    found = rehearsing.outcome(tmp_path / "work", process.wait(120))
    assert process.returncode == 1
    assert found.failure
    assert "\n" not in found.failure
    assert found.proved == ()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_redirected_stderr_is_named_instead_of_an_empty_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Terminal()
    monkeypatch.setattr(sys, "stdout", seen)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert open_app([]) == 2
    assert "stderr is no terminal" in seen.getvalue()
    assert seen.getvalue().count("\n") == 1
