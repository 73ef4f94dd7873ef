"""Knows how to find out why a distributed run does not move, and which rank holds the others up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftdash.monitor.diagnosis.model import Diagnosis, Sample


def diagnose(evidence_samples: Sequence[Sample]) -> Diagnosis:
    """The verdict on one or two samples of the same incident, oldest first."""
    from ftdash.monitor.diagnosis.weigh import diagnose as weigh

    return weigh(evidence_samples)


__all__ = ["diagnose"]
