"""How evenly experts were used over a run: from the first rank's records, old and new, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftdash.monitor.experts import RoutingTimeline
from ftdash.monitor.records import Experts, Meta, Step, encode_line
from tests.support.live_runs import make_run, read


def test_a_point_is_the_mean_over_the_layers_of_a_step():
    timeline = RoutingTimeline()
    timeline.add(10, 0, [10, 10, 10, 10])
    timeline.add(10, 1, [40, 0, 0, 0])
    timeline.add(20, 0, [10, 10, 10, 10])
    first, second = timeline.points()
    assert (first.step, first.entropy) == (10, pytest.approx(0.5))
    assert first.variation == pytest.approx(3**0.5 / 2)  # of loads 4, 0, 0, 0 the deviation is √3
    assert (second.step, second.variation, second.entropy) == (20, 0.0, pytest.approx(1.0))


def test_a_step_counts_as_far_as_its_layers_are_known():
    timeline = RoutingTimeline()
    timeline.add(10, 0, [10, 10])
    assert timeline.points()[0].entropy == pytest.approx(1.0)
    timeline.add(10, 1, [20, 0])
    assert [point.step for point in timeline.points()] == [10]
    assert timeline.points()[0].entropy == pytest.approx(0.5)


def test_layers_without_tokens_say_nothing():
    timeline = RoutingTimeline()
    timeline.add(10, 0, [0, 0])
    assert timeline.points() == ()


def test_memory_is_bounded_and_both_ends_of_the_run_stay():
    timeline = RoutingTimeline(limit=50)
    for step in range(10_000):
        timeline.add(step, 0, [step, 10_000 - step])
    points = timeline.points()
    assert len(points) <= 101
    assert (points[0].step, points[-1].step) == (0, 9_999)
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_a_run_that_is_opened_late_shows_the_routing_of_its_past(tmp_path: Path):
    run = make_run(tmp_path, world_size=2, state="finished")
    for rank in (0, 1):
        lines = [Meta(t=1.0, rank=rank, local_rank=rank, world_size=2, host="h", pid=1, device="cpu")]
        for step in range(1, 12_001):
            lines.append(Step(t=float(step), step=step, loss=1.0, tokens=10, step_s=0.1, data_s=0.01))
            if step % 10 == 0:
                counts = [100, 100, 100, 100 if rank == 0 else 0]
                counts[1] = 100 if step < 6_000 else 0
                lines.append(Experts(t=float(step), step=step, layer=0, counts=counts))
        run.rank_file(rank).write_bytes(b"".join(map(encode_line, lines)))
    assert run.rank_file(0).stat().st_size > 1 << 20  # large enough to be entered near its end
    routing = read(run).routing
    assert routing[0].step < 6_000
    assert routing[0].variation == pytest.approx(0.0)  # of the first rank alone
    assert routing[-1].step == 12_000
    assert routing[-1].entropy < 0.8
