"""Alerts: each raised by its cause alone, with ranks and figures; nothing on a healthy run."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
from msgspec import structs

from ftdash.monitor.alerts import AlertBook, AlertLimits, find_alerts, growth_per_step
from ftdash.monitor.history import HostLook, RunHistory, look_at_files
from ftdash.monitor.records import RankSample
from ftdash.monitor.rundir import Manifest
from ftdash.monitor.state import Alert, ExpertLayer, GpuState, Point, RankPhase, RunPhase
from tests.support.runs import codes, only, play, run_state, with_rank

GIB = 1 << 30


def test_a_healthy_run_raises_nothing():
    history, state = play(300, ranks=4)
    points = tuple(Point(i, 1e9 + i, 3.0 * math.exp(-i / 150) + 0.01 * (i % 3), 100.0) for i in range(300))
    assert find_alerts(replace(state, points=points), history) == ()


def test_nan_loss_names_the_rank_where_it_began():
    def change(rank, step):
        return {"loss": math.nan} if (rank == 1 and step >= 10) or step >= 12 else {}

    history, state = play(20, change=change)
    alert = only(state, history)
    assert (alert.code, alert.severity, alert.ranks) == ("loss-nan", "error", (1,))
    assert "step 10" in alert.text


def test_infinite_loss_counts_as_not_finite():
    history, state = play(5, change=lambda rank, step: {"loss": math.inf} if step == 3 else {})
    assert only(state, history).ranks == (0, 1)


def test_a_nan_gradient_behind_a_clean_loss_is_told():
    history, state = play(20, change=lambda rank, step: {"grad_norm": math.nan} if step >= 15 else {})
    alert = only(state, history)
    assert alert.code == "grad-nan"
    assert "filter" in alert.text


def test_zero_loss_is_told_after_three_steps_and_not_after_two():
    for steps, expected in ((2, []), (3, ["loss-zero"])):
        history, state = play(10 + steps, change=lambda rank, step: {"loss": 0.0} if step > 10 else {})
        assert codes(state, history) == expected


def test_a_loss_that_repeats_to_the_last_digit_is_told():
    history, state = play(20, change=lambda rank, step: {"loss": 1.25} if step > 10 else {})
    assert codes(state, history) == ["loss-repeated"]


def test_a_gradient_spike_is_told_against_its_median():
    history, state = play(40, change=lambda rank, step: {"grad_norm": 50.0} if step == 39 else {})
    alert = only(state, history)
    assert alert.code == "grad-spike"
    assert "step 39" in alert.text
    quiet, state = play(40, change=lambda rank, step: {"grad_norm": 4.0} if step == 39 else {})
    assert codes(state, quiet) == []


def test_a_loss_that_does_not_fall_is_told_once_there_are_enough_steps():
    history, state = play(10)
    flat = tuple(Point(i, 1e9 + i, 2.0 + 0.02 * (i % 5), None) for i in range(250))
    assert codes(replace(state, points=flat), history) == ["loss-not-falling"]
    assert codes(replace(state, points=flat[:150]), history) == []
    falling = tuple(Point(i, 1e9 + i, 2.0 - 0.002 * i + 0.02 * (i % 5), None) for i in range(250))
    assert codes(replace(state, points=falling), history) == []


def test_memory_that_grows_every_step_is_told_with_the_distance_to_the_end():
    def change(rank, step):
        return {"allocated": 10 * GIB + (step * (50 << 20) if rank == 1 else (step % 3) << 20)}

    history, state = play(60, change=change)
    state = with_rank(
        state, 1, device="cuda:1", memory_used=13 * GIB, memory_total=16 * GIB, allocated=13 * GIB
    )
    alert = only(state, history)
    assert (alert.code, alert.ranks) == ("memory-creep", (1,))
    assert "50.0 MiB a step" in alert.text
    assert "3.0 GiB left" in alert.text
    assert "61 steps" in alert.text


@pytest.mark.parametrize(
    "curve",
    [
        lambda step: 10 * GIB,
        lambda step: 10 * GIB + (GIB if step > 30 else 0),  # one step up, such as a longer batch
        lambda step: int(10 * GIB + 2 * GIB * (1 - math.exp(-step / 4))),  # caches that fill
        lambda step: 10 * GIB + (step % 10) * (200 << 20),  # a saw
        lambda step: 10 * GIB + step * 1024,
    ],
)
def test_memory_that_merely_moves_is_not_creep(curve):
    history, state = play(80, change=lambda rank, step: {"allocated": curve(step)})
    assert codes(state, history) == []


def test_the_rss_of_cpu_ranks_is_watched_too():
    history = RunHistory()
    for step in range(1, 41):
        for rank, rss in ((0, 500 << 20), (1, (500 << 20) + step * (8 << 20))):
            history.add_sample(RankSample(t=step, rank=rank, pid=100, rss=rss, beat_step=step))
    state = run_state(2, step=40)
    alert = next(alert for alert in find_alerts(state, history) if alert.code == "memory-creep")
    assert alert.ranks == (1,)


def test_noise_is_never_mistaken_for_growth():
    source = random.Random(5)
    for _ in range(300):
        sizes = [int(10 * GIB * source.gauss(1, 0.05)) for _ in range(48)]
        history, _ = play(48, ranks=1, change=lambda rank, step, sizes=sizes: {"allocated": sizes[step - 1]})
        assert growth_per_step(history.ranks[0]) == 0.0


def test_a_nearly_full_gpu_and_a_fragmented_allocator_are_told():
    history, state = play(10)
    full = with_rank(state, 0, device="cuda:0", memory_used=78 * GIB, memory_total=80 * GIB)
    assert codes(full, history) == ["memory-near-limit"]
    split = with_rank(state, 0, device="cuda:0", reserved=60 * GIB, peak=40 * GIB)
    assert codes(split, history) == ["memory-fragmented"]
    near = with_rank(state, 0, device="cuda:0", reserved=44 * GIB, peak=40 * GIB)
    assert codes(near, history) == []


def test_shared_memory_is_never_nearly_full():
    history, state = play(10)
    gpu = GpuState(0, unified=True)
    shared = with_rank(state, 0, device="cuda:0", memory_used=78 * GIB, memory_total=80 * GIB, gpu=gpu)
    assert codes(shared, history) == []


def test_a_late_heartbeat_is_judged_by_the_ranks_own_step_time():
    history, state = play(10)
    late = with_rank(state, 1, heartbeat_age_s=90.0, phase="backward")
    alert = only(late, history)
    assert (alert.code, alert.severity, alert.ranks) == ("heartbeat-late", "warning", (1,))
    assert "1 m 30 s" in alert.text
    assert codes(with_rank(state, 1, heartbeat_age_s=90.0, step_s=30.0), history) == []
    assert only(with_rank(state, 1, heartbeat_age_s=400.0), history).severity == "error"


def test_a_dead_rank_is_told_while_the_run_goes_on_and_not_after():
    history, state = play(10)
    dead = with_rank(state, 1, state=RankPhase.DEAD)
    assert codes(dead, history) == ["rank-dead"]
    assert codes(with_rank(state, 1, state=RankPhase.DEAD, phase="end"), history) == []
    assert codes(replace(dead, state=RunPhase.FAILED), history) == []


def test_unequal_numbers_of_tokens_are_told():
    history, state = play(20, change=lambda rank, step: {"tokens": 1500 if rank else 1000})
    alert = only(state, history)
    assert (alert.code, alert.severity, alert.ranks) == ("tokens-uneven", "note", (0, 1))
    history, state = play(40, change=lambda rank, step: {"tokens": 1000 + 200 * rank})
    assert codes(state, history) == []


def test_a_run_that_slows_down_as_a_whole_is_told():
    history = RunHistory()
    for step in range(1, 101):
        state = run_state(2, step=step, tokens_per_s=1000.0 + step % 7 if step <= 80 else 600.0)
        history.observe(state, look=False)
    assert "run-slower" in codes(state, history)


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ({30: 1800.0, 60: 1800.5, 90: 1803.0}, ["near-hang"]),
        ({30: 600.0, 60: 600.0}, ["near-hang"]),
        ({30: 1800.0}, []),  # once: a save, a debugger
        ({30: 900.0, 60: 900.0, 90: 900.0}, []),  # evaluations, of no timeout's length
    ],
)
def test_steps_that_stand_still_for_a_timeout_again_and_again_are_told(waits, told):
    history, state = play(100)
    points, t = [], 1e9
    for step in range(1, 101):
        t += 2.0 + waits.get(step, 0.0)
        points.append(Point(step, t, 3.0 - step / 50, 100.0))
    state = replace(state, points=tuple(points))
    assert codes(state, history) == told
    if 90 in waits and told:
        assert "3 steps stood still for 30 min" in find_alerts(state, history)[0].text


def gpus(**changes) -> tuple[GpuState, ...]:
    fine = GpuState(0, uuid="GPU-0", host="gpu-a", util=95, throttle=("power cap",), pcie_width=16)
    sick = structs.replace(fine, index=1, uuid="GPU-1", pcie_width_max=16, **changes)
    return structs.replace(fine, pcie_width_max=16, nvlinks=18, nvlinks_up=18), sick


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"state": "lost", "error": "GPU is lost"}, "gpu-lost", "error"),
        ({"state": "error", "error": "Unknown Error"}, "gpu-lost", "error"),
        ({"throttle": ("power cap", "thermal (hardware)")}, "gpu-throttled", "warning"),
        ({"ecc_uncorrected": 2}, "gpu-ecc", "error"),
        ({"remap_pending": True}, "gpu-ecc", "warning"),
        ({"pcie_width": 8}, "pcie-degraded", "warning"),
        ({"xids": (31, 79)}, "gpu-xid", "error"),
        ({"pcie_gen": 1, "pcie_gen_max": 5}, "pcie-degraded", "warning"),
        ({"nvlinks": 18, "nvlinks_up": 17}, "nvlink-down", "warning"),
    ],
)
def test_a_sick_gpu_is_told_with_the_ranks_on_it(changes, code, severity):
    history, state = play(10)
    devices = gpus(**changes)
    state = replace(with_rank(state, 1, gpu=devices[1]), gpus=devices)
    alert = only(state, history)
    assert (alert.code, alert.severity, alert.ranks) == (code, severity, (1,))
    assert "GPU 1 on gpu-a" in alert.text


def test_an_idle_pcie_link_in_a_low_generation_is_normal():
    history, state = play(10)
    state = replace(state, gpus=gpus(pcie_gen=1, pcie_gen_max=5, util=0))
    assert codes(state, history) == []


def test_dead_and_hot_experts_and_collapse_are_told_with_advice():
    history, state = play(10)
    for i in range(10):
        even = ExpertLayer(0, (1000 + i, 1000, 1000, 1000, 1000, 1000, 1000, 1000))
        history.observe(replace(state, experts=(even,)), look=False)
    assert codes(state, history) == []
    for i in range(10):
        narrow = ExpertLayer(0, (7000 + i, 500, 500, 0, 0, 0, 0, 0))
        history.observe(replace(state, experts=(narrow,)), look=False)
    found = {alert.code: alert.text for alert in find_alerts(state, history)}
    assert set(found) == {"expert-dead", "expert-hot", "router-collapse"}
    assert "L0/E3" in found["expert-dead"]
    assert "expert 0 of layer 0" in found["expert-hot"]
    assert all("auxiliary loss coefficient" in text for text in found.values())
    lost = with_rank(state, 1, loss=math.nan)
    assert not {"expert-dead", "expert-hot", "router-collapse"} & set(codes(lost, history))


def test_a_hot_expert_tells_its_cost_under_expert_parallelism():
    history, state = play(10)
    hot = ExpertLayer(3, (100, 100, 100, 100, 100, 100, 5000, 100))
    state = replace(state, experts=(hot,), manifest=Manifest(run="r", plan={"ep": 4}))
    for i in range(4):
        layer = ExpertLayer(3, (100 + i, 100, 100, 100, 100, 100, 5000, 100))
        history.observe(replace(state, experts=(layer,)), look=False)
    text = next(alert.text for alert in find_alerts(state, history) if alert.code == "expert-hot")
    assert "expert-parallel rank 3" in text


def look(free: int, t: float = 1e9, **more) -> HostLook:
    return HostLook(t, free, 1000 * GIB, "/runs", **more)


def test_a_disk_that_is_full_or_fills_is_told():
    history, state = play(10)
    history.note_look(look(20 * GIB))
    assert codes(state, history) == ["disk-filling"]
    history, state = play(10)
    for i in range(4):
        history.note_look(look((100 - 10 * i) * GIB, t=1e9 + 60 * i))
    alert = only(state, history)
    assert alert.code == "disk-filling"
    assert "full in 7 m" in alert.text


def test_an_old_checkpoint_is_told_when_there_is_one(tmp_path):
    history, state = play(10)
    (tmp_path / "checkpoint-10").mkdir()
    seen = look_at_files(tmp_path, str(tmp_path))
    assert seen is not None
    assert seen.checkpoint_t is not None
    history.note_look(replace(seen, disk_free=seen.disk_total))
    now = seen.checkpoint_t + 3 * 3600
    assert codes(replace(state, now=now), history) == ["checkpoint-old"]
    assert find_alerts(replace(state, now=now), history, AlertLimits(checkpoint_s=4 * 3600)) == ()


def test_a_checkpoint_is_old_by_the_pace_at_which_the_run_saved_before(tmp_path):
    history, state = play(10)
    for number in range(3):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        os.utime(folder, (1e9 + 3600 * number,) * 2)
    seen = look_at_files(tmp_path, str(tmp_path))
    assert seen is not None
    history.note_look(replace(seen, disk_free=seen.disk_total))
    last = 1e9 + 2 * 3600
    assert codes(replace(state, now=last + 1.25 * 3600), history) == []
    assert codes(replace(state, now=last + 1.75 * 3600), history) == ["checkpoint-old"]
    state = replace(state, manifest=Manifest(run="r", started=last + 3600))
    assert codes(replace(state, now=last + 1.75 * 3600), history) == []


def test_a_missed_plan_is_told_on_gpus_and_not_on_cpu():
    history, state = play(20)
    predicted = {"memory": {"reserved": 10 * GIB}, "time": {"tokens_per_s_per_gpu": 1000.0}}
    state = replace(state, manifest=Manifest(run="r", predicted=predicted), tokens_per_s=1200.0)
    assert codes(state, history) == []
    for rank in (0, 1):
        state = with_rank(state, rank, device=f"cuda:{rank}", reserved=13 * GIB)
    texts = [alert.text for alert in find_alerts(state, history)]
    assert len(texts) == 2
    assert "+30%" in texts[0]
    assert "-40%" in texts[1]


def test_errors_come_first():
    history, state = play(20, change=lambda rank, step: {"loss": math.nan, "tokens": 1000 + 1500 * rank})
    assert [alert.severity for alert in find_alerts(state, history)] == ["error", "warning"]


def alert(code: str, *ranks: int, text: str = "x") -> Alert:
    return Alert(code, "warning", text, ranks)


def test_the_book_tells_each_alert_once():
    book = AlertBook()
    assert [a.code for a in book.update([alert("a", 1), alert("b")], 1.0)] == ["a", "b"]
    assert book.update([alert("a", 1, text="newer"), alert("b")], 2.0) == []
    assert [entry.alert.text for entry in book.open()] == ["x", "newer"]


def test_an_alert_about_more_ranks_is_the_same_alert():
    book = AlertBook()
    book.update([alert("a", 1)], 1.0)
    assert book.update([alert("a", 1, 2)], 2.0) == []
    [entry] = book.entries()
    assert entry.alert.ranks == (1, 2)
    assert entry.until is None


def test_what_was_acknowledged_stays_so_while_it_lasts_and_is_new_after_a_pause():
    book = AlertBook(quiet_s=60.0)
    book.update([alert("a", 1)], 1.0)
    assert book.acknowledge() == 1
    assert book.open() == []
    book.update([], 2.0)
    book.update([alert("a", 1)], 30.0)
    assert book.open() == []
    book.update([], 31.0)
    assert [a.code for a in book.update([alert("a", 1)], 200.0)] == ["a"]
    assert len(book.open()) == 1


def test_the_book_is_bounded():
    book = AlertBook(quiet_s=0.5, limit=10)
    for i in range(100):
        book.update([alert("a", i)], float(i))
    assert len(book.entries()) <= 12
