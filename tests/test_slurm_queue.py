"""The queue watch spares the controller and never blocks a screen."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftdash.engine.slurm.client import Job, SlurmError
from ftdash.engine.slurm.queue import MAX_INTERVAL_S, MIN_INTERVAL_S, QueueView, QueueWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def settle(watch: QueueWatch, ready: Callable[[], bool]) -> None:
    """Wait for the thread that a view started."""
    end = threading.Event()
    for _ in range(500):
        if ready():
            return
        end.wait(0.01)
    raise AssertionError("the queue thread did not answer")


def free(watch: QueueWatch) -> bool:
    return not watch._busy.locked()


def test_the_controller_is_asked_once_for_many_views_and_again_only_when_due() -> None:
    asked, clock = [], Clock()

    def answer(user: str) -> QueueView:
        asked.append(user)
        return QueueView(jobs=(Job(id=str(len(asked))),))

    watch = QueueWatch(answer, user="me", clock=clock)
    watch.view()
    settle(watch, lambda: bool(asked) and free(watch))
    for _ in range(100):
        watch.view()
    assert asked == ["me"]
    clock.now += MIN_INTERVAL_S + 1
    watch.view()
    settle(watch, lambda: len(asked) == 2 and free(watch))
    assert watch.view().jobs[0].id == "2"


def test_a_dead_controller_keeps_the_last_queue_says_why_and_is_asked_less_and_less() -> None:
    clock, broken = Clock(), []

    def answer(user: str) -> QueueView:
        if broken:
            raise SlurmError("Unable to contact slurm controller")
        return QueueView(jobs=(Job(id="1"),))

    watch = QueueWatch(answer, user="me", clock=clock)
    watch.view()
    settle(watch, lambda: bool(watch._view.jobs) and free(watch))
    broken.append(True)
    for _ in range(8):
        clock.now += watch.interval_s + 1
        watch.view()
        settle(watch, lambda: free(watch))
    view = watch.view()
    assert view.jobs[0].id == "1"
    assert "Unable to contact" in view.error
    assert watch.interval_s == MAX_INTERVAL_S


def test_a_controller_that_hangs_does_not_hold_up_a_view() -> None:
    release, entered = threading.Event(), threading.Event()

    def answer(user: str) -> QueueView:
        entered.set()
        release.wait(10)
        return QueueView()

    watch = QueueWatch(answer, user="me")
    watch.view()
    assert entered.wait(5)
    assert watch.view() == QueueView()
    release.set()
