"""What counts as movement between two looks, and what a short look may conclude."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ftdash.monitor.diagnosis import diagnose, source
from ftdash.monitor.diagnosis.kinds import Kind
from ftdash.monitor.diagnosis.model import Frame, ProcessEvidence, ProcState, RankEvidence, Sample, Thread
from ftdash.monitor.diagnosis.motion import measure

MODULE = Frame("<module>", "/home/u/train.py", 90)
MAIN = Frame("main", "/home/u/train.py", 80)
C10D = "torch/distributed/distributed_c10d.py"
ALL_REDUCE = [Frame("all_reduce", C10D, 3000), Frame("train_one_epoch", "/home/u/train.py", 30), MAIN, MODULE]
BACKWARD = [
    Frame("_engine_run_backward", "torch/autograd/graph.py", 900),
    Frame("backward", "torch/_tensor.py", 600),
    Frame("train_one_epoch", "/home/u/train.py", 29),
    MAIN,
    MODULE,
]


def look(
    rank: int, t: float, frames: list[Frame], *, cpu_s: float = 1.0, kind: str = "py-spy"
) -> RankEvidence:
    """One look at a live rank that used `cpu_s` of processor time up to `t`."""
    proc = ProcState(state="S", cpu_s=cpu_s, main_wanted_s=cpu_s, threads=1)
    thread = Thread(name="MainThread", frames=frames)
    process = ProcessEvidence(pid=100 + rank, rank=rank, t=t, proc=proc, threads=[thread], source=kind)
    return RankEvidence(rank=rank, t=t, process=process)


def two_looks(interval_s: float, busy: float, odd: list[Frame]) -> list[Sample]:
    """Rank 0 in `odd` with `busy` of a core, ranks 1 and 2 in an all_reduce of the same loop."""
    samples = []
    for t in (0.0, interval_s):
        ranks = [look(0, t, odd, cpu_s=1.0 + busy * t)] + [look(n, t, ALL_REDUCE) for n in (1, 2)]
        samples.append(Sample(t=t, ranks=tuple(ranks), expected=frozenset(range(3)), world_size=3))
    return samples


def test_native_frames_in_the_second_dump_are_no_movement() -> None:
    python = [Frame("load_cached", "/home/u/train.py", 22), MAIN, MODULE]
    native = [Frame("flock", "libc.so.6", 0), Frame("fcntl_flock", "Modules/fcntlmodule.c", 340), *python]
    motion = measure(look(0, 0.0, python), look(0, 5.0, native, kind="py-spy native"))
    assert motion.known
    assert not motion.stack_changed
    elsewhere = [Frame("load_cached", "/home/u/train.py", 23), MAIN, MODULE]
    assert measure(look(0, 0.0, python), look(0, 5.0, elsewhere, kind="py-spy native")).stack_changed


BACKS_OFF = """while True:
    try:
        return ask()
    except OSError:
        tries += 1
        sleep(min(60, 2**tries))"""


@pytest.mark.parametrize(
    ("body", "line", "polls"),
    [
        ("while not ready():\n    time.sleep(1)", 3, True),
        ("while True:\n    if ready():\n        break\n    print('waiting')\n    time.sleep(1)", 6, True),
        ("while True:\n    write(chunk)\n    time.sleep(1)", 4, False),
        ("for batch in batches:\n    time.sleep(1)", 3, False),
        ("while work:\n    for batch in work:\n        time.sleep(1)", 4, False),
        ("while work:\n    work = work[1:]\n    time.sleep(1)", 4, False),
        ("while work:\n    work.pop()\n    time.sleep(1)", 4, False),
        (
            "while True:\n    state = ask()\n    if state == 'done':\n        break\n    time.sleep(1)",
            6,
            True,
        ),
        (
            "while True:\n    part = ask()\n    if not part:\n        break\n    keep(part)\n    sleep(1)",
            7,
            False,
        ),
        ("while True:\n    try:\n        return ask()\n    except OSError:\n        time.sleep(1)", 6, True),
        (
            "for go in range(9):\n    try:\n        return ask()\n    except OSError:\n        time.sleep(1)",
            6,
            True,
        ),
        ("while not event.is_set():\n    event.wait(1)", 3, True),
        ("while part := ask():\n    total += max(part)", 2, False),
        (BACKS_OFF, 7, True),
        ("for shard in shards:\n    write(shard)\n    time.sleep(1)", 4, False),
    ],
)
def test_a_loop_that_only_sleeps_is_a_poll(body: str, line: int, polls: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def wait():\n" + textwrap.indent(body, "    ") + "\n")
    assert source.polls(Frame("wait", str(script), line)) is polls


@pytest.mark.parametrize(
    ("body", "line", "gets_on"),
    [
        ("for number in numbers:\n    count += 1", 2, True),
        ("for number in numbers:\n    count += 1", 3, True),
        ("while not flag:\n    count += 1", 3, False),
        ("while place < end:\n    place += 1", 3, True),
        ("while True:\n    if place > end:\n        break\n    place += 1", 5, True),
        ("while clock() < end:\n    step()\n    sleep(1)", 4, True),
        ("while clock() < end:\n    sleep(1)", 3, False),
        ("sleep(1)", 2, None),
    ],
)
def test_a_loop_that_goes_through_something_gets_on(
    body: str, line: int, gets_on: bool | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def work():\n" + textwrap.indent(body, "    ") + "\n")
    assert source.gets_on(Frame("work", str(script), line)) is gets_on


def test_a_rank_at_work_in_backward_is_slow_where_the_waits_of_the_others_rest() -> None:
    verdict = diagnose(two_looks(0.5, 0.9, BACKWARD)).verdict
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW, ())


def test_a_short_look_at_an_idle_backward_is_not_sure() -> None:
    short = diagnose(two_looks(0.5, 0.0, BACKWARD)).verdict
    long = diagnose(two_looks(5.0, 0.0, BACKWARD)).verdict
    assert short.confidence <= 0.4 < long.confidence
    assert any("look again" in text for text in short.against)


def test_a_short_look_is_not_sure_of_the_one_that_is_ahead_of_two_in_backward() -> None:
    samples = [
        Sample(
            t=t,
            ranks=(look(0, t, ALL_REDUCE), look(1, t, BACKWARD), look(2, t, BACKWARD)),
            expected=frozenset(range(3)),
        )
        for t in (0.0, 0.5)
    ]
    assert diagnose(samples).verdict.confidence <= 0.4
    assert diagnose(samples[:1]).verdict.confidence <= 0.4


def test_ranks_at_other_steps_of_one_collective_call_blame_nobody() -> None:
    place = [Frame("share_config", "/home/u/train.py", 12), MAIN, MODULE]
    calls = {
        rank: [Frame("broadcast", C10D, 3100), Frame("broadcast_object_list", C10D, line), *place]
        for rank, line in ((0, 3870), (1, 3870), (2, 3880))
    }
    samples = [
        Sample(t=t, ranks=tuple(look(n, t, calls[n]) for n in calls), expected=frozenset(calls), world_size=3)
        for t in (0.0, 5.0)
    ]
    verdict = diagnose(samples).verdict
    assert (verdict.kind, verdict.culprits) == (Kind.NETWORK, ())
    assert "arguments" in verdict.reason


def test_the_thread_that_keeps_a_rank_from_ending_is_shown() -> None:
    leaving = [Frame("_shutdown", "threading.py", 1590)]
    samples = []
    for t in (0.0, 5.0):
        rank = look(0, t, leaving)
        assert rank.process is not None
        rank.process.threads.append(
            Thread(
                name="uploader",
                frames=[
                    Frame("wait", "threading.py", 327),
                    Frame("get", "queue.py", 171),
                    Frame("Uploader.run", "/home/u/train.py", 20),
                    Frame("_bootstrap_inner", "threading.py", 1045),
                ],
            )
        )
        samples.append(Sample(t=t, ranks=(rank, look(1, t, ALL_REDUCE)), expected=frozenset({0, 1})))
    verdict = diagnose(samples).verdict
    assert verdict.kind is Kind.TEARDOWN
    assert "thread uploader: Uploader.run (/home/u/train.py:20)" in verdict.culprits[0].frame


OWN_BARRIER = """
def sync(store, folder, work):
    while len(list(folder.glob("done-*"))) < 4:
        time.sleep(0.1)
    while store.add("here", 0) < 4:
        time.sleep(0.1)
    while not work.is_completed():
        time.sleep(0.1)


def stuck():
    queue.get()
"""


def at_own_barrier(script: Path, line: int, busy: float, other: str = "stuck") -> list[Sample]:
    """Ranks 0 to 2 sleep in the loop at `line`, rank 3 elsewhere; two looks."""
    script.write_text(OWN_BARRIER)
    samples = []
    for t in (1000.0, 1005.0):
        ranks = [look(n, t, [Frame("sync", str(script), line), MAIN, MODULE]) for n in range(3)]
        ranks.append(
            look(3, t, [Frame(other, str(script), 12), MAIN, MODULE], cpu_s=1.0 + busy * (t - 1000.0))
        )
        for evidence in ranks[:3]:
            assert evidence.process is not None
            evidence.process.proc.syscall = 230
            evidence.process.proc.main_sleeps = int(10 * (t - 1000.0))
        samples.append(Sample(t=t, ranks=tuple(ranks), expected=frozenset(range(4)), world_size=4))
    return samples


@pytest.mark.parametrize("line", [4, 6, 8], ids=["files", "store", "collective"])
def test_a_rank_that_does_not_come_to_a_barrier_of_the_users_own_is_named(line: int, tmp_path: Path) -> None:
    verdict = diagnose(at_own_barrier(tmp_path / "train.py", line, 0.0)).verdict
    assert [culprit.rank for culprit in verdict.culprits] == [3], verdict


@pytest.mark.parametrize("line", [4, 6, 8], ids=["files", "store", "collective"])
def test_a_rank_at_work_is_waited_for_at_a_barrier_of_the_users_own(line: int, tmp_path: Path) -> None:
    verdict = diagnose(at_own_barrier(tmp_path / "train.py", line, 0.9)).verdict
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW, ())


@pytest.mark.parametrize(("busy", "culprits"), [(0.6, []), (0.0, [0])])
def test_a_rank_that_waits_for_compile_workers_is_judged_by_them(busy: float, culprits: list[int]) -> None:
    stack = [
        Frame("result", "concurrent/futures/_base.py", 451),
        Frame("AsyncCompile.wait", "torch/_inductor/async_compile.py", 500),
        Frame("step", "/home/u/train.py", 12),
        MODULE,
    ]
    samples = []
    for t in (1000.0, 1005.0):
        rank = look(0, t, stack)
        assert rank.process is not None
        worker = ProcState(state="R", cpu_s=1.0 + busy * (t - 1000.0), threads=1)
        rank.process.children.append(ProcessEvidence(pid=900, t=t, proc=worker))
        samples.append(
            Sample(
                t=t,
                ranks=(rank, look(1, t, ALL_REDUCE), look(2, t, ALL_REDUCE)),
                expected=frozenset(range(3)),
            )
        )
    verdict = diagnose(samples).verdict
    assert [culprit.rank for culprit in verdict.culprits] == culprits, verdict


@pytest.mark.parametrize(
    ("body", "culprits"),
    [("while True:\n    pass", [0]), ("for number in range(10**9):\n    total += number", [])],
    ids=["in place", "through something"],
)
def test_a_loader_worker_that_turns_in_place_is_no_work(
    body: str, culprits: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "data.py"
    script.write_text("def __getitem__(self, index):\n" + textwrap.indent(body, "    ") + "\n")
    loader = "torch/utils/data/dataloader.py"
    stack = [Frame("wait", "threading.py", 327), Frame("_try_get_data", loader, 1200), MAIN, MODULE]
    samples = []
    for t in (1000.0, 1005.0):
        rank = look(0, t, stack)
        assert rank.process is not None
        work = [
            Frame("Data.__getitem__", str(script), 3),
            Frame("_worker_loop", "torch/utils/data/_utils/worker.py", 1),
        ]
        proc = ProcState(state="R", cpu_s=1.0 + 0.9 * (t - 1000.0), threads=1)
        threads = [Thread(name="MainThread", frames=work, owns_gil=True)]
        rank.process.children.append(ProcessEvidence(pid=900, t=t, proc=proc, threads=threads))
        samples.append(
            Sample(
                t=t,
                ranks=(rank, look(1, t, ALL_REDUCE), look(2, t, ALL_REDUCE)),
                expected=frozenset(range(3)),
            )
        )
    verdict = diagnose(samples).verdict
    assert [culprit.rank for culprit in verdict.culprits] == culprits, verdict
