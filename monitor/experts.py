"""How evenly a mixture of experts routes: load over ideal, dead and hot experts, entropy, what it costs.

Load is tokens routed to an expert over the mean of its layer: 1 is ideal. Entropy is that of the routing
shares divided by log(experts): 1 is even, 0 is one expert for all. The coefficient of variation is the
standard deviation of the loads (Shazeer et al. 2017, "Outrageously Large Neural Networks", section 4).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from ftdash.monitor.state import ExpertLayer, RoutingPoint

MEANT_TOKENS = 30.0  # an even router leaves an expert of this mean load without tokens with p = e^-30
HOT_LOAD = 3.0
DEAD_RECORDS = 3  # an expert is dead after this many records without a token
KEPT_RECORDS = 240
COLLAPSE_DROP = 0.15  # of entropy, against the run's own first records
COLLAPSE_ENTROPY = 0.75

ADVICE = (
    "raise the auxiliary loss coefficient (output_router_logits=True, router_aux_loss_coef), or freeze the"
    " router when the data is small; for RL use sequence-level importance ratios as in GSPO"
)


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One layer's routing. `dead` had no token although an even router would have sent many; `hot` carry
    several times the ideal load. All empty or zero when the layer saw no tokens."""

    layer: int
    tokens: int
    imbalance: float
    variation: float
    entropy: float
    dead: tuple[int, ...]
    hot: tuple[tuple[int, float], ...]  # (expert, load)


def loads(counts: Sequence[int]) -> list[float]:
    """Load over ideal by expert; zeros when there are no tokens."""
    total = sum(counts)
    return [count * len(counts) / total for count in counts] if total else [0.0] * len(counts)


def hot_load(experts: int) -> float:
    """The load from which an expert counts as hot: 3, or less when few experts cannot reach it."""
    return min(HOT_LOAD, max(1.5, experts / 2))


def layer_load(layer: int, counts: Sequence[int]) -> LayerLoad:
    """The figures of one layer from tokens per expert."""
    total, experts = sum(counts), len(counts)
    if not total or experts < 2:
        return LayerLoad(layer, total, 1.0 if total else 0.0, 0.0, 1.0 if total else 0.0, (), ())
    relative = loads(counts)
    variation = math.sqrt(sum((load - 1.0) ** 2 for load in relative) / experts)
    entropy = -sum(c / total * math.log(c / total) for c in counts if c) / math.log(experts)
    mean = total / experts
    enough = mean >= MEANT_TOKENS
    limit = hot_load(experts)
    return LayerLoad(
        layer=layer,
        tokens=total,
        imbalance=max(relative),
        variation=variation,
        entropy=entropy,
        dead=tuple(i for i, count in enumerate(counts) if enough and count == 0),
        hot=tuple((i, load) for i, load in enumerate(relative) if enough and load >= limit),
    )


def extremes(layers: Sequence[ExpertLayer], k: int = 5) -> tuple[list[tuple[int, int, float]], ...]:
    """The k hottest and the k coldest experts of all layers, each as (layer, expert, load over ideal)."""
    every = [
        (layer.layer, expert, load) for layer in layers for expert, load in enumerate(loads(layer.counts))
    ]
    every.sort(key=lambda item: item[2])
    return every[::-1][:k], every[:k]


def host_of_expert(expert: int, experts: int, ep: int) -> int:
    """The expert-parallel rank that hosts an expert: experts are split into `ep` contiguous blocks.

    Raises ValueError when ep does not divide the number of experts.
    """
    if ep < 1 or experts % ep:
        raise ValueError(f"expert parallelism {ep} does not divide {experts} experts")
    return expert // (experts // ep)


def expert_parallel_cost(counts: Sequence[int], ep: int) -> tuple[int, float]:
    """The expert-parallel rank with most tokens, and its load over the mean: the expert part of the step
    takes this many times as long as it would under even routing, since all wait for the fullest rank."""
    block = len(counts) // ep
    sums = [sum(counts[i * block : (i + 1) * block]) for i in range(ep)]
    total = sum(sums)
    if not total:
        return 0, 1.0
    fullest = max(range(ep), key=sums.__getitem__)
    return fullest, sums[fullest] * ep / total


class RoutingTimeline:
    """How evenly one rank's tokens were routed over the whole run: means over its layers, in bounded memory.

    Of one rank, because adding up the counts of a thousand for every step would cost more than all the rest.
    """

    def __init__(self, limit: int = KEPT_RECORDS) -> None:
        self.limit = limit
        self._points: dict[int, RoutingPoint] = {}
        self._step = -1
        self._layers: dict[int, Sequence[int]] = {}
        self._sorted: tuple[RoutingPoint, ...] | None = None

    def add(self, step: int, layer: int, counts: Sequence[int]) -> None:
        """Tokens per expert of one layer; the layers of one step come one after another."""
        if step != self._step:
            self._close()
            self._step = step
        self._layers[layer] = counts
        self._sorted = None

    def points(self) -> tuple[RoutingPoint, ...]:
        """Oldest first; the newest step as far as its layers are known. The same until there is more."""
        if self._sorted is None:
            layers = dict(self._layers)
            self._close()
            self._layers = layers
            self._sorted = tuple(self._points[step] for step in sorted(self._points))
        return self._sorted

    def _close(self) -> None:
        """Make the point of the step whose layers came last."""
        self._sorted = None
        figures = [layer_load(layer, counts) for layer, counts in self._layers.items() if sum(counts)]
        if figures:
            variation = sum(layer.variation for layer in figures) / len(figures)
            entropy = sum(layer.entropy for layer in figures) / len(figures)
            self._points[self._step] = RoutingPoint(self._step, variation, entropy)
        self._layers = {}
        if len(self._points) > 2 * self.limit:
            for step in sorted(self._points)[1:-1:2]:
                del self._points[step]


class ExpertHistory:
    """Routing over time: figures of the newest 240 records a layer, and for how long experts were silent.

    Small batches send few tokens to each expert, so counts are added up until the mean load is large
    enough to judge.
    """

    def __init__(self) -> None:
        self._sums: dict[int, list[int]] = {}
        self._silent: dict[int, list[int]] = {}
        self._series: dict[int, deque[LayerLoad]] = {}
        self._first: dict[int, list[float]] = {}
        self._earlier: dict[tuple[int, int], list[int]] = {}  # by step and layer

    def add_earlier(self, step: int, layer: int, counts: Sequence[int]) -> None:
        """Counts of one rank that a newer record of it has followed. They wait for those of other ranks."""
        sums = self._earlier.get((step, layer), ())
        self._earlier[step, layer] = [a + b for a, b in zip_longest(sums, counts, fillvalue=0)]

    def settle(self) -> None:
        """Take in what waits, oldest first."""
        for step, layer in sorted(self._earlier):
            self.add(layer, self._earlier[step, layer])
        self._earlier.clear()

    def add(self, layer: int, counts: Sequence[int]) -> None:
        """The counts of one layer since the last record, summed over ranks."""
        sums = self._sums.get(layer)
        if sums is None or len(sums) != len(counts):
            sums = self._sums[layer] = [0] * len(counts)
            self._silent[layer] = [0] * len(counts)
            self._series[layer] = deque(maxlen=KEPT_RECORDS)
            self._first[layer] = []
        for i, count in enumerate(counts):
            sums[i] += count
        if sum(sums) < MEANT_TOKENS * len(sums):
            return
        figures = layer_load(layer, sums)
        self._series[layer].append(figures)
        if len(self._first[layer]) < 3:
            self._first[layer].append(figures.entropy)
        silent = self._silent[layer]
        for i, count in enumerate(sums):
            silent[i] = 0 if count else silent[i] + 1
        self._sums[layer] = [0] * len(sums)

    def series(self, layer: int) -> tuple[LayerLoad, ...]:
        """The figures of one layer, oldest first."""
        return tuple(self._series.get(layer, ()))

    def layers(self) -> list[int]:
        return sorted(self._series)

    def dead(self) -> list[tuple[int, int]]:
        """(layer, expert) without a token for three judged records in a row."""
        return [
            (layer, expert)
            for layer in self.layers()
            for expert, records in enumerate(self._silent[layer])
            if records >= DEAD_RECORDS
        ]

    def hot(self) -> list[tuple[int, int, float]]:
        """(layer, expert, load) hot in each of the newest three judged records, the hottest first."""
        found: list[tuple[int, int, float]] = []
        for layer in self.layers():
            newest = list(self._series[layer])[-DEAD_RECORDS:]
            if len(newest) < DEAD_RECORDS:
                continue
            before = [{expert for expert, _ in figures.hot} for figures in newest[:-1]]
            found.extend(
                (layer, expert, load)
                for expert, load in newest[-1].hot
                if all(expert in experts for experts in before)
            )
        return sorted(found, key=lambda item: -item[2])

    def collapsed(self) -> list[tuple[int, float, float]]:
        """(layer, entropy at the start, entropy now) where routing has narrowed since the run began."""
        found = []
        for layer in self.layers():
            newest = [figures.entropy for figures in self._series[layer]][-DEAD_RECORDS:]
            if len(newest) < DEAD_RECORDS or len(self._series[layer]) < 2 * DEAD_RECORDS:
                continue
            start, now = median(self._first[layer]), median(newest)
            if now < COLLAPSE_ENTROPY and start - now > COLLAPSE_DROP:
                found.append((layer, start, now))
        return found
