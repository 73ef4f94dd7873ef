"""A plan made small and run for a few steps on this CPU, to prove what needs no GPU."""

from ftdash.engine.rehearse.result import Rehearsal
from ftdash.engine.rehearse.run import rehearse
from ftdash.engine.rehearse.small import RehearsalError

__all__ = ["Rehearsal", "RehearsalError", "rehearse"]
