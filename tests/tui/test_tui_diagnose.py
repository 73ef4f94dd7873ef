"""The Diagnose pane: verdict first, stacks folded by rank, two dumps compared, why a rank was not seen."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from ftdash import monitor
from ftdash.monitor.diagnosis.incident import Incident
from ftdash.monitor.diagnosis.model import (
    Beat,
    Culprit,
    Diagnosis,
    DumpFailure,
    Frame,
    Group,
    RankEvidence,
    Sample,
    Verdict,
    encode_rank,
)
from ftdash.monitor.records import HANG_CODE
from ftdash.monitor.rundir import Manifest, RunDir, write_atomic
from ftdash.monitor.state import Alert, RunPhase, RunState
from ftdash.tui import theme
from ftdash.tui.cockpit import Cockpit
from ftdash.tui.examine import Examined, Look, look
from ftdash.tui.panes.diagnose import DiagnosePane
from ftdash.tui.panes.diagnose_compare import MovedTable, compare
from ftdash.tui.panes.diagnose_refusals import refusals
from ftdash.tui.panes.diagnose_tree import StackTree, python_frames
from ftdash.tui.panes.diagnose_tree import fold as fold_tree
from ftdash.tui.widgets.groups import GroupTable, fold
from ftdash.tui.widgets.stack import StackView
from ftdash.tui.widgets.verdict import facts_of
from tests.support import screens
from tests.support.screens import HOSTILE, StillFeed, cockpit, screen_text, until
from tests.support.stacks import IN_GATHER, IN_REWARD, agent, run_elsewhere, stack_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_elsewhere(tmp_path)


def watched(state: RunPhase = RunPhase.RUNNING, ranks: int = 4) -> RunState:
    return replace(screens.run_state(ranks), run="r1", state=state)


def dump(stacks: dict[int, list[Frame]], t: float = 1000.0) -> dict[int, RankEvidence]:
    """Evidence of one moment."""
    found = {}
    for rank, frames in stacks.items():
        found[rank] = stack_of(rank, frames)
        found[rank].t = t
    return found


def look_at(stacks: dict[int, list[Frame]]) -> Look:
    samples = [
        Sample(t=t, ranks=tuple(dump(stacks, t).values()), expected=frozenset(stacks), world_size=len(stacks))
        for t in (1000.0, 1005.0)
    ]
    return look(samples)


@contextlib.asynccontextmanager
async def diagnosing(
    tmp_path: Path, run: RunDir, state: RunState, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Cockpit, Pilot[None]]]:
    """The pane on this state of the run; the run directory is written to, but nobody else reads it."""
    async with cockpit(tmp_path / "elsewhere", pane="diagnose", size=size) as (app, pilot):
        app.feed = StillFeed(state, run)  # type: ignore[assignment]
        app.show_newest(app.panes["diagnose"])
        await pilot.pause()
        yield app, pilot


async def show(pilot: Pilot[None], found: Look) -> DiagnosePane:
    """The pane once a look has come back from its thread."""
    pane = pilot.app.query_one(DiagnosePane)
    pane.post_message(Examined(found))
    await until(pilot, lambda: pane.look is found)
    await pilot.pause()
    return pane


async def test_who_where_and_what_to_type_stand_on_the_smallest_screen(tmp_path: Path, run: RunDir) -> None:
    stacks = {0: IN_GATHER, 1: IN_GATHER, 2: IN_REWARD, 3: IN_GATHER}
    with agent(run, stacks):
        async with diagnosing(tmp_path, run, watched(), (80, 24)) as (app, pilot):
            await pilot.press("d")
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.look is not None)
            assert pane.diagnosis is not None
            assert [culprit.rank for culprit in pane.diagnosis.verdict.culprits] == [2]
            await pilot.pause()
            lines = screen_text(app).splitlines()
            verdict = " ".join(" ".join(lines[2:12]).split())
            assert "rank 2 is outside of any collective" in verdict
            assert "who rank 2 · host-2 · pid 4002" in verdict
            assert "where score_completions (/home/me/rewards.py:88)" in verdict
            assert "type ssh host-2 py-spy dump" in verdict
            assert any("rewards.py:88 ← first own line" in line for line in lines[12:])


async def test_a_line_of_the_groups_shows_the_stack_of_its_ranks_one_after_the_other(
    tmp_path: Path, run: RunDir
) -> None:
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        await show(pilot, look_at({0: IN_GATHER, 1: IN_GATHER, 2: IN_REWARD, 3: IN_GATHER}))
        stack = app.query_one(StackView)
        assert str(stack.border_title) == "rank 2 on host-2"
        await pilot.press("down")
        await until(pilot, lambda: str(stack.border_title) == "rank 0 on host-0")
        await pilot.press("enter")
        await until(pilot, lambda: str(stack.border_title) == "rank 1 on host-1")


async def test_a_stall_is_examined_once_by_itself(tmp_path: Path, run: RunDir) -> None:
    state = watched(RunPhase.STALLED)
    with agent(run, dict.fromkeys(range(4), IN_GATHER)):
        async with diagnosing(tmp_path, run, state) as (app, pilot):
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.look is not None)
            first = pane._examination
            app.show_newest(pane)
            assert pane._examination is first


async def test_the_pane_opens_on_the_verdict_that_the_agent_kept(tmp_path: Path, run: RunDir) -> None:
    started = run.read_manifest().started
    folder = run.stacks / "watch-20261129-140211-host-0"
    for name, t in (("first", started + 100), ("second", started + 105)):
        (folder / name).mkdir(parents=True)
        for rank, one in dump({0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}, t).items():
            one.beat = Beat(started + 45, 7, "forward")
            write_atomic(folder / name / f"rank-{rank}.json", encode_rank(one))
    known = Incident(
        t=started + 100, host="host-0", quiet_s=60.0, timeout_s=600.0, kind="rank-outside-collective"
    )
    write_atomic(folder / "incident.json", msgspec.json.encode(known))
    alert = Alert(HANG_CODE, "error", "rank 1 is outside of any collective", (), started + 105)
    state = replace(watched(RunPhase.STALLED), alerts=(alert,))
    async with diagnosing(tmp_path, run, state) as (app, pilot):
        pane = app.query_one(DiagnosePane)
        await until(pilot, lambda: pane.look is not None)
        assert pane.look is not None
        assert pane.look.by_itself
        assert pane.look.ends == started + 45 + 600
        await until(pilot, lambda: "rank 1 is outside of any collective" in screen_text(app))
        assert list(run.control.iterdir()) == []  # nobody was asked for another dump
        assert "taken by itself" in screen_text(app)


async def test_the_time_left_to_the_timeout_runs_down_while_the_run_stands(
    tmp_path: Path, run: RunDir
) -> None:
    found = replace(
        look_at({0: IN_GATHER, 1: IN_REWARD}), ends=time.time() + 3630, ends_source="--ddp_timeout"
    )
    async with diagnosing(tmp_path, run, watched(RunPhase.STALLED, 2)) as (app, pilot):
        pane = await show(pilot, found)
        assert "collective times out in 1 h 00 m" in screen_text(app)
        await show(pilot, replace(found, ends=time.time() - 5))
        pane._show_line()
        await pilot.pause()
        assert "its collective's time is over" in screen_text(app)


async def test_native_frames_are_asked_for_on_a_key(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.monitor.diagnosis.live.CONFIRM_INTERVAL_S", 0.5)
    with agent(run, {0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}) as served:
        async with diagnosing(tmp_path, run, watched()) as (app, pilot):
            await pilot.press("n")
            pane = app.query_one(DiagnosePane)
            await until(pilot, lambda: pane.look is not None and len(pane.look.samples) == 3, 30)
            asked = [request.native for request in served]
            assert asked[-1]
            assert not any(asked[:-1]), "ordinary looks tell whether the ranks move"


async def test_a_look_that_failed_leaves_the_verdict_there_was(tmp_path: Path, run: RunDir) -> None:
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        pane = await show(pilot, look_at({0: IN_GATHER, 1: IN_REWARD}))
        pane.post_message(Examined(None, "no rank gave its native stack in 20 s"))
        await until(pilot, lambda: "no rank gave its native stack" in screen_text(app))
        assert "rank 1 is outside of any collective" in screen_text(app)


async def test_two_dumps_are_compared_by_what_moved_and_what_did_not(tmp_path: Path, run: RunDir) -> None:
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        await show(pilot, look_at(dict.fromkeys(range(4), IN_GATHER)))
        later = replace(look_at({0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}))
        await show(pilot, later)
        await pilot.press("c")
        await pilot.pause()
        table = app.query_one(MovedTable)
        assert [(change.ranks, change.moved) for change in table.items] == [((1,), True), ((0, 2, 3), False)]
        text = screen_text(app)
        assert "3 of 4 stood still" in text
        assert "its stack changed" in text
        await pilot.press("c")
        await pilot.pause()
        assert app.query_one(GroupTable).display


def test_a_rank_that_burns_a_core_inside_a_collective_stands_still() -> None:
    before, after = dump({0: IN_GATHER, 1: IN_REWARD}), dump({0: IN_GATHER, 1: IN_REWARD}, t=1005.0)
    for rank in (0, 1):
        before[rank].proc.threads, after[rank].proc.threads = 1, 1
        after[rank].proc.cpu_s = 4.9
    changes = {change.ranks: (change.moved, change.words) for change in compare(before, after)}
    assert changes[(0,)] == (False, "stood still, spinning")
    assert changes[(1,)] == (True, "it computes")


def test_a_rank_that_only_one_dump_shows_comes_first() -> None:
    changes = compare(dump({0: IN_GATHER, 1: IN_GATHER}), dump({0: IN_GATHER}))
    assert [(change.ranks, change.moved) for change in changes] == [((1,), None), ((0,), False)]


def test_the_tree_branches_where_ranks_part_and_the_fewest_come_first() -> None:
    lines = fold_tree(dump({0: IN_GATHER, 1: IN_GATHER, 2: IN_REWARD}).values())
    assert [(line.ranks, [frame.short for frame in line.frames]) for line in lines] == [
        ((0, 1, 2), ["main", "training_step"]),
        ((2,), ["score_completions", "recv"]),
        ((0, 1), ["all_gather"]),
    ]
    assert [line.leaf for line in lines] == [False, True, True]
    assert str(lines[1].own) == "score_completions (/home/me/rewards.py:88)"


def test_the_hook_that_listens_is_no_part_of_the_users_stack() -> None:
    hook = Path(inspect.getfile(monitor)).parent / "inject" / "roots.py"
    heard = Frame("Roots.listen.<locals>.heard", str(hook), 40)
    elsewhere = Frame("heard", "/opt/env/site-packages/ftdash/monitor/inject/roots.py", 40)
    theirs = Frame("heard", "/home/me/monitor/inject/roots.py", 40)
    shown = python_frames(stack_of(0, [IN_GATHER[0], heard, elsewhere, theirs, *IN_GATHER[1:]]))
    assert shown == (IN_GATHER[0], theirs, *IN_GATHER[1:])


def test_a_recursion_without_end_is_still_a_tree() -> None:
    deep = [Frame("again", "/home/me/train.py", 3)] * 3000
    lines = fold_tree(dump({0: deep, 1: deep[:2000], 2: []}).values())
    assert [line.ranks for line in lines] == [(2,), (0, 1), (0,)]


async def test_a_thousand_ranks_are_a_few_lines_in_groups_and_tree(tmp_path: Path, run: RunDir) -> None:
    stacks = {rank: IN_REWARD if rank == 700 else IN_GATHER for rank in range(1024)}
    state = replace(watched(), manifest=replace_world(1024))
    async with diagnosing(tmp_path, run, state, (80, 24)) as (app, pilot):
        await show(pilot, look_at(stacks))
        assert [row.group.ranks[:1] for row in app.query_one(GroupTable).items] == [(700,), (0,)]
        assert "0-699, 701-1023" in screen_text(app)
        await pilot.press("v")
        await pilot.pause()
        assert len(app.query_one(StackTree).items) == 3
        assert "✗ 700" in screen_text(app)


def replace_world(ranks: int) -> Manifest:
    return Manifest(run="r1", name="r1", world_size=ranks, state="running")


def test_groups_fold_by_phase_and_collective_first_and_by_stack_second() -> None:
    def group(rank: int, where: str, call: str = "all_gather") -> Group:
        return Group((rank,), "train", call, (f"{call} (c10d.py:1)", where))

    groups = [
        group(0, "a (t.py:1)"),
        group(1, "a (t.py:1)"),
        group(2, "b (t.py:2)"),
        group(3, "a (t.py:1)", ""),
    ]
    stacks = {one.ranks[0]: one.frames for one in groups}
    rows = fold(groups, stacks, {2})
    assert [(row.group.ranks, row.below, row.stacks, row.guilty) for row in rows] == [
        ((0, 1, 2), False, 2, True),
        ((2,), True, 1, True),
        ((0, 1), True, 1, False),
        ((3,), False, 1, False),
    ]
    closed = fold(groups, stacks, {2}, toggled={("train", "all_gather")})
    assert [row.group.ranks for row in closed] == [(0, 1, 2), (3,)]


def test_many_different_stacks_stay_folded_until_they_are_opened() -> None:
    groups = [Group((rank,), "forward", "", (f"f (t.py:{rank})",)) for rank in range(40)]
    stacks = {one.ranks[0]: one.frames for one in groups}
    assert [row.stacks for row in fold(groups, stacks, ())] == [40]
    assert len(fold(groups, stacks, (), toggled={("forward", "")})) == 41


def refused(rank: int, kind: DumpFailure, text: str, remedy: str) -> RankEvidence:
    one = stack_of(rank, [])
    assert one.process is not None
    one.process.threads, one.process.source = [], ""
    one.process.failure, one.process.failure_text, one.process.remedy = kind, text, remedy
    one.beat = Beat(1000.0, 12, "forward")
    return one


async def test_each_cause_of_an_unseen_rank_stands_once_with_its_remedy(tmp_path: Path, run: RunDir) -> None:
    yama = (DumpFailure.YAMA, "Yama forbids it: ptrace_scope is 1", "sudo sysctl kernel.yama.ptrace_scope=0")
    user = (DumpFailure.OTHER_USER, "the process belongs to uid 1001", "sudo -u '#1001' ftdash diagnose")
    gone = (DumpFailure.GONE, "no process 4003", "look at its log")
    ranks = [refused(0, *yama), refused(1, *yama), refused(2, *user), refused(3, *gone)]
    hooked = stack_of(4, IN_GATHER)
    assert hooked.process is not None
    hooked.process.source = "faulthandler"
    ranks.append(hooked)
    assert [(one.ranks, one.kind) for one in refusals(ranks)] == [
        ((0, 1), DumpFailure.YAMA),
        ((2,), DumpFailure.OTHER_USER),
    ]
    found = look([Sample(t=1000.0, ranks=tuple(ranks), expected=frozenset(range(4)), world_size=4)])
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        await show(pilot, found)
        await pilot.press("e")
        await pilot.pause()
        text = screen_text(app)
        for said in (
            "rank 0-1: Yama forbids it",
            yama[2],
            "rank 2: the process belongs to uid 1001",
            user[2],
        ):
            assert said in text
        assert "last heartbeat at step 12 in forward" in text
        assert "py-spy could not look at rank 4: stacks by their own hook" in text


async def test_the_report_is_markdown_in_the_clipboard_and_in_a_file(tmp_path: Path, run: RunDir) -> None:
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        await show(pilot, look_at({0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}))
        await pilot.press("r")
        await pilot.pause()
        assert "| 1 | host-1 | 4001 |" in app.clipboard
        path = tmp_path / "report.md"
        app.query_one(Input).value = str(path)
        await pilot.press("enter")
        await until(pilot, path.exists)
        assert path.read_text() == app.clipboard
        assert "`score_completions (/home/me/rewards.py:88)`" in app.clipboard


async def test_a_dead_run_is_diagnosed_by_itself_from_what_it_left(tmp_path: Path) -> None:
    dead = Manifest(run="r2", name="r2", world_size=2, state="failed", reason="rank 1 exited with 1")
    run = RunDir.create(dead, tmp_path / "runs")
    (run.logs / "launcher.log").write_text(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/me/train.py", line 12, in main\n'
        "[rank1]:     loss = score(batch)\n"
        "[rank1]: KeyError: 'reward'\n"
    )
    state = replace(screens.run_state(2), run="r2", state=RunPhase.FAILED)
    async with diagnosing(tmp_path, run, state) as (app, pilot):
        pane = app.query_one(DiagnosePane)
        await until(pilot, lambda: pane.look is not None)
        assert pane.look is not None
        assert pane.look.confirmed
        assert [culprit.rank for culprit in pane.look.diagnosis.verdict.culprits] == [1]
        assert "KeyError" in screen_text(app)


async def test_foreign_text_is_never_markup(tmp_path: Path, run: RunDir) -> None:
    frames = [Frame(text, f"/home/{text}/x.py", 3) for text in HOSTILE]
    ranks = tuple(stack_of(rank, frames) for rank in range(2))
    for one in ranks:
        one.host = HOSTILE[0]
    culprit = Culprit(0, HOSTILE[1], 4000, f"{HOSTILE[3]} (x.py:3)", HOSTILE[2])
    verdict = Verdict("lock", (culprit,), 0.7, *[HOSTILE[4]], evidence=HOSTILE, against=HOSTILE, next=HOSTILE)
    diagnosis = Diagnosis(verdict, (Group((0, 1), HOSTILE[0], HOSTILE[1], HOSTILE),), HOSTILE)
    found = Look(diagnosis, (Sample(t=1.0, ranks=ranks),) * 2, code={0: HOSTILE[0]})
    async with diagnosing(tmp_path, run, watched(), (120, 50)) as (app, pilot):
        await show(pilot, found)
        for key in ("", "v", "c", "e"):
            await pilot.press(*key)
            await pilot.pause()
            text = screen_text(app)
            assert "[rank0]" in text, key
            assert "[/usr/bin/x]" in text, key
            assert "\x1b" not in text, key


async def test_the_whole_evidence_is_scrolled_and_the_stacks_come_back(tmp_path: Path, run: RunDir) -> None:
    verdict = Verdict("lock", (), 0.9, "rank 0 waits", evidence=tuple(f"line {n} of many" for n in range(60)))
    found = Look(Diagnosis(verdict), (Sample(t=1.0, ranks=(stack_of(0, IN_GATHER),)),))
    async with diagnosing(tmp_path, run, watched(), (80, 24)) as (app, pilot):
        await show(pilot, found)
        assert "more lines" in screen_text(app)
        assert "line 40 of many" not in screen_text(app)
        await pilot.press("e")
        await pilot.pause()
        await pilot.press(*["pagedown"] * 6)
        await until(pilot, lambda: "line 59 of many" in screen_text(app))
        await pilot.press("e")
        await until(pilot, lambda: app.query_one(GroupTable).has_focus)
        assert app.query_one(GroupTable).display
        await pilot.press("v")
        await until(pilot, lambda: app.query_one(StackTree).has_focus)


def test_no_command_looks_at_a_process_of_a_run_that_has_ended() -> None:
    commands = ("ssh gpu-b py-spy dump --native --pid 4001", "read the log of rank 1")
    verdict = Verdict("lock", (Culprit(1, "gpu-b", 4001, "f (t.py:1)"),), 0.9, "rank 1 waits", next=commands)
    assert [fact.text for fact in facts_of(verdict, {}) if fact.style == theme.ACCENT_BOLD] == list(commands)
    ended = facts_of(verdict, {}, alive=False)
    assert [fact.text for fact in ended if fact.style == theme.ACCENT_BOLD] == [commands[1]]


async def test_another_run_brings_nothing_of_the_last_one(tmp_path: Path, run: RunDir) -> None:
    async with diagnosing(tmp_path, run, watched()) as (app, pilot):
        pane = await show(pilot, look_at({0: IN_GATHER, 1: IN_REWARD, 2: IN_GATHER, 3: IN_GATHER}))
        assert "score_completions" in screen_text(app)
        pane.show_run(replace(watched(), run="r9"), "")
        await pilot.pause()
        text = screen_text(app)
        assert pane.target() is None
        for gone in ("score_completions", "rank 1", "2 groups", "evidence 4 of 4"):
            assert gone not in text
