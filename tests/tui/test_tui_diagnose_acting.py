"""The Diagnose pane acts on real processes: nothing before the words are typed, then only what was named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from ftdash.monitor import procs
from ftdash.monitor.control import RankSignal
from ftdash.monitor.diagnosis import procfs
from ftdash.monitor.diagnosis.model import Culprit, Diagnosis, RankEvidence, Sample, Verdict
from ftdash.monitor.diagnosis.rundata import rank_metas
from ftdash.monitor.hostname import node_name
from ftdash.monitor.rundir import Manifest, RunDir, RunError
from ftdash.monitor.state import RunPhase, RunState
from ftdash.monitor.stop import stop_run
from ftdash.tui.cockpit import Cockpit
from ftdash.tui.examine import Examined, Look
from ftdash.tui.panes.diagnose import DiagnosePane
from ftdash.tui.panes.diagnose_act import Act, ActScreen, choices
from ftdash.tui.panes.diagnose_acting import Target, signal_rank
from ftdash.tui.panes.diagnose_locals import LocalsScreen
from ftdash.tui.panes.diagnose_restart import spec_of
from ftdash.tui.widgets.stack import StackView
from tests.support import screens
from tests.support.live_runs import agent_pid, processes_of, read, start_run, wait_for, wait_until
from tests.support.screens import StillFeed, cockpit, screen_text, until
from tests.support.stacks import IN_GATHER, stack_of


@contextlib.contextmanager
def hanging(tmp_path: Path) -> Iterator[RunDir]:
    """A real run of two ranks that have stopped at step 3; nothing of it is left at the end."""
    run = start_run(tmp_path / "runs", 2, "--hang-at", "3")
    try:
        wait_for(run, lambda state: len(state.ranks) == 2 and state.step >= 2)
        yield run
    finally:
        stop_run(run, grace_s=0.5)


@contextlib.asynccontextmanager
async def diagnosing(
    tmp_path: Path, run: RunDir, state: RunState
) -> AsyncIterator[tuple[Cockpit, Pilot[None]]]:
    async with cockpit(tmp_path / "elsewhere", pane="diagnose") as (app, pilot):
        app.feed = StillFeed(state, run)  # type: ignore[assignment]
        app.show_newest(app.panes["diagnose"])
        await pilot.pause()
        yield app, pilot


def known(run: RunDir) -> Look:
    """A look that knows the run's processes, its first rank the culprit."""
    ranks = []
    for rank, meta in sorted(rank_metas(run).items()):
        one = stack_of(rank, IN_GATHER)
        one.host = meta.host
        assert one.process is not None
        one.process.pid, one.process.host = meta.pid, meta.host
        ranks.append(one)
    return of_ranks(ranks)


def of_ranks(ranks: list[RankEvidence]) -> Look:
    return Look(Diagnosis(Verdict("lock", (), 0.9, "rank 0 waits for a lock")), (Sample(ranks=tuple(ranks)),))


async def show(pilot: Pilot[None], found: Look, rank: int) -> DiagnosePane:
    pane = pilot.app.query_one(DiagnosePane)
    pane.post_message(Examined(found))
    await until(pilot, lambda: pane.look is found)
    pane._show_rank(rank)
    return pane


async def type_words(pilot: Pilot[None], words: str) -> str:
    """Answer the question at the bottom; the question."""
    await until(pilot, lambda: bool(pilot.app.screen.query(Input)))
    asked = screen_text(pilot.app).splitlines()[-1]
    pilot.app.screen.query_one(Input).value = words
    await pilot.press("enter")
    await pilot.pause()
    return asked


async def eventually(pilot: Pilot[None], holds: Callable[[], bool], patience_s: float = 30.0) -> None:
    """As `until`, looking less often: processes take their time."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, screen_text(pilot.app)
        await asyncio.sleep(0.05)
        await pilot.pause()


@pytest.mark.slow
async def test_the_culprit_is_killed_once_its_number_was_typed(tmp_path: Path) -> None:
    with hanging(tmp_path) as run:
        state = read(run)
        pids = {rank.rank: rank.pid for rank in state.ranks}
        async with diagnosing(tmp_path, run, state) as (app, pilot):
            await show(pilot, known(run), 1)
            await pilot.press("k", "r")
            asked = await type_words(pilot, "kill 0")
            assert f"rank 1 (pid {pids[1]} on {node_name()}): type kill 1" in asked
            assert procfs.state_letter(pids[1]) in ("S", "R")
            await pilot.press("k", "r")
            await type_words(pilot, "kill 1")
            await eventually(pilot, lambda: f"SIGKILL sent to rank 1, pid {pids[1]}" in screen_text(app))
            ended = wait_for(run, lambda now: now.state is RunPhase.FAILED)
            codes = {one.rank: one.code for one in ended.manifest.exits}
            assert codes[1] == -signal.SIGKILL
        assert spec_of(run, ()).command[:3] == ("env", "-C", str(Path.cwd()))


@pytest.mark.slow
async def test_the_job_is_killed_with_everything_that_belongs_to_it(tmp_path: Path) -> None:
    with hanging(tmp_path) as run:
        async with diagnosing(tmp_path, run, read(run)) as (_, pilot):
            await pilot.press("k", "k")
            asked = await type_words(pilot, "kill job")
            assert "2 ranks" in asked
            await eventually(pilot, lambda: not processes_of(run))
            assert read(run).state is RunPhase.STOPPED


async def test_a_signal_meant_for_a_process_that_was_replaced_hits_nobody(tmp_path: Path) -> None:
    with hanging(tmp_path) as run:
        rank = read(run).ranks[0]
        target = Target(rank.rank, rank.pid + 1, rank.host)
        with pytest.raises(RunError, match=f"rank 0 is pid {rank.pid} now"):
            signal_rank(run, target, RankSignal.KILL)
        with pytest.raises(RunError, match="no handler for SIGUSR2 and would end"):
            signal_rank(run, replace(target, pid=rank.pid), RankSignal.STACKS)
        assert procfs.state_letter(rank.pid) in ("S", "R")


async def test_without_an_agent_only_a_process_with_the_runs_mark_is_signalled(tmp_path: Path) -> None:
    with hanging(tmp_path) as run:
        rank = read(run).ranks[0]
        agent = agent_pid(run)
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not procs.agent_alive(run.path, agent))
        with pytest.raises(RunError, match="not a process of this run"):
            signal_rank(run, Target(0, os.getpid(), rank.host), RankSignal.KILL)
        said = signal_rank(run, Target(0, rank.pid, rank.host), RankSignal.KILL)
        assert said == f"SIGKILL sent to rank 0, pid {rank.pid}"
        wait_until(lambda: procfs.state_letter(rank.pid) in ("", "Z"))


HOOKED = """
import faulthandler, os, signal, sys, time
path = os.path.join(os.environ["FTDASH_RUN_DIR"], "stacks", f"faulthandler-rank-{os.environ['RANK']}.txt")
faulthandler.register(signal.SIGUSR2, file=open(path, "a"), all_threads=True)
def score_completions():
    secret_prompt = "a prompt of a customer"
    print("ready", flush=True)
    time.sleep(600)
score_completions()
"""


@contextlib.contextmanager
def hooked_rank(tmp_path: Path) -> Iterator[tuple[RunDir, Target]]:
    """One rank whose process writes its stacks on SIGUSR2, without an agent."""
    manifest = Manifest(run="r3", name="r3", world_size=1, state="running", hosts=[node_name()])
    run = RunDir.create(manifest, tmp_path / "runs")
    script = tmp_path / "train.py"
    script.write_text(HOOKED)
    environ = {**os.environ, "FTDASH_RUN_DIR": str(run.path), "RANK": "0"}
    process = subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield run, Target(0, process.pid, node_name())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def look_at(target: Target) -> Look:
    one = stack_of(target.rank, IN_GATHER)
    one.host = target.host
    assert one.process is not None
    one.process.pid, one.process.host = target.pid, target.host
    return of_ranks([one])


async def test_the_hook_of_a_rank_writes_its_stacks_on_request(tmp_path: Path) -> None:
    with hooked_rank(tmp_path) as (run, target):
        async with diagnosing(tmp_path, run, screens.run_state(1)) as (app, pilot):
            await show(pilot, look_at(target), 0)
            await pilot.press("u")
            stack = app.query_one(StackView)
            await eventually(
                pilot,
                lambda: (
                    stack.evidence is not None
                    and stack.evidence.process is not None
                    and stack.evidence.process.source == "faulthandler"
                ),
            )
            assert "score_completions" in screen_text(app)
            assert procfs.state_letter(target.pid) in ("S", "R")


async def test_locals_are_read_after_the_word_and_reach_the_disk_only_on_request(tmp_path: Path) -> None:
    secret = "a prompt of a customer"
    with hooked_rank(tmp_path) as (run, target):
        async with diagnosing(tmp_path, run, screens.run_state(1)) as (app, pilot):
            await show(pilot, look_at(target), 0)
            await pilot.press("l")
            asked = await type_words(pilot, "yes")
            assert "can hold training data and keys: type locals" in asked
            assert not isinstance(app.screen, LocalsScreen)
            await pilot.press("l")
            await type_words(pilot, "locals")
            await eventually(pilot, lambda: isinstance(app.screen, LocalsScreen))
            await until(pilot, lambda: secret in screen_text(app))
            held = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
            assert not any(secret in path.read_text(errors="replace") for path in held)
            await pilot.press("w")
            path = tmp_path / "locals.txt"
            await type_words(pilot, str(path))
            await until(pilot, path.exists)
            assert secret in path.read_text()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            await pilot.press("escape")
            await pilot.pause()
            assert not isinstance(app.screen, LocalsScreen)
            assert secret not in screen_text(app)


@pytest.mark.slow
async def test_a_run_is_started_again_with_the_switches_in_its_environment(tmp_path: Path) -> None:
    with hanging(tmp_path) as run, contextlib.ExitStack() as cleanup:
        async with diagnosing(tmp_path, run, read(run)) as (app, pilot):
            await pilot.press("k", "d")
            await until(pilot, lambda: "torch-detail" in screen_text(app))
            await pilot.press("escape")
            await type_words(pilot, "relaunch")
            await eventually(pilot, lambda: app.feed is not None and app.feed.run != run, patience_s=60.0)
            assert app.feed is not None
            again = app.feed.run
            cleanup.callback(stop_run, again, grace_s=0.5)
            assert read(run).state is RunPhase.STOPPED
            env = again.read_manifest().env
            assert "TORCH_DISTRIBUTED_DEBUG" not in env, "it ends jobs that run without it"
            assert not again.run_id.split("-")[2].startswith("env"), "named after its launcher"
            assert env["TORCH_FR_BUFFER_SIZE"] == "20000"
            state = wait_for(again, lambda now: len(now.ranks) == 2 and now.step >= 2)
            environ = procfs.environment(state.ranks[0].pid)
            assert environ["TORCH_FR_BUFFER_SIZE"] == "20000"
            assert os.readlink(f"/proc/{state.ranks[0].pid}/cwd") == str(Path.cwd())


async def test_what_cannot_be_done_says_why_and_does_nothing(tmp_path: Path) -> None:
    run = RunDir.create(Manifest(run="r4", name="r4", state="finished", backend="slurm"), tmp_path / "runs")
    state = replace(screens.run_state(2), state=RunPhase.FINISHED, manifest=run.read_manifest())
    blocked = {choice.act: choice.blocked for choice in choices(state, None, None)}
    assert blocked[Act.STOP] == "the run has finished"
    assert blocked[Act.RESTART] == "only for a run that was started on this machine"
    async with diagnosing(tmp_path, run, state) as (app, pilot):
        await pilot.press("k", "t")
        await pilot.pause()
        assert isinstance(app.screen, ActScreen)
        assert not app.screen.query(Input)


def test_a_stopped_rank_can_be_continued_and_a_stalled_save_says_that_it_is_vain() -> None:
    state = replace(screens.run_state(2), state=RunPhase.STALLED)
    found = choices(state, Target(1, 4001, "gpu-a"), Diagnosis(Verdict("stopped-rank")))
    assert found[0].act is Act.CONTINUE
    assert "a stuck rank never gets there" in next(choice.what for choice in found if choice.act is Act.SAVE)


async def test_the_culprits_node_is_left_out_when_its_job_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(run="r5", name="r5", state="running", backend="slurm", world_size=2)
    run = RunDir.create(manifest, tmp_path / "runs")
    again = RunDir.create(Manifest(run="r6", name="r6", state="starting", backend="slurm"), tmp_path / "runs")
    done: list[tuple[str, object]] = []

    def resubmit(old: RunDir, *, exclude: list[str]) -> RunDir:
        done.append(("submitted without", exclude))
        return again

    monkeypatch.setattr("ftdash.engine.launch.stop.stop", lambda old: done.append(("ended", old)))
    monkeypatch.setattr("ftdash.engine.slurm.submit.resubmit", resubmit)
    state = replace(screens.run_state(2), run="r5", manifest=manifest)
    async with diagnosing(tmp_path, run, state) as (app, pilot):
        verdict = Verdict("d-state", (Culprit(1, "gpu-b", 4001),), 0.9, "rank 1 sleeps in the kernel")
        ranks = (stack_of(0, IN_GATHER), stack_of(1, IN_GATHER))
        await show(pilot, Look(Diagnosis(verdict), (Sample(ranks=ranks),)), 1)
        await pilot.press("k", "x")
        asked = await type_words(pilot, "exclude gpu-b")
        assert "type exclude gpu-b" in asked
        await eventually(pilot, lambda: app.feed is not None and app.feed.run == again)
    assert done == [("ended", run), ("submitted without", ["gpu-b"])]


async def test_saving_stopping_and_killing_end_the_run_each_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(Manifest(run="r7", name="r7", state="running"), tmp_path / "runs")
    ended: list[tuple[RunDir, bool, float]] = []

    def stop(asked: RunDir, *, save: bool, grace_s: float) -> set[int]:
        ended.append((asked, save, grace_s))
        return {77} if save else set()

    monkeypatch.setattr("ftdash.engine.launch.stop.stop", stop)
    async with diagnosing(tmp_path, run, screens.run_state(2)) as (app, pilot):
        for key, words in (("t", "stop"), ("k", "kill job"), ("s", "save")):
            await pilot.press("k", key)
            await type_words(pilot, f"{words} it")
            await pilot.press("k", key)
            await type_words(pilot, words)
        await until(pilot, lambda: "still alive: 77" in screen_text(app))
    assert ended == [(run, False, 20.0), (run, False, 1.0), (run, True, 20.0)]
