"""A run directory whose file system hangs: training goes on, nothing dies, and no step is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftdash.monitor.beat import memory_of, read_beat
from ftdash.monitor.records import Step, decode_lines, decoder
from ftdash.monitor.rundir import RunDir
from ftdash.monitor.state import RunPhase
from ftdash.monitor.stop import stop_run
from tests.support.hanging import HangingFileSystem, hanging_file_system, why_not
from tests.support.live_runs import agent_pid, processes_of, start_run, wait_for, wait_until
from tests.support.screens import cockpit, screen_text, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[HangingFileSystem]:
    with hanging_file_system(tmp_path) as system:
        yield system


def steps_of(run: RunDir, rank: int) -> list[int]:
    records, garbage = decode_lines(decoder, run.rank_file(rank).read_bytes())
    assert not garbage
    return [record.step for record in records if isinstance(record, Step)]


def test_ranks_go_on_while_the_file_system_hangs_and_every_step_arrives(shared: HangingFileSystem) -> None:
    run = start_run(shared.place, 2, "--steps", "700", "--step-s", "0.02")
    paths = [run.beat_file(rank) for rank in (0, 1)]
    wait_until(lambda: all(memory_of(path) for path in paths))
    memories = [memory_of(path) for path in paths]

    def steps_now() -> list[int]:
        beats = [read_beat(path, memory) for path, memory in zip(paths, memories, strict=True)]
        return [beat.step if beat else 0 for beat in beats]

    wait_until(lambda: min(steps_now()) > 3)
    agent, before = agent_pid(run), steps_now()
    shared.hang()
    wait_until(lambda: all(now > then + 100 for now, then in zip(steps_now(), before, strict=True)))
    assert os.path.exists(f"/proc/{agent}")
    assert not shared.rescued
    shared.resume()
    state = wait_for(run, lambda state: state.state not in (RunPhase.STARTING, RunPhase.RUNNING))
    assert state.state is RunPhase.FINISHED
    assert "telemetry-dropped" not in [alert.code for alert in state.alerts]
    for rank, path in enumerate(paths):
        assert steps_of(run, rank) == list(range(1, 701))
        assert read_beat(path).phase == "end"
    wait_until(lambda: not processes_of(run))


async def test_the_app_answers_keys_while_the_run_directory_hangs(
    shared: HangingFileSystem, tmp_path: Path
) -> None:
    run = start_run(shared.place, 2, "--steps", "100000", "--step-s", "0.05")
    try:
        wait_for(run, lambda state: len(state.ranks) == 2 and all(rank.step > 5 for rank in state.ranks))
        async with cockpit(tmp_path, run=run, pane="monitor") as (app, pilot):
            await until(pilot, lambda: "running" in screen_text(app))
            shared.hang()
            await until(pilot, lambda: "no answer for" in screen_text(app), patience_s=20)
            for key, shown in (("1", "Does it fit?"), ("2", "What will happen"), ("3", "no answer for")):
                await pilot.press(key)
                await until(pilot, lambda shown=shown: shown in screen_text(app))
            assert not shared.rescued
            shared.resume()
            seen = app.feed.peek().step
            await until(pilot, lambda: app.feed.peek().step > seen)
            await until(pilot, lambda: "no answer for" not in screen_text(app))
    finally:
        shared.resume()
        stop_run(run, grace_s=2)
