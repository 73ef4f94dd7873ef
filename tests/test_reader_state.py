"""A run's state from its directory: what is read, what is derived, and what is survived."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from ftdash.monitor.beat import BeatWriter
from ftdash.monitor.reader import LARGE_FILE_BYTES, RunReader
from ftdash.monitor.records import (
    Event,
    Exit,
    Experts,
    GpuSample,
    Meta,
    Node,
    RankSample,
    Record,
    Step,
    number,
)
from ftdash.monitor.rundir import RankExit, RunDir, RunError
from ftdash.monitor.state import RankPhase, RunPhase
from ftdash.monitor.timeline import Series
from tests.support.live_runs import make_run, read, write

T0 = 1_795_974_000.0


def meta(rank: int, world: int = 2, **more: object) -> Meta:
    fields = {"local_rank": rank, "host": "far", "pid": 100 + rank, "device": "cpu", "max_steps": 50}
    return Meta(t=T0, rank=rank, world_size=world, **{**fields, **more})  # type: ignore[arg-type]


def step(number_: int, loss: float | None = 2.0, **more: object) -> Step:
    fields = {"tokens": 100, "step_s": 0.5, **more}
    return Step(t=T0 + number_ * 0.5, step=number_, loss=number(loss), **fields)  # type: ignore[arg-type]


def sample(rank: int, t: float, **more: object) -> RankSample:
    return RankSample(t=t, rank=rank, pid=100 + rank, **{"rss": 1 << 20, "state": "S", **more})  # type: ignore[arg-type]


def agent_on_far(run: RunDir, t: float, *samples: RankSample) -> None:
    write(run.node_file("far"), Node(t=t, host="far", agent_pid=7, memory_total=1 << 34), *samples)


def running(tmp_path: Path, **more: object) -> RunDir:
    return make_run(tmp_path, state="running", agent_pids={"far": 7}, world_size=2, **more)


def test_ranks_are_summed_and_averaged_into_the_run(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank, loss in ((0, 2.0), (1, 4.0)):
        write(
            run.rank_file(rank),
            meta(rank, micro_batch=3, grad_accum=2),
            *(step(n, loss) for n in range(1, 11)),
        )
    agent_on_far(
        run, T0 + 5, sample(0, T0 + 5, beat_t=T0 + 5, beat_step=10, beat_phase="forward"), sample(1, T0 + 5)
    )
    state = read(run, now=T0 + 6)
    assert state.state is RunPhase.RUNNING
    assert (state.step, state.max_steps, state.loss) == (10, 50, 3.0)
    assert state.tokens_per_s == pytest.approx(2 * 100 / 0.5)
    assert state.tokens_per_step == 200
    assert state.eta_s == pytest.approx(40 * 0.5)
    assert state.batch == 3 * 2 * 2
    assert [rank.tokens for rank in state.ranks] == [1000, 1000]
    assert state.points[-1].tokens == 2000
    assert state.points[-1].loss == 3.0
    assert state.points[-1].tokens_per_s == pytest.approx(400)
    assert state.measured["step_s"] == 0.5


def test_non_finite_losses_are_values_and_are_shown(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), step(1, float("nan")), step(2, float("inf")))
    state = read(run, now=T0 + 2)
    assert state.ranks[0].loss == math.inf
    assert math.isnan(state.points[0].loss or 0.0)


def test_experts_are_summed_over_ranks_by_layer(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank in (0, 1):
        counts = [[1, 2, 3, 4], [10 * rank, 0, 0, 4]]
        records = [Experts(t=T0, step=10, layer=layer, counts=c) for layer, c in enumerate(counts)]
        write(run.rank_file(rank), meta(rank), Experts(t=T0, step=5, layer=0, counts=[9, 9, 9, 9]), *records)
    experts = read(run).experts
    assert [(layer.layer, layer.counts) for layer in experts] == [(0, (2, 4, 6, 8)), (1, (10, 0, 0, 8))]
    assert experts[0].imbalance == pytest.approx(8 * 4 / 20)


@pytest.mark.parametrize("between", [1, 300])
def test_an_expert_that_got_no_tokens_for_long_is_dead_at_the_first_look(
    tmp_path: Path, between: int
) -> None:
    """However much stands between two records: of a longer file only the end is decoded in full."""
    run = running(tmp_path)
    for rank in (0, 1):
        records: list[Record] = [meta(rank)]
        for number_ in range(10, 80, 10):
            records += [step(number_ + i) for i in range(between)]
            records += [Experts(t=1.0, step=number_, layer=0, counts=[90, 70, 0, 80])]
        write(run.rank_file(rank), *records)
    state = RunReader(run).read_whole()
    dead = next(alert.text for alert in state.alerts if alert.code == "expert-dead")
    assert dead.startswith("no tokens go to 1 expert: L0/E2;")


def test_the_newest_step_is_known_although_the_counts_of_many_layers_follow_it(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank in (0, 1):
        records: list[Record] = [meta(rank)]
        for number_ in range(1, 51):
            records.append(step(number_))
            if number_ % 10 == 0:
                layers = (Experts(t=1.0, step=number_, layer=i, counts=[10_000] * 128) for i in range(94))
                records += layers
        write(run.rank_file(rank), *records)
    state = RunReader(run).read_whole()
    assert (state.step, [rank.loss for rank in state.ranks]) == (50, [2.0, 2.0])


def test_garbage_is_counted_and_costs_no_other_line(tmp_path: Path) -> None:
    run = running(tmp_path)
    good = json.dumps({"kind": "step", "t": T0, "v": 1, "step": 3, "loss": 1.5, "new_field": [1]}).encode()
    bad = [b"\xff\xfe\x00", b"{", b"[" * 5000, b'{"kind":"step","t":"soon","step":1}', b"null", b"\x00" * 200]
    unknown = b'{"kind":"hologram","t":1}'
    run.rank_file(0).write_bytes(b"\n".join([*bad, good, unknown, b""]) + b'{"kind":"step","t":1,"st')
    write(run.rank_file(1), meta(1), step(7))
    state = read(run)
    assert [rank.step for rank in state.ranks] == [3, 7]
    assert state.ranks[0].loss == 1.5
    assert [n for n in state.notices if "rank-0" in n] == ["rank-0.jsonl: 6 broken lines skipped"]


def test_foreign_file_names_are_left_alone(tmp_path: Path) -> None:
    run = running(tmp_path)
    for name in (
        "rank-x.jsonl",
        "rank--1.jsonl",
        "rank-99999999999.jsonl",
        "[red]rank-0.jsonl",
        "rank-0.jsonl.old",
    ):
        (run.telemetry / name).write_bytes(b'{"kind":"step","t":1,"step":1}\n')
    (run.telemetry / "rank-5.jsonl").mkdir()
    state = read(run)
    assert [rank.rank for rank in state.ranks if rank.step] == []
    assert any("rank-5" in notice for notice in state.notices)


def test_one_poll_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), *(step(n) for n in range(1000)))
    reader = RunReader(run)
    reader.poll()
    read_bytes = 0
    real = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal read_bytes
        data = real(fd, size, offset)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    write(run.rank_file(0), step(1000))
    assert reader.poll().step == 1000
    assert 0 < read_bytes < 1000
    reader.close()


def test_a_large_file_is_shown_at_once_and_its_history_comes_later_complete(tmp_path: Path) -> None:
    run = running(tmp_path)
    steps = 30_000
    lines = b"".join(
        b'{"kind":"step","t":%d,"v":1,"step":%d,"loss":%d,"tokens":7,"step_s":0.5}\n' % (T0 + n, n, 1 + n % 2)
        for n in range(1, steps + 1)
    )
    write(run.rank_file(0), meta(0))
    with open(run.rank_file(0), "ab") as handle:
        handle.write(lines)
    assert run.rank_file(0).stat().st_size > LARGE_FILE_BYTES
    reader = RunReader(run, points=100)
    state = reader.poll()
    assert state.step == steps
    while reader.behind:
        state = reader.poll()
    reader.close()
    assert state.ranks[0].tokens == steps * 7
    assert state.points[-1].tokens == steps * 7
    assert len(state.points) <= 300
    assert state.points[0].loss == pytest.approx(1.5, abs=0.1)
    assert [point.step for point in state.points] == sorted(point.step for point in state.points)
    assert not any("broken" in notice for notice in state.notices)


def test_garbage_in_a_long_history_costs_no_other_record(tmp_path: Path) -> None:
    run = running(tmp_path)
    line = b'{"kind":"step","t":%d,"v":1,"step":%d,"loss":1.5,"tokens":7,"step_s":0.5}\n'
    odd = (
        b'{"kind":"experts","t":1,"step":9,"layer":0,"counts":"none"}\n'
        b'{"kind":"experts","t":1,"step":9,"layer":1,"counts":[1,-5]}\n'
        b'{"kind":"step","t":1,"step":"x"}\n\xff\xfe\n[[[[\n'
        b'{"kind":"step","t":1,"step":-3,"loss":"text","tokens":1,"step_s":1}\n'
    )
    steps = 40_000
    with open(run.rank_file(0), "wb") as handle:
        for number_ in range(steps):
            handle.write(line % (T0 + number_, number_))
            if number_ % 1000 == 0:
                handle.write(odd)
    reader = RunReader(run, points=100)
    state = reader.read_whole()
    assert state.step == steps - 1
    assert state.ranks[0].tokens == 7 * steps + steps // 1000
    assert state.experts == ()
    assert [point.step for point in state.points] == sorted({point.step for point in state.points})
    assert any("broken lines skipped" in notice for notice in state.notices)


def test_a_series_keeps_its_sums_however_often_it_merges() -> None:
    series = Series(16)
    for number_ in range(10_000):
        bucket = series.bucket(number_)
        bucket.records += 1
        bucket.tokens += number_
    assert len(series.buckets) <= 32
    assert sum(bucket.tokens for bucket in series.buckets.values()) == sum(range(10_000))


def test_a_truncated_and_a_replaced_file_are_read_again_with_a_notice(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), *(step(n) for n in range(100)))
    reader = RunReader(run)
    assert reader.poll().step == 99
    run.rank_file(0).write_bytes(b"")
    write(run.rank_file(0), meta(0), step(3))
    reader.poll()
    state = reader.poll()
    assert state.ranks[0].step == 3
    assert any("truncated or replaced" in notice for notice in state.notices)
    reader.close()


def test_a_broken_manifest_keeps_what_was_read_before(tmp_path: Path) -> None:
    run = running(tmp_path)
    reader = RunReader(run)
    assert reader.poll().manifest.world_size == 2
    run.manifest_path.write_text("{ half")
    state = reader.poll()
    assert state.manifest.world_size == 2
    assert any("run.json is broken" in notice for notice in state.notices)
    run.manifest_path.write_text('{"run": "r", "state": "flying"}')
    assert any("state 'flying'" in notice for notice in reader.poll().notices)
    reader.close()
    with pytest.raises(RunError, match=r"run\.json is broken"):
        RunReader(run).poll()


def test_no_progress_for_ten_steps_and_the_floor_is_stalled(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank in (0, 1):
        write(run.rank_file(rank), meta(rank), *(step(n, step_s=8.0) for n in range(1, 20)))
    beats = {"beat_t": T0 + 100, "beat_step": 19, "beat_phase": "backward"}
    for now, expected in ((T0 + 150, RunPhase.RUNNING), (T0 + 185, RunPhase.STALLED)):
        agent_on_far(run, now, sample(0, now, **beats), sample(1, now, **beats))
        state = read(run, now=now)
        assert state.state is expected, state.notices
    assert {rank.state for rank in state.ranks} == {RankPhase.STALLED}
    assert state.alerts[0].code == "stalled"


def test_saving_may_take_longer_than_a_step(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), *(step(n) for n in range(1, 20)))
    now = T0 + 300
    agent_on_far(run, now, sample(0, now, beat_t=T0 + 10, beat_step=19, beat_phase="save"))
    state = read(run, now=now)
    assert (state.state, state.ranks[0].state) == (RunPhase.RUNNING, RankPhase.SAVING)


def test_a_rank_that_its_agent_no_longer_lists_is_dead(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank in (0, 1):
        write(run.rank_file(rank), meta(rank), step(1))
    agent_on_far(run, T0, sample(0, T0), sample(1, T0))
    agent_on_far(run, T0 + 8, sample(0, T0 + 8, beat_t=T0 + 8, beat_step=1, beat_phase="data"))
    state = read(run, now=T0 + 8)
    assert [rank.state for rank in state.ranks] == [RankPhase.DATA, RankPhase.DEAD]


def test_a_clock_that_goes_backwards_gives_no_negative_age(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), step(10), step(11))
    agent_on_far(run, T0, sample(0, T0, beat_t=T0 + 500, beat_step=11, beat_phase="forward"))
    state = read(run, now=T0)
    assert state.ranks[0].heartbeat_age_s == 0.0


def test_beats_are_read_from_their_files_when_the_agent_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running", agent_pids={"far": 7})
    write(run.rank_file(0), meta(0), step(1))
    beat = BeatWriter(run.beat_file(0))
    beat.beat(1, "eval")
    state = read(run)
    assert state.ranks[0].state is RankPhase.EVALUATING
    assert (state.ranks[0].heartbeat_age_s or 99) < 60
    beat.close()


def test_exits_seen_by_agents_make_ranks_dead_or_finished(tmp_path: Path) -> None:
    run = running(tmp_path)
    for rank in (0, 1):
        write(run.rank_file(rank), meta(rank), step(1))
    ends = [Exit(t=T0 + 2, rank=0, pid=100, code=0), Exit(t=T0 + 2, rank=1, pid=101, code=-9)]
    write(run.node_file("far"), Node(t=T0 + 2, host="far", agent_pid=7), *ends)
    state = read(run, now=T0 + 3)
    assert [rank.state for rank in state.ranks] == [RankPhase.FINISHED, RankPhase.DEAD]


def test_a_restarted_rank_is_alive_again(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), step(1))
    write(run.node_file("far"), sample(0, T0), Exit(t=T0 + 1, rank=0, pid=100, code=1))
    again = RankSample(t=T0 + 2, rank=0, pid=900, state="R", beat_t=T0 + 2, beat_phase="forward")
    write(run.node_file("far"), again)
    state = read(run, now=T0 + 3)
    assert (state.ranks[0].pid, state.ranks[0].state) == (900, RankPhase.COMPUTE)


def test_a_rank_that_was_seen_as_a_zombie_keeps_the_memory_it_held(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), step(1))
    write(run.node_file("far"), sample(0, T0, rss=5 << 20), sample(0, T0 + 1, rss=0, state="Z"))
    assert read(run, now=T0 + 2).ranks[0].memory_used == 5 << 20


def test_gpus_are_joined_to_ranks_by_uuid(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0, device="cuda:0", device_uuid="GPU-b"))
    gpus = [GpuSample(t=T0, index=i, uuid=u, memory_used=10 + i, memory_total=99) for i, u in enumerate("ab")]
    for gpu in gpus:
        gpu.uuid = f"GPU-{gpu.uuid}"
    write(run.node_file("far"), *gpus)
    rank = read(run).ranks[0]
    assert (rank.memory_used, rank.memory_total) == (11, 99)
    assert rank.gpu is not None
    assert rank.gpu.index == 1


def test_a_finished_run_keeps_its_manifests_word(tmp_path: Path) -> None:
    exits = [RankExit(0, 1, T0), RankExit(1, -15, T0)]
    run = make_run(tmp_path, state="failed", reason="rank 0: exit code 1", exits=exits, agent_pids={"far": 7})
    for rank in (0, 1):
        write(run.rank_file(rank), meta(rank), step(1))
    state = read(run)
    assert state.state is RunPhase.FAILED
    assert {rank.state for rank in state.ranks} == {RankPhase.DEAD}
    assert any(alert.text == "rank 0: exit code 1" for alert in state.alerts)


def test_many_files_are_followed_where_descriptors_are_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftdash.monitor.reader._raise_descriptor_limit", lambda files: 20)
    run = make_run(tmp_path, state="finished", world_size=300)
    for rank in range(300):
        write(run.rank_file(rank), meta(rank, 300), step(5))
    before = len(os.listdir("/proc/self/fd"))
    reader = RunReader(run)
    state = reader.poll()
    assert len(os.listdir("/proc/self/fd")) <= before + 20
    assert (len(state.ranks), state.step) == (300, 5)
    reader.close()


def test_the_text_of_an_event_is_kept_as_it_is(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), Event(t=T0, severity="error", code="x", text="[/usr/bin/x] [rank0]"))
    reader = RunReader(run)
    reader.poll()
    assert [event.text for event in reader.summary.events] == ["[/usr/bin/x] [rank0]"]
    reader.close()


def test_polling_is_incremental_in_time(tmp_path: Path) -> None:
    run = running(tmp_path)
    reader = RunReader(run)
    assert reader.poll().ranks == ()
    write(run.rank_file(3), meta(3), step(2))
    os.utime(run.telemetry, (time.time() + 5, time.time() + 5))
    assert [rank.rank for rank in reader.poll().ranks] == [3]
    reader.close()


def test_a_run_that_no_agent_ever_started_is_failed_and_not_starting_for_ever(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    created = run.read_manifest().created
    assert read(run, now=created + 5).state is RunPhase.STARTING
    assert read(run, now=created + 100).state is RunPhase.FAILED
    waiting = make_run(tmp_path, "queued", backend="slurm")
    assert read(waiting, now=created + 1e6).state is RunPhase.STARTING


def test_waiting_for_other_ranks_is_communication(tmp_path: Path) -> None:
    run = running(tmp_path)
    write(run.rank_file(0), meta(0), step(4))
    agent_on_far(run, T0 + 3, sample(0, T0 + 3, beat_t=T0 + 3, beat_step=4, beat_phase="sync"))
    assert read(run, now=T0 + 4).ranks[0].state is RankPhase.COMMUNICATION


def test_points_on_cpu_have_the_largest_process_as_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="finished", world_size=2)
    for rank in (0, 1):
        steps = [Step(t=100.0 + n, step=n, loss=1.0, tokens=10, step_s=1.0) for n in range(1, 6)]
        write(run.rank_file(rank), *steps)
    for n in range(1, 7):  # step 6 is never reported: it is no point
        samples = [
            RankSample(t=100.0 + n, rank=rank, pid=1, rss=n * 1000 + rank, beat_step=n) for rank in (0, 1)
        ]
        write(run.node_file("h"), *samples)
    assert [point.memory_used for point in read(run).points] == [1001, 2001, 3001, 4001, 5001]
