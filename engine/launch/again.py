"""Puts new agents beside ranks on other machines whose own agents have died: samples go on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from ftdash.monitor.liveness import FINAL
from ftdash.monitor.rundir import RunDir, RunError
from ftdash.monitor.state import RunState

TRIES = 3  # a node that is gone takes no agent
BETWEEN_TRIES_S = 60.0


@dataclass(slots=True)
class _Tried:
    times: int = 0
    due: float = 0.0  # monotonic


class NewAgents:
    """For a reader that stays: `look` at each of its states. Never blocks; several readers do no harm, since
    a node that has an agent takes no other."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._tried: dict[str, _Tried] = {}
        self._busy = threading.Lock()
        self.told = ""  # what has come of it last

    def look(self, state: RunState) -> RunState:
        """The state, with what has come of it; silent machines are seen to in a thread."""
        if state.state in FINAL or state.manifest.attached:
            return state
        now = time.monotonic()
        due = {host for host in silent_hosts(state) if self._tried.setdefault(host, _Tried()).due <= now}
        if due and self._busy.acquire(blocking=False):
            for host in due:
                tried = self._tried[host]
                tried.times += 1
                tried.due = now + BETWEEN_TRIES_S if tried.times < TRIES else float("inf")
            threading.Thread(target=self._start, args=(due,), name="new-agents", daemon=True).start()
        return replace(state, notices=(*state.notices, self.told)) if self.told else state

    def _start(self, hosts: set[str]) -> None:
        names = ", ".join(sorted(hosts))
        try:
            if start_on(self._run, hosts):
                gone = f"the agent on {names} was gone: another is"
                if len(hosts) > 1:
                    gone = f"the agents on {names} were gone: others are"
                self.told = f"{gone} beside the ranks"
        except RunError as error:
            self.told = f"no new agent beside the ranks: {error}"
        finally:
            self._busy.release()


def silent_hosts(state: RunState) -> set[str]:
    """Other machines of the run whose agents have fallen silent."""
    ranks = {rank for alert in state.alerts if alert.code == "node-silent" for rank in alert.ranks}
    return {rank.host for rank in state.ranks if rank.rank in ranks}


def offered(state: RunState) -> RunState:
    """The state, with what a person can do about silent machines."""
    if state.state in FINAL or state.manifest.attached or not silent_hosts(state):
        return state
    offer = f"a new agent on each of the silent nodes: ftdash agent --adopt {state.run}"
    return replace(state, notices=(*state.notices, offer))


def start_on(run: RunDir, hosts: set[str]) -> bool:
    """Start agents there; False for a run that has no other machines. Raises RunError."""
    from ftdash.engine.launch.nodes import reach_of

    reach = reach_of(run)
    if reach is None or not hosts:
        return False
    reach.watch(hosts)
    return True
