"""Telemetry that no sane run writes, and runs that begin again: read on, memory bounded, nothing unsaid."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftdash.monitor.reader import RunReader
from ftdash.monitor.records import Event, Meta, Step
from ftdash.monitor.rundir import RunDir
from tests.support.cluster import Cluster
from tests.support.live_runs import make_run, write


def stepped(run: RunDir, ranks: int, steps: range, **odd: float | str) -> None:
    """Records of an even run; rank 2 has what is `odd`."""
    for rank in range(ranks):
        parts = {"step_s": 1.0, "data_s": 0.1, "forward_s": 0.3, "backward_s": 0.5, "optimizer_s": 0.1}
        fields = {"loss": 2.0, **parts, **(odd if rank == 2 else {})}
        write(run.rank_file(rank), *(Step(t=1.0 + n, step=n, **fields) for n in steps))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-5.0, -1e308])
@pytest.mark.parametrize("part", ["forward_s", "step_s"])
@pytest.mark.parametrize("ranks", [4, 70])
def test_times_that_cannot_be_stop_no_reader(tmp_path: Path, part: str, value: float, ranks: int) -> None:
    run = make_run(tmp_path, state="running", world_size=ranks)
    stepped(run, ranks, range(1, 3))
    reader = RunReader(run)
    reader.poll(5.0)
    stepped(run, ranks, range(3, 20), **{part: value})
    state = reader.poll(20.0)
    assert (state.step, len(state.ranks)) == (19, ranks)
    reader.close()


def test_a_run_that_goes_on_from_a_checkpoint_is_judged_from_its_first_step_again(tmp_path: Path) -> None:
    start = time.time() - 300
    cluster = Cluster(8, per_node=4, slow_from=1000, start_t=start)
    run = cluster.create(tmp_path, "again", steps=100)
    reader = RunReader(run)
    assert reader.poll(start + 101).alerts == ()
    cluster.slow_from = 50
    cluster.start_t = start + 52  # step 50 again, a second after step 100 and its restart
    for rank in range(8):
        who = {"rank": rank, "local_rank": rank % 4, "world_size": 8, "host": cluster.host(rank)}
        write(run.rank_file(rank), Meta(t=start + 101, pid=5000 + rank, device="cuda:0", **who))  # type: ignore[arg-type]
    for step in range(50, 75):
        cluster.append(run, step)
        if step == 70:
            broken = Step(t=start + 52 + step, step=step + 1, loss="nan", step_s=1.0)
            write(run.rank_file(5), broken)
        state = reader.poll(cluster.start_t + step)
    codes = {alert.code: alert for alert in state.alerts}
    assert codes["loss-nan"].ranks == (5,)
    assert codes["straggler"].ranks == (3,)
    assert (state.step, state.ranks[3].step) == (74, 74)
    reader.close()


def test_one_impossible_step_does_not_hide_those_after_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running", world_size=4)
    stepped(run, 4, range(1, 10))
    reader = RunReader(run)
    reader.poll(10.0)
    write(run.rank_file(2), Step(t=10.0, step=2**62, loss=2.0, step_s=1.0))
    reader.poll(11.0)
    stepped(run, 4, range(10, 40), loss="nan")
    state = reader.poll(41.0)
    assert [alert.ranks for alert in state.alerts if alert.code == "loss-nan"] == [(2,)]
    assert state.step == 39
    reader.close()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("node-a.jsonl", b'{"kind":"proc","t":1,"rank":%d,"pid":1}\n'),
        ("node-a.jsonl", b'{"kind":"exit","t":1,"rank":%d,"pid":1,"code":0}\n'),
        ("node-a.jsonl", b'{"kind":"gpu","t":1,"index":%d}\n'),
        ("rank-0.jsonl", b'{"kind":"experts","t":1,"step":1,"layer":%d,"counts":[1]}\n'),
    ],
)
def test_numbers_beyond_any_run_are_skipped_and_told(tmp_path: Path, name: str, line: bytes) -> None:
    run = make_run(tmp_path, state="running", world_size=1)
    stepped(run, 1, range(1, 5))
    path = run.telemetry / name
    with path.open("ab") as handle:
        handle.write(b"".join(line % number for number in (0, -1, 1 << 18, 1 << 62)))
    state = RunReader(run).read_whole()
    assert (len(state.ranks), len(state.gpus) <= 1, len(state.experts) <= 1) == (1, True, True)
    assert f"{name}: 3 broken lines skipped" in state.notices


def test_of_the_text_of_an_event_a_page_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running", world_size=1)
    write(run.rank_file(0), Event(t=1.0, severity="note", code="x", text="a" * 1_000_000))
    reader = RunReader(run)
    reader.read_whole()
    assert [len(event.text) for event in reader.summary.events] == [4097]
