"""The tracker's categories beside the planner's terms, so that a difference can be told by what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from ftdash.engine.planner.result import Phase, Term


@dataclass(frozen=True, slots=True)
class TermPair:
    """Bytes of one kind at the simulated and at the planned peak."""

    name: str
    simulated: int
    planned: int


# The memory trackers' reference types (torch/distributed/_tools/mem_tracker.py, fsdp2_mem_tracker.py). What a
# block or the loss works on is a temporary to them and an activation or the logits to the planner.
_KINDS: tuple[tuple[str, frozenset[str], tuple[Term, ...]], ...] = (
    ("weights", frozenset({"Sharded Param", "Parameter"}), (Term.WEIGHTS,)),
    ("gradients", frozenset({"Sharded Grad", "Gradient"}), (Term.GRADIENTS,)),
    ("optimizer", frozenset({"OptState", "Optstate"}), (Term.OPTIMIZER,)),
    ("gathered", frozenset({"All Gather", "Unsharded Param"}), (Term.GATHERED,)),
    ("unsharded gradients", frozenset({"Reduce Scatter", "Unsharded Grad"}), (Term.BUFFERS,)),
)
REST = "activations and logits"


def side_by_side(breakdown: dict[str, int], phase: Phase) -> tuple[TermPair, ...]:
    """The simulated breakdown beside a planned phase, largest first. Both sums are kept: a category that is
    none of the others' is part of the activations."""
    planned = dict(phase.terms())
    pairs = []
    named: set[str] = set()
    for name, categories, terms in _KINDS:
        named |= categories
        simulated = sum(size for category, size in breakdown.items() if category in categories)
        pairs.append(TermPair(name, simulated, sum(planned[term] for term in terms)))
    rest = sum(size for category, size in breakdown.items() if category not in named)
    pairs.append(TermPair(REST, rest, planned[Term.ACTIVATIONS] + planned[Term.LOGITS]))
    found = [pair for pair in pairs if pair.simulated or pair.planned]
    return tuple(sorted(found, key=lambda pair: -max(pair.simulated, pair.planned)))
