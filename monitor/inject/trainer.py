"""The Trainer's callback for scripts that do not know of it: silent until training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftdash.monitor.inject.own import Follower


def callback_class(follower: Follower) -> type:
    """A class for the Trainer's default callbacks; while one trains, `follower` leaves the steps to it."""
    from ftdash.monitor.hook.core import Hook
    from ftdash.monitor.hook.trainer import FtdashCallback

    class InjectedCallback(FtdashCallback):
        """FtdashCallback that opens its hook when training begins, if nobody else reports by then."""

        def __init__(self) -> None:
            super().__init__(Hook(None, 0))

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            from ftdash.monitor.inject.own import somebody_reports

            follower.stop()
            if self.hook.run_dir is None and not somebody_reports():
                self.hook = Hook.start()
                super().on_train_begin(args, state, control, model=model, **more)

    return InjectedCallback
