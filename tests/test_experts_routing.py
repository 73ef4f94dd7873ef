"""Expert routing: the figures by their formulas, and judgements that small samples do not fool."""

from __future__ import annotations

import math
import random

import pytest

from ftdash.monitor.experts import (
    ExpertHistory,
    expert_parallel_cost,
    extremes,
    host_of_expert,
    layer_load,
    loads,
)
from ftdash.monitor.state import ExpertLayer


def test_even_routing_has_the_ideal_figures():
    figures = layer_load(0, [100] * 8)
    assert figures.imbalance == 1.0
    assert figures.variation == 0.0
    assert figures.entropy == pytest.approx(1.0)
    assert figures.dead == figures.hot == ()


def test_figures_follow_their_formulas():
    counts = [300, 100, 0, 0]
    figures = layer_load(2, counts)
    assert loads(counts) == [3.0, 1.0, 0.0, 0.0]
    assert figures.imbalance == 3.0
    assert figures.variation == pytest.approx(math.sqrt((4 + 0 + 1 + 1) / 4))
    assert figures.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert figures.dead == (2, 3)
    assert figures.hot == ((0, 3.0),)


def test_no_tokens_is_no_judgement():
    figures = layer_load(0, [0, 0, 0])
    assert (figures.tokens, figures.imbalance, figures.dead) == (0, 0.0, ())
    assert ExpertLayer(0, (0, 0)).imbalance == 0.0


def test_an_expert_that_few_tokens_missed_by_chance_is_not_dead():
    assert layer_load(0, [3, 0, 2, 1]).dead == ()


def test_a_fair_router_with_small_batches_raises_nothing():
    source = random.Random(3)
    history = ExpertHistory()
    for _ in range(3000):
        counts = [0] * 16
        for _ in range(64):
            counts[source.randrange(16)] += 1
        history.add(0, counts)
    assert len(history.series(0)) > 100
    assert history.dead() == history.hot() == history.collapsed() == []


def test_a_dead_expert_is_found_through_small_batches():
    source = random.Random(4)
    history = ExpertHistory()
    for _ in range(100):
        counts = [0] * 16
        for _ in range(64):
            counts[source.choice([i for i in range(16) if i != 5])] += 1
        history.add(7, counts)
    assert history.dead() == [(7, 5)]


def test_an_expert_that_comes_back_is_alive():
    history = ExpertHistory()
    for _ in range(5):
        history.add(0, [100, 0, 100, 100])
    assert history.dead() == [(0, 1)]
    history.add(0, [100, 50, 100, 100])
    assert history.dead() == []


def test_narrowing_is_judged_against_the_runs_own_start():
    skewed = ExpertHistory()
    for _ in range(20):
        skewed.add(0, [2000, 50, 50, 50, 50, 50, 50, 50])  # from the beginning: nothing narrows
    assert skewed.collapsed() == []
    history = ExpertHistory()
    for _ in range(6):
        history.add(0, [100] * 8)
    for _ in range(6):
        history.add(0, [2000, 50, 50, 50, 50, 50, 50, 50])
    [(layer, start, now)] = history.collapsed()
    assert (layer, start) == (0, pytest.approx(1.0))
    assert now < 0.75


def test_experts_are_hosted_in_contiguous_blocks():
    assert [host_of_expert(expert, 8, 4) for expert in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="does not divide"):
        host_of_expert(0, 8, 3)


def test_the_cost_is_the_fullest_ranks_load_over_the_mean():
    assert expert_parallel_cost([100, 100, 300, 300], 2) == (1, 1.5)
    assert expert_parallel_cost([0, 0, 0, 0], 2) == (0, 1.0)


def test_many_layers_stay_readable_by_their_extremes():
    layers = [
        ExpertLayer(layer, tuple(100 + (layer == 93 and expert == 7) * 900 for expert in range(128)))
        for layer in range(94)
    ]
    hottest, coldest = extremes(layers, k=3)
    assert hottest[0][:2] == (93, 7)
    assert len(hottest) == len(coldest) == 3


def test_history_is_bounded_and_follows_a_change_of_the_number_of_experts():
    history = ExpertHistory()
    for _ in range(1000):
        history.add(0, [100] * 8)
    assert len(history.series(0)) == 240
    history.add(0, [100] * 4)
    assert len(history.series(0)) == 1
