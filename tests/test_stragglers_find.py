"""Stragglers: found within ten steps with their cause; equal ranks raise nothing in ten thousand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from msgspec import structs

from ftdash.monitor.alerts import find_alerts
from ftdash.monitor.history import RunHistory
from ftdash.monitor.state import GpuState, RankState
from ftdash.monitor.straggler_causes import explain, slow_hosts
from ftdash.monitor.stragglers import Straggler, StragglerDetector
from tests.support.runs import run_state, with_rank


class StepTimes(NamedTuple):
    """The parts of one step of one rank, in seconds; tokens are label tokens."""

    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    step_s: float
    tokens: int = 0
    t: float = 0.0


USUAL = {"data": 0.02, "forward": 0.2, "backward": 0.4, "optimizer": 0.1}


def synchronous(
    ranks: int,
    steps: int,
    *,
    noise: float = 0.04,
    slow: Callable[[int, int, str], float] = lambda rank, step, phase: 1.0,
    seed: int = 0,
    tokens: Callable[[int], int] = lambda rank: 1000,
):
    """Steps of ranks that wait for one another at the end of backward, one list of StepTimes a step.

    Times are log-normal, and one in a hundred is three times as long: the spikes of real machines.
    """
    source = random.Random(seed)
    for step in range(steps):
        parts = [
            {
                phase: usual
                * source.lognormvariate(0, noise)
                * (3 if source.random() < 0.01 else 1)
                * slow(rank, step, phase)
                for phase, usual in USUAL.items()
            }
            for rank in range(ranks)
        ]
        ready = [part["data"] + part["forward"] + part["backward"] for part in parts]
        yield [
            StepTimes(
                part["data"],
                part["forward"],
                part["backward"] + max(ready) - own,
                part["optimizer"],
                max(ready) + part["optimizer"],
                tokens(rank),
            )
            for rank, (part, own) in enumerate(zip(parts, ready, strict=True))
        ]


def first_found(ranks: int, steps: int, begins: int, **options) -> tuple[int, Straggler]:
    """How many slow steps it took, and what was found. Fails when nothing was, or on a wrong rank."""
    detector = StragglerDetector()
    detector.expect(range(ranks))
    for step, times in enumerate(synchronous(ranks, steps, **options)):
        for rank, entry in enumerate(times):
            detector.add(rank, step, entry)
        if detector.found:
            assert len(detector.found) == 1, detector.found
            return step - begins + 1, detector.found[0]
    raise AssertionError("no straggler found")


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
@pytest.mark.parametrize("seed", range(3))
def test_a_slowdown_of_1_3_is_found_within_ten_steps(ranks, phase, seed):
    took, found = first_found(
        ranks,
        60,
        20,
        seed=seed,
        slow=lambda rank, step, p: 1.3 if (rank, p) == (1, phase) and step >= 20 else 1.0,
    )
    assert took <= 10
    assert (found.rank, found.phase) == (1, phase)
    assert 1.18 < found.slowdown < 1.45
    assert 16 <= found.since_step <= 24


def test_a_straggler_from_the_first_step_is_found():
    took, found = first_found(2, 12, 0, slow=lambda rank, step, p: 1.3 if rank == 0 else 1.0)
    assert took <= 10
    assert found.rank == 0


def test_waiting_for_data_is_named_as_such_and_the_one_that_waits_for_it_is_innocent():
    took, found = first_found(
        2, 40, 10, slow=lambda rank, step, p: 15.0 if (rank, p) == (1, "data") and step >= 10 else 1.0
    )
    assert took <= 10
    assert (found.rank, found.phase) == (1, "data")
    assert found.excess_s == pytest.approx(0.28, rel=0.3)


@pytest.mark.parametrize(
    ("ranks", "noise"),
    [
        (2, 0.3),
        pytest.param(4, 0.05, marks=pytest.mark.slow),
        pytest.param(2, 0.05, marks=pytest.mark.slow),
        pytest.param(4, 0.15, marks=pytest.mark.slow),
        pytest.param(8, 0.05, marks=pytest.mark.slow),
    ],
)
def test_equal_ranks_raise_nothing_in_ten_thousand_steps(ranks, noise):
    detector = StragglerDetector()
    detector.expect(range(ranks))
    for step, times in enumerate(synchronous(ranks, 10_000, noise=noise, seed=7)):
        for rank, entry in enumerate(times):
            detector.add(rank, step, entry)
        assert detector.found == (), f"step {step}"


def test_a_phase_that_costs_nothing_is_not_worth_a_word():
    detector = StragglerDetector()
    detector.expect(range(4))
    for step in range(40):
        for rank in range(4):
            data = 0.004 if rank == 2 else 0.001
            detector.add(rank, step, StepTimes(data, 0.5, 0.5, 0.05, 1.05))
    assert detector.found == ()


def waits_in_backward(slow_phase: str) -> Iterator[list[StepTimes]]:
    """Two ranks that meet at the end of backward. The second is slow, also when the next step has begun."""
    ends = [0.0, 0.0]
    source = random.Random(3)
    for _ in range(60):
        parts = [{p: usual * source.lognormvariate(0, 0.04) for p, usual in USUAL.items()} for _ in ends]
        parts[1][slow_phase] *= 2
        begun = list(ends)
        met = max(end + sum(part.values()) - part["optimizer"] for end, part in zip(ends, parts, strict=True))
        ends = [met + part["optimizer"] for part in parts]
        yield [
            StepTimes(
                part["data"],
                part["forward"],
                met - begin - part["data"] - part["forward"],
                part["optimizer"],
                end - begin,
                t=end,
            )
            for part, begin, end in zip(parts, begun, ends, strict=True)
        ]


@pytest.mark.parametrize("phase", ["data", "forward", "optimizer"])
def test_a_rank_that_the_others_wait_for_in_the_next_backward_is_found(phase):
    detector = StragglerDetector()
    detector.expect(range(2))
    for step, times in enumerate(waits_in_backward(phase)):
        for rank, entry in enumerate(times):
            detector.add(rank, step, entry)
    (found,) = detector.found
    assert (found.rank, found.phase) == (1, phase)


def found_by_rank(ranks: int, steps: int, **options) -> dict[int, set[str]]:
    """Every rank that was ever found, with the phases."""
    detector = StragglerDetector()
    detector.expect(range(ranks))
    found: dict[int, set[str]] = {}
    for step, times in enumerate(synchronous(ranks, steps, **options)):
        for rank, entry in enumerate(times):
            detector.add(rank, step, entry)
        for entry in detector.found:
            found.setdefault(entry.rank, set()).add(entry.phase)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_two_of_four_are_found_where_ranks_share_processors_and_no_step_is_like_the_other(seed):
    found = found_by_rank(
        4,
        150,
        noise=0.3,
        seed=seed,
        slow=lambda rank, step, phase: 1.7 if rank in (1, 2) and phase == "forward" else 1.0,
    )
    assert found.keys() == {1, 2}


def test_a_rank_that_is_stopped_in_every_other_step_is_found_and_hiccups_of_all_are_none():
    def stopped(rank: int, step: int, phase: str) -> float:
        return 2.0 if (rank, phase, step % 2) == (2, "forward", 0) else 1.0

    def hiccup(rank: int, step: int, phase: str) -> float:
        return 4.0 if phase == "forward" and step % 2 == 0 and step // 2 % 4 == rank else 1.0

    assert found_by_rank(4, 80, slow=stopped) == {2: {"forward"}}
    assert found_by_rank(4, 80, slow=hiccup) == {}


def test_ten_unlucky_steps_among_unsteady_ones_are_no_straggler():
    """A rank that others keep from its processor for a second, in a phase that is a tenth of the step."""
    options = {"noise": 0.2, "seed": 1}
    unlucky = {"slow": lambda rank, step, p: 4.0 if (rank, p) == (1, "data") and 50 <= step < 60 else 1.0}
    assert found_by_rank(2, 100, **options, **unlucky) == {}
    for_good = {"slow": lambda rank, step, p: 4.0 if (rank, p) == (1, "data") and step >= 50 else 1.0}
    assert found_by_rank(2, 100, **options, **for_good) == {1: {"data"}}


def test_it_is_told_since_when_also_when_the_past_is_not_known():
    _, late = first_found(2, 60, 20, slow=lambda rank, step, p: 1.5 if rank and step >= 20 else 1.0)
    assert not late.or_earlier
    _, always = first_found(2, 60, 0, slow=lambda rank, step, p: 1.5 if rank else 1.0)
    assert always.or_earlier


def test_a_straggler_that_recovers_is_forgotten():
    detector = StragglerDetector()
    detector.expect(range(2))
    times = synchronous(2, 80, slow=lambda rank, step, p: 1.5 if rank and 10 <= step < 30 else 1.0)
    seen = []
    for step, entries in enumerate(times):
        for rank, entry in enumerate(entries):
            detector.add(rank, step, entry)
        seen.append(bool(detector.found))
    assert any(seen[15:30])
    assert not any(seen[70:])


def test_ranks_that_report_in_any_order_are_compared_step_by_step():
    detector = StragglerDetector()
    steps = list(synchronous(2, 30, slow=lambda rank, step, p: 1.5 if rank else 1.0))
    for rank in (0, 1):  # all of one rank before the other, and before it is known who takes part
        for step, entries in enumerate(steps):
            detector.add(rank, step, entries[rank])
    assert detector.found == ()
    detector.expect(range(2))
    assert [entry.rank for entry in detector.found] == [1]


def test_a_rank_that_left_is_not_waited_for():
    detector = StragglerDetector()
    detector.expect(range(3))
    steps = list(synchronous(3, 60, slow=lambda rank, step, p: 1.5 if rank == 1 else 1.0))
    for step, entries in enumerate(steps):
        if step == 20:
            detector.expect(range(2))
        for rank in range(3 if step < 20 else 2):
            detector.add(rank, step, entries[rank])
    assert [entry.rank for entry in detector.found] == [1]


def test_memory_is_bounded_whatever_comes():
    detector = StragglerDetector()
    for step in range(5000):
        detector.add(0, step, StepTimes(0.01, 0.1, 0.1, 0.01, 0.22))  # rank 1 never reports
    assert len(detector._pending) <= 65
    detector.expect(range(2))
    for step in range(5000, 9000):
        detector.add(0, step, StepTimes(0.01, 0.1, 0.1, 0.01, 0.22))
    assert len(detector._pending) <= 66


SLOW = Straggler(rank=1, phase="forward", slowdown=1.3, excess_s=0.1, since_step=5, step=12)


def cause(tokens: dict[int, float] | None = None, **rank) -> str:
    ranks = {r.rank: r for r in with_rank(run_state(4), 1, **rank).ranks}
    return explain(SLOW, ranks, tokens or {}).cause


def on_gpu(**changes) -> dict[int, RankState]:
    usual = GpuState(0, sm_mhz=1900, throttle=("power cap",), pcie_width=16)
    members = [
        structs.replace(rank, gpu=structs.replace(usual, index=rank.rank)) for rank in run_state(4).ranks
    ]
    sick = structs.replace(usual, index=1, **changes)
    members[1] = structs.replace(members[1], gpu=sick)
    return {rank.rank: rank for rank in members}


def test_causes_are_told_from_what_the_rank_shows_and_its_peers_do_not():
    assert "state T" in cause(process_state="T")
    assert "state D" in cause(process_state="D")
    members = {r.rank: r for r in run_state(4).ranks}
    assert "state T" in explain(SLOW, members, {}, ("S", "T", "R", "T", "S")).cause
    assert "gets 40% of a core" in cause(cpu=40.0)
    assert "larger" in cause(tokens={0: 1000.0, 1: 1400.0, 2: 1000.0, 3: 1000.0})
    assert cause() == "no cause visible from here"
    assert (
        "thermal"
        in explain(SLOW, on_gpu(throttle=("power cap", "thermal (hardware)"), sm_mhz=1200), {}).cause
    )
    assert "1200 MHz" in explain(SLOW, on_gpu(sm_mhz=1200), {}).cause
    assert "PCIe x8" in explain(SLOW, on_gpu(pcie_width=8), {}).cause
    assert "lost" in explain(SLOW, on_gpu(state="lost"), {}).cause
    data = replace(SLOW, phase="data")
    assert "waiting for data" in explain(data, {r.rank: r for r in run_state(4).ranks}, {}).cause


def test_a_throttle_that_all_peers_share_explains_nothing():
    assert explain(SLOW, on_gpu(), {}).cause == "no cause visible from here"


def test_most_ranks_of_one_host_are_one_finding_about_the_host():
    members = [structs.replace(r, host=f"gpu-{'ab'[r.rank // 4]}") for r in run_state(8).ranks]
    ranks = {rank.rank: rank for rank in members}
    slow = [replace(SLOW, rank=rank, host="gpu-b") for rank in (4, 5, 6)]
    assert list(slow_hosts(slow, ranks)) == ["gpu-b"]
    assert slow_hosts(slow[:1], ranks) == {}


def test_the_alert_names_rank_phase_cost_and_cause():
    history = RunHistory()
    state = run_state(4)
    history.observe(state, look=False)
    slow = lambda rank, step, phase: 1.3 if (rank, phase) == (2, "forward") else 1.0  # noqa: E731
    for step, times in enumerate(synchronous(4, 20, slow=slow)):
        for rank, entry in enumerate(times):
            history.stragglers.add(rank, step, entry)
    found = [a for a in find_alerts(with_rank(state, 2, cpu=60.0), history) if a.code == "straggler"]
    assert [alert.ranks for alert in found] == [(2,)]
    assert "forward" in found[0].text
    assert "60% of a core" in found[0].text
