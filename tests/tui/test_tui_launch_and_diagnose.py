"""Launch says what speaks against a run and starts it; Diagnose names the rank that the stacks show."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftdash.engine.launch import local
from ftdash.engine.launch.spec import LaunchError, LaunchSpec
from ftdash.engine.plan import Plan, Strategy
from ftdash.monitor import control
from ftdash.monitor.diagnosis.model import (
    Frame,
    ProcessEvidence,
    ProcState,
    RankEvidence,
    Thread,
    encode_rank,
)
from ftdash.monitor.records import Meta, encode_line
from ftdash.monitor.rundir import Manifest, RunDir
from ftdash.monitor.state import RunPhase
from ftdash.tui.panes.diagnose import DiagnosePane
from ftdash.tui.panes.launch import LaunchPane
from ftdash.tui.widgets.check_list import CheckList
from ftdash.tui.widgets.stack import StackView
from tests.support import screens
from tests.support.screens import cockpit, screen_text, until

SITE = "/env/lib/python3.11/site-packages"
IN_GATHER = [
    Frame("all_gather", f"{SITE}/torch/distributed/distributed_c10d.py", 3100),
    Frame("Trainer.training_step", f"{SITE}/transformers/trainer.py", 2100),
    Frame("main", "/home/me/train.py", 12),
]
IN_REWARD = [
    Frame("recv", "/usr/lib/python3.11/socket.py", 706),
    Frame("score_completions", "/home/me/rewards.py", 88),
    Frame("Trainer.training_step", f"{SITE}/transformers/trainer.py", 2100),
    Frame("main", "/home/me/train.py", 12),
]


def stack_of(rank: int, frames: list[Frame]) -> RankEvidence:
    process = ProcessEvidence(
        pid=4000 + rank,
        host=f"host-{rank}",
        t=time.time(),
        rank=rank,
        proc=ProcState(state="S"),
        threads=[Thread("MainThread", 4000 + rank, frames=frames)],
        source="py-spy",
    )
    return RankEvidence(rank=rank, host=f"host-{rank}", t=time.time(), process=process)


@contextlib.contextmanager
def agent(run: RunDir, stacks: dict[int, list[Frame]]) -> Iterator[None]:
    """Answers dump requests as a node's agent does, with the same stacks each time."""
    ended = threading.Event()
    host, uid = socket.gethostname(), run.path.stat().st_uid

    def serve() -> None:
        while not ended.wait(0.02):
            for path, request in control.pending(run, host, uid):
                folder = run.stacks / request.stamp
                folder.mkdir(exist_ok=True)
                for rank in request.ranks or sorted(stacks):
                    temporary = folder / f".rank-{rank}"
                    temporary.write_bytes(encode_rank(stack_of(rank, stacks[rank])))
                    temporary.rename(folder / f"rank-{rank}.json")
                control.mark_served(path, host)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(Manifest(run="r1", name="r1", world_size=4, state="running"), tmp_path / "runs")
    for rank in range(4):
        meta = Meta(
            t=time.time(),
            rank=rank,
            local_rank=0,
            world_size=4,
            host=f"host-{rank}",
            pid=4000 + rank,
            device="cpu",
        )
        made.rank_file(rank).write_bytes(encode_line(meta))
    return made


async def test_the_rank_in_the_reward_call_is_named_and_its_stack_shown(tmp_path: Path, run: RunDir) -> None:
    stacks = {0: IN_GATHER, 1: IN_GATHER, 2: IN_REWARD, 3: IN_GATHER}
    state = replace(screens.run_state(4), run="r1")
    with agent(run, stacks):
        async with cockpit(tmp_path, pane="diagnose", state=state, run=run) as (app, pilot):
            await pilot.press("d")
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.diagnosis is not None)
            assert pane.diagnosis is not None
            assert [culprit.rank for culprit in pane.diagnosis.verdict.culprits] == [2]
            await pilot.pause()
            text = screen_text(app)
            assert "evidence 4 of 4 ranks" in text
            assert "score_completions" in text
            assert "rewards.py:88 ← first own line" in text
            await pilot.press("down")
            await pilot.pause()
            assert "rank 0 on host-0" in screen_text(app)


async def test_a_stall_is_examined_once_by_itself(tmp_path: Path, run: RunDir) -> None:
    state = replace(screens.run_state(4), run="r1", state=RunPhase.STALLED)
    with agent(run, dict.fromkeys(range(4), IN_GATHER)):
        async with cockpit(tmp_path, pane="diagnose", state=state, run=run) as (app, pilot):
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.diagnosis is not None)
            first = pane._examination
            app.show_newest(pane)
            assert pane._examination is first


async def test_the_report_is_markdown_and_holds_no_bare_text_of_the_job(tmp_path: Path, run: RunDir) -> None:
    state = replace(screens.run_state(4), run="r1")
    with agent(run, {0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}):
        async with cockpit(tmp_path, pane="diagnose", state=state, run=run) as (app, pilot):
            await pilot.press("d")
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.diagnosis is not None)
            await pilot.press("r")
            await pilot.pause()
            prompt = app.query_one("Input")
            path = tmp_path / "report.md"
            prompt.value = str(path)  # type: ignore[attr-defined]
            await pilot.press("enter")
            await until(pilot, path.exists)
            text = path.read_text()
            assert "| 1 | host-1 | 4001 |" in text
            assert "score_completions" in text


async def test_a_rank_is_dumped_from_monitor_on_a_key(tmp_path: Path, run: RunDir) -> None:
    with agent(run, {0: IN_GATHER, 1: IN_REWARD}):
        async with cockpit(tmp_path, pane="monitor", state=screens.run_state(2), run=run) as (app, pilot):
            await pilot.press("down", "d")
            await until(pilot, lambda: "rewards.py:88" in screen_text(app))
            assert app.screen.query_one(StackView).evidence is not None
            assert app.screen.query_one(StackView).evidence.rank == 1  # type: ignore[union-attr]


async def test_a_dump_without_an_agent_ends_in_a_sentence(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.tui.dumps.PATIENCE_S", 0.3)
    async with cockpit(tmp_path, pane="monitor", state=screens.run_state(2), run=run) as (app, pilot):
        await pilot.press("d")
        await until(pilot, lambda: "no answer for rank 0" in screen_text(app))


async def test_stopping_needs_the_typed_word(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[RunDir] = []
    monkeypatch.setattr("ftdash.tui.launching.stop", lambda run, post, save=False: stopped.append(run))
    async with cockpit(tmp_path, pane="diagnose", state=screens.run_state(2), run=run) as (_, pilot):
        await pilot.press("k", "y", "enter")
        await pilot.pause()
        assert stopped == []
        await pilot.press("k", "s", "t", "o", "p", "enter")
        await pilot.pause()
        assert stopped == [run]


async def test_the_checks_of_a_plan_are_listed_with_their_fixes(tmp_path: Path) -> None:
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        pane = app.query_one(LaunchPane)
        pane.take_plan(Plan(model="qwen3-8b", gpus=4, strategy=Strategy.FSDP))
        await until(pilot, lambda: app.query_one(CheckList).border_title != "Checks")
        findings = app.query_one(CheckList).items
        assert all(finding.fix for finding, _ in findings)
        assert "accelerate launch" in screen_text(app)


async def test_a_refused_launch_is_one_line_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: LaunchSpec) -> RunDir:
        raise LaunchError("--data none.jsonl: no such file")

    monkeypatch.setattr(local, "launch", refuse)
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "refused: --data none.jsonl" in screen_text(app))
        assert app.feed is None


async def test_a_started_run_is_watched_and_its_log_shown(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LaunchSpec] = []
    monkeypatch.setattr(local, "launch", lambda spec: seen.append(spec) or run)
    (run.logs / "launcher.log").write_text("[rank0]: first step done\n")
    async with cockpit(tmp_path, pane="launch") as (app, pilot):
        await pilot.press("enter")
        await until(pilot, lambda: "first step done" in screen_text(app))
        assert app.feed is not None
        assert app.feed.run == run
        assert seen[0].plan is not None
        assert seen[0].plan.model == "tiny-moe"
        assert seen[0].runs == tmp_path / "runs"


async def test_a_dead_run_is_diagnosed_from_what_it_left(tmp_path: Path) -> None:
    dead = Manifest(run="r2", name="r2", world_size=2, state="failed", reason="rank 1 exited with 1")
    run = RunDir.create(dead, tmp_path / "runs")
    (run.logs / "launcher.log").write_text(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/me/train.py", line 12, in main\n'
        "[rank1]:     loss = score(batch)\n"
        "[rank1]: KeyError: 'reward'\n"
    )
    state = replace(screens.run_state(2), run="r2", state=RunPhase.FAILED)
    async with cockpit(tmp_path, pane="diagnose", state=state, run=run) as (app, pilot):
        await pilot.press("d")
        pane = app.query_one(DiagnosePane)
        await until(pilot, lambda: pane.diagnosis is not None)
        assert pane.diagnosis is not None
        assert [culprit.rank for culprit in pane.diagnosis.verdict.culprits] == [1]
        assert "KeyError" in screen_text(app)
