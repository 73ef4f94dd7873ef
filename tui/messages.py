"""The messages that cross between reader threads, widgets and panes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from ftdash.engine.plan import Plan
    from ftdash.monitor.rundir import RunDir


class RunUpdated(Message):
    """The feed has something newer; whoever draws takes the newest state from it."""


class RunChosen(Message):
    """A person picked a run to watch."""

    def __init__(self, run: RunDir, pane: str | None = None) -> None:
        super().__init__()
        self.run = run
        self.pane = pane


class PlanHandedOver(Message):
    """The Plan pane hands its plan to Launch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class Changed(Message):
    """An input holds a new value (a float for sliders, the option's key for choices)."""

    def __init__(self, control: object, name: str, value: float | str) -> None:
        super().__init__()
        self.origin = control
        self.name = name
        self.value = value
